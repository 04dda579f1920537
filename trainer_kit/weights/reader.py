"""Where the tensors of a stored model state lie, and how their bytes get into memory.

A model state is a folder with `model.safetensors`, or with `model.safetensors.index.json` and the files it names, or one safetensors
file; on a local disk or behind an fsspec URL. Which tensors go where is decided in `loading.py`.

Before editing: a folder with both forms counts as its single file. The writer relies on that to replace one form by the other in one
act (`publish.py`). Nothing is memory-mapped: mapped pages count as memory, plain reads into the parameters do not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any

import torch

from trainer_kit.exceptions import CheckpointError
from trainer_kit.storage import Folder
from trainer_kit.weights.format import TensorEntry, read_header
from trainer_kit.weights.regions import box_slabs, read_region

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class ModelStateReader:
    """The names, shapes, dtypes and places of a stored model state. Headers are read here, data only by `read`.

    Raises CheckpointError if it is absent, truncated, corrupt, or if its index names files or tensors that are not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder, name, self.url = _locate(path)
        weight_map = read_index(self.folder, name) if name.endswith(".json") else None
        self.files: list[str] = [name] if weight_map is None else sorted(set(weight_map.values()))
        self.entries: dict[str, TensorEntry] = {}
        self.file_of: dict[str, str] = {}
        if weight_map is not None:
            self._check_files(name, weight_map)
        for file in self.files:
            self._add(file, weight_map or {})
        if weight_map is not None:
            self._check_tensors(name, weight_map)

    def __repr__(self) -> str:
        return f"ModelStateReader({self.url!r}, {len(self.entries)} tensors in {len(self.files)} files)"

    def open(self, file: str) -> AbstractContextManager[IO[Any]]:
        """One of `files`, for `read`."""
        return self.folder.open(file)

    def read(self, handle: IO[Any], name: str, target: torch.Tensor, offsets: Sequence[int] | None = None) -> None:
        """Fill `target`, of the stored dtype, with a tensor of the file that `handle` has open, or with the part of it at `offsets`.

        Of a part, little more than its own bytes is read.
        """
        entry, label = self.entries[name], f"{self.folder.path(self.file_of[name])} (tensor {name!r})"
        read_region(handle, target, entry.start, entry.shape, offsets or (0,) * len(entry.shape), label)

    def walk(self, names: Collection[str]) -> Iterator[tuple[IO[Any], str]]:
        """These tensors in the order in which they lie in the files, each with its open file. Other files are not opened."""
        for file in self.files:
            needed = [name for name in names if self.file_of[name] == file]
            if needed:
                with self.open(file) as handle:
                    for name in sorted(needed, key=lambda name: self.entries[name].start):
                        yield handle, name

    def read_into(self, handle: IO[Any], name: str, target: torch.Tensor, offsets: Sequence[int]) -> None:
        """As `read`, into a target of another dtype too: converted a few megabytes at a time."""
        dtype = self.entries[name].dtype
        if type(target) is torch.Tensor and target.dtype == dtype:
            self.read(handle, name, target, offsets)
            return
        for part, place in box_slabs(target, offsets):
            staging = torch.empty(part.shape, dtype=dtype, device="cpu")
            self.read(handle, name, staging, place)
            part.copy_(staging)

    def _add(self, file: str, weight_map: Mapping[str, str]) -> None:
        label = self.folder.path(file)
        with self.folder.open(file) as handle:
            entries, _ = read_header(handle, self.folder.size(file), label)
        for name, entry in entries.items():
            if weight_map.get(name, file) != file:
                continue
            if name in self.entries:
                both = f"{self.file_of[name]} and in {file}"
                raise CheckpointError(f"{self.folder.url} holds tensor {name!r} in {both}; its index names neither of them")
            self.entries[name], self.file_of[name] = entry, file

    def _check_files(self, index: str, weight_map: Mapping[str, str]) -> None:
        present = set(self.folder.names())
        lost = [f"{file} (with {name!r})" for file, name in _first_tensors(weight_map).items() if file not in present]
        if lost:
            label = self.folder.path(index)
            raise CheckpointError(f"{label} names files that are absent: {', '.join(lost)}; the model state is incomplete")

    def _check_tensors(self, index: str, weight_map: Mapping[str, str]) -> None:
        lost = [f"{name!r} in {file}" for name, file in weight_map.items() if name not in self.entries]
        if lost:
            label = self.folder.path(index)
            raise CheckpointError(f"{label} names tensors that are absent: {', '.join(lost)}; the files are of another model state")


def read_index(folder: Folder, name: str = INDEX) -> dict[str, str]:
    """The checked weight map of an index: tensor name to file name."""
    label = folder.path(name)
    try:
        weight_map = json.loads(folder.read(name))["weight_map"]
        pairs = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f'{label} is no index of a model state (an object with "weight_map" was expected): {error}') from error
    for tensor, file in pairs:
        # A name with a path in it could lead out of the folder.
        if not isinstance(file, str) or not file or "/" in file or "\\" in file or file in (".", ".."):
            raise CheckpointError(f"{label} puts tensor {tensor!r} into {file!r}; the name of a file beside the index was expected")
    return dict(pairs)


def _first_tensors(weight_map: Mapping[str, str]) -> dict[str, str]:
    """For each file, the first tensor that should be in it."""
    firsts: dict[str, str] = {}
    for name, file in weight_map.items():
        firsts.setdefault(file, name)
    return firsts


def _locate(path: str | os.PathLike[str]) -> tuple[Folder, str, str]:
    """The folder and, inside it, the single file or the index; and what was asked for of the two, in full, for messages."""
    text = os.fspath(path).rstrip("/")
    if text.endswith((".safetensors", ".safetensors.index.json")):
        parent, _, name = text.rpartition("/")
        folder = Folder(f"{parent}/" if parent.endswith(":/") else parent or ("/" if text.startswith("/") else "."))
        if folder.exists(name) and not folder.is_folder(name):
            return folder, name, folder.path(name)
    folder = Folder(path)
    names = folder.names()
    for name in (SINGLE, INDEX):
        if name in names:
            return folder, name, folder.url
    raise CheckpointError(f"no model state at {folder.url}: {SINGLE} or {INDEX} was expected, {_seen(folder, names)}")


def _seen(folder: Folder, names: list[str]) -> str:
    if not names:
        return "the folder is empty" if folder.exists() else "there is nothing of that name"
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        return f"found {', '.join(others)}; give the path of the file itself to read one of them"
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
        return f"found {', '.join(names[:10])}; pickled weights are not read, since opening them can run code: convert them to safetensors"
    return f"found {', '.join(names[:10])}"
