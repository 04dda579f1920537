"""How the files of an export become the export: everything under temporary names, then renamed in an order that no reader can notice.

What readers see decides the order. With `model.safetensors` in a folder they take it, whatever index is there; else they take the files
that the index names. So these single acts make a new export valid:
    to one file                    the rename to `model.safetensors`
    from one file to shards        the removal of the old `model.safetensors`, after the new index is in place
    from shards to shards          the rename to the index; before, shards of equal names get a second name, and the old index names that

Before editing: the test of every file operation must go on passing; after a kill anywhere, the old or the new export is there whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from trainer_kit.exceptions import CheckpointError
from trainer_kit.storage import Folder, flush, write_all
from trainer_kit.weights.format import read_header
from trainer_kit.weights.reader import INDEX, SINGLE, read_index
from trainer_kit.weights.regions import PIECE_BYTES
from trainer_kit.weights.shards import index_bytes

MARK = ("producer", "trainer_kit")
TEMPORARY = ".tmp"
KEPT = "old-"  # a suffix would hide the format from tools that go by the ending
COMPANION = ".companion"  # in the temporary name of a file that goes with the model, so that a killed attempt can be told by it
_OURS = re.compile(
    r"(old-)?model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?(\.tmp)?|.+\.companion\.tmp|adapter_(model\.safetensors|config\.json)\.tmp"
)
PATIENCE = 5.0  # seconds until a network file system shows what another host wrote
COMPANIONS = ("*config.json", "*token*.json", "tokenizer*", "vocab.*", "merges.txt", "*.model", "chat_template*")  # of a model
_MAY_BE_THERE = (*COMPANIONS, "README*", "LICENSE*", ".*")


def check_folder(folder: Folder) -> None:
    """Raise CheckpointError unless the folder is absent, empty, holds an export of ours, or only files that go with a model."""
    if folder.url.endswith(".safetensors") or (folder.exists() and not folder.is_folder("")):
        raise CheckpointError(f"{folder.url} is a file, or has the name of one; a folder was expected to write the model state to")
    names = folder.names()
    weights = [name for name in names if name.endswith(".safetensors") or name == INDEX]
    foreign = [name for name in weights if not _is_marked(folder, name)]
    if not weights:
        foreign = [name for name in names if not _OURS.fullmatch(name) and not any(fnmatchcase(name, known) for known in _MAY_BE_THERE)]
    if foreign:
        raise CheckpointError(
            f"{folder.url} holds files that are no export of trainer_kit: {', '.join(foreign[:10])}; nothing was written. "
            "Choose an empty or new folder"
        )


def publish(folder: Folder, files: Sequence[str], index: bytes | None, companions: Iterable[str] = ()) -> None:
    """Make the written temporaries of `files` the model state of the folder; no `index` if it is one file. `sweep` belongs after it.

    companions: names of files whose temporaries are written, too; they are there when the model state is.
    """
    if index is None:
        _rename_companions(folder, companions)
        folder.rename(SINGLE + TEMPORARY, SINGLE)
    else:
        write_temporary(folder, INDEX, [index])
        if folder.exists(SINGLE):
            folder.remove(INDEX)  # of an attempt that was killed: no reader of the single file looks at it
        elif folder.exists(INDEX):
            _keep_old_shards(folder, files)
        for file in files:
            folder.rename(file + TEMPORARY, file)
        _rename_companions(folder, companions)
        folder.sync()
        folder.rename(INDEX + TEMPORARY, INDEX)
        folder.sync()
        folder.remove(SINGLE)
    folder.sync()


def sweep(folder: Folder) -> None:
    """Remove what exports of ours left behind and no reader sees: temporaries, stale shards, an index behind a single file."""
    names = folder.names()
    visible: set[str] = set()
    if SINGLE in names:
        visible = {SINGLE}
    elif INDEX in names:
        visible = {INDEX, *read_index(folder).values()}
    stale = [name for name in names if _OURS.fullmatch(name) and name not in visible]
    for name in sorted(stale, key=lambda name: name != INDEX):  # an index never outlives its files
        folder.remove(name)
    if stale:
        folder.sync()


class TemporaryFile:
    """A file being written under its temporary name, part by part; after `finish` it is on the disk."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name + TEMPORARY
        self._file = folder.open(self._name, "wb")

    def write(self, part: bytes | memoryview) -> None:
        """Add bytes."""
        for start in range(0, len(part), PIECE_BYTES):
            write_all(self._file, part[start : start + PIECE_BYTES])

    def finish(self) -> None:
        """Bring it to the disk."""
        flush(self._file)
        self._file.close()

    def close(self) -> None:
        """Let go of it, finished or not."""
        with contextlib.suppress(OSError):  # what could not be written need not be
            self._file.close()

    def remove(self) -> None:
        """Take it away again, finished or not."""
        self.close()
        self._folder.remove(self._name)


def write_temporary(folder: Folder, name: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file under its temporary name and bring it to the disk."""
    file = TemporaryFile(folder, name)
    try:
        for part in parts:
            file.write(part)
        file.finish()
    finally:
        file.close()


def check_arrived(folder: Folder, sizes: Mapping[str, int]) -> None:
    """Raise CheckpointError unless the temporaries that all ranks wrote are seen from here, whole. sizes: in bytes, by name."""
    until = time.monotonic() + PATIENCE
    while missing := _not_arrived(folder, sizes):
        if time.monotonic() > until:
            raise CheckpointError(
                f"rank 0 does not see what other ranks wrote to {folder.url}: {', '.join(missing[:5])}. Ranks share the writing, so the "
                "folder must be on storage that all of them share"
            )
        time.sleep(0.1)


def _not_arrived(folder: Folder, sizes: Mapping[str, int]) -> list[str]:
    folder.refresh()
    there = set(folder.names())
    return [name for name, size in sizes.items() if name + TEMPORARY not in there or folder.size(name + TEMPORARY) != size]


def _rename_companions(folder: Folder, names: Iterable[str]) -> None:
    for name in (names := list(names)):
        folder.rename(name + COMPANION + TEMPORARY, name)
    if names:
        folder.sync()


def _keep_old_shards(folder: Folder, new: Sequence[str]) -> None:
    """Let the old index name copies of those of its shards whose names the new export needs."""
    old = json.loads(folder.read(INDEX))
    taken = set(new).intersection(read_index(folder).values())
    for name in sorted(taken):
        _copy(folder, name, KEPT + name)
    if taken:
        folder.sync()
        weight_map = {tensor: KEPT + file if file in taken else file for tensor, file in old["weight_map"].items()}
        write_temporary(folder, KEPT + INDEX, [index_bytes(weight_map, old.get("metadata", {}))])
        folder.rename(KEPT + INDEX + TEMPORARY, INDEX)
        folder.sync()


def _copy(folder: Folder, name: str, copy: str) -> None:
    if folder.is_local:
        with contextlib.suppress(OSError):  # no hard links here, or a killed attempt left one: copy the bytes below
            os.link(folder.path(name), folder.path(copy))
            return
    with folder.open(name) as source:
        write_temporary(folder, copy, iter(lambda: source.read(PIECE_BYTES), b""))
    folder.rename(copy + TEMPORARY, copy)


def _is_marked(folder: Folder, name: str) -> bool:
    try:
        if name == INDEX:
            metadata = json.loads(folder.read(name)).get("metadata", {})
        else:
            with folder.open(name) as file:
                metadata = read_header(file, folder.size(name), folder.path(name))[1]
    except (CheckpointError, ValueError, AttributeError, RecursionError):
        return False
    return isinstance(metadata, dict) and metadata.get(MARK[0]) == MARK[1]
