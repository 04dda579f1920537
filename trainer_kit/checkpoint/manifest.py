"""The manifest: what a checkpoint folder contains, as one JSON file. Its presence is what makes the folder a checkpoint.

Not here: reading and writing tensors. The file is `{"crc32":N,"manifest":{...}}`, N being the checksum of the inner text, byte
for byte, so that a change to any value is found. Everything read from it is checked before it is used (`checks.py`): names of
files are plain names in the folder, byte ranges lie inside their file, chunks cover their tensor exactly.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainer_kit.checkpoint.checks import FileRecord, TensorRecord, check_files, check_tensors
from trainer_kit.checkpoint.tree import flatten_state, unflatten_state
from trainer_kit.exceptions import CheckpointError
from trainer_kit.mesh.team import Team
from trainer_kit.storage import Folder
from trainer_kit.weights.format import DTYPE_NAMES

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext

MANIFEST = "manifest.json"
FORMAT = "trainer_kit.checkpoint"
VERSION = 1
_FRAME = re.compile(rb'\A\{"crc32":(\d{1,10}),"manifest":')


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint without its tensor data. `values` is as `flatten_state` gave it; `identity` says which run wrote it."""

    step: int
    identity: dict[str, Any]
    values: Any
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]

    def encode(self) -> bytes:
        """The content of the file."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "identity": flatten_state(self.identity)[1],
            "files": {name: {"size": record.size, "crc32": record.crc32} for name, record in self.files.items()},
            "tensors": {name: _tensor_json(record) for name, record in self.tensors.items()},
            "values": self.values,
        }
        text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        return b'{"crc32":%d,"manifest":%b}' % (zlib.crc32(text), text)

    def without(self, names: Collection[str]) -> Manifest:
        """The same checkpoint as if these tensors were not in it; for those that concern other ranks."""
        return replace(self, tensors={name: record for name, record in self.tensors.items() if name not in names})


def _tensor_json(record: TensorRecord) -> dict[str, Any]:
    chunks = [{"offsets": c.offsets, "sizes": c.sizes, "file": c.file, "start": c.start, "end": c.end} for c in record.chunks]
    return {"dtype": DTYPE_NAMES[record.dtype], "shape": record.shape, "chunks": chunks}


def read_manifest(
    path: str | os.PathLike[str] | Folder, *, verify: bool = True, context: DistributedContext | None = None
) -> Manifest:
    """The manifest of a checkpoint folder. `verify=False` leaves out its checksum, for a file edited by hand.

    With the `context` of several ranks all of them call it; rank 0 reads the file, so that all see the same one.
    Raises CheckpointError, naming the file, if it is missing, altered or not ours.
    """
    folder = path if isinstance(path, Folder) else Folder(path)
    data = Team.of(context).on_main(lambda: _read(folder))
    return decode_manifest(data, folder.path(MANIFEST), verify=verify)


def _read(folder: Folder) -> bytes:
    try:
        return folder.read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError) as error:
        there = f"has no {MANIFEST}: it is incomplete, or no training checkpoint" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder.path()} {there}; expected a folder such as step-00000100") from error


def decode_manifest(data: bytes, label: str, *, verify: bool = True) -> Manifest:
    """Read and check the content of the file; errors name `label`."""
    frame = _FRAME.match(data)
    if frame is None or not data.endswith(b"}"):
        raise CheckpointError(f"{label} is no manifest of trainer_kit, or was truncated ({len(data)} bytes)")
    text = data[frame.end() : -1]
    if verify and zlib.crc32(text) != int(frame[1]):
        raise CheckpointError(f"{label} was altered or damaged: its checksum is {zlib.crc32(text)}, expected {int(frame[1])}")
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
        if content["format"] != FORMAT or content["version"] != VERSION:
            found = f"{content['format']!r} version {content['version']!r}"
            raise CheckpointError(f"{label} has the format {found}, expected {FORMAT!r} version {VERSION}; read it with that version")
        files = check_files(content["files"])
        tensors = check_tensors(content["tensors"], files)
        step, identity = content["step"], unflatten_state({}, content["identity"])
        if type(step) is not int or step < 0 or not isinstance(identity, dict):
            raise ValueError(f"step {step!r} or identity {identity!r} is not what was saved")
        return Manifest(step=step, identity=identity, values=content["values"], tensors=tensors, files=files)
    except CheckpointError as error:
        raise error if label in str(error) else CheckpointError(f"{label}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{label} does not describe a checkpoint: {type(error).__name__}: {error}") from error


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")
