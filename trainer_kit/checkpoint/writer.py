"""Writes the files of a checkpoint for torch.distributed.checkpoint (DCP): one safetensors file per rank, then the manifest.

Importing this module imports DCP: do it only when saving. DCP's planner decides which rank writes what (deduplication); the order
of calls is in `write_checkpoint`. Rank 0 makes the folder, and the manifest after all ranks have flushed their files. The rename of the
manifest is the one act that makes the folder valid. A save into a folder that is valid already takes new file names
(`rank-00000-2.safetensors`), so that the old content stays whole until the manifest is replaced; the old files go afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trainer_kit.checkpoint.checks import Chunk, FileRecord, TensorRecord
from trainer_kit.checkpoint.checksum import Checksum, check_sizes
from trainer_kit.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from trainer_kit.exceptions import CheckpointError
from trainer_kit.mesh.team import Team, portable
from trainer_kit.storage import Folder, flush, write_all
from trainer_kit.weights.format import TensorEntry, build_header
from trainer_kit.weights.regions import host_pieces

DATA_FILE = re.compile(r"rank-\d{5}(?:-(\d{1,9}))?\.safetensors")
SECONDS_TO_SEE_FOLDER = 3.0  # network file systems show a rank what another one made with a delay
_log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


class SavePlannerOfCopies(DefaultSavePlanner):
    """Plans by the tensors of the state, and hands out their host copies (local shards) where there are some."""

    def __init__(self, copies: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index) if self._copies is None else self._copies[index.fqn]


def _in_words_for_all(method: F) -> F:
    """What fails here is sent to the other ranks, so it must be something that can be sent."""

    @functools.wraps(method)
    def told(self: CheckpointWriter, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if not self.team.is_alone and (stand_in := portable(error)) is not error:
                raise stand_in from error
            raise

    return told  # type: ignore[return-value]


def write_checkpoint(
    writer: CheckpointWriter, tensors: dict[str, torch.Tensor], copies: Mapping[str, torch.Tensor] | None = None, process_group: Any = None
) -> None:
    """Save `tensors`, or their `copies`, through DCP's planner. Without a process group nothing is communicated.

    With one, a failure on any rank is raised as DCP's CheckpointException on all of them.
    """
    planner = SavePlannerOfCopies(copies)
    if process_group is not None:
        dcp.save(tensors, storage_writer=writer, planner=planner, process_group=process_group)
        return
    writer.set_up_storage_writer(True)
    planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    [plan] = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


class CheckpointWriter(StorageWriter):
    """One save. `values` is JSON-able (see `tree.py`), that of rank 0 counts; `abandon` removes what a failed save left.

    team: the ranks that save, over the group that the save uses.
    """

    def __init__(
        self, folder: Folder, *, step: int, values: Any = None, identity: Mapping[str, Any] | None = None, team: Team | None = None
    ) -> None:
        self._folder, self.team = folder, team or Team()
        self._step, self._values, self._identity = step, values, dict(identity or {})
        self._name: str | None = None  # of the data file of this rank, once it was begun
        self._files: set[str] = set()  # on rank 0: the names of all ranks' files

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            raise ValueError("a CheckpointWriter belongs to one folder; leave out checkpoint_id=")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._name, self._files = None, set()

    @_in_words_for_all
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise CheckpointError(f"{item.index.fqn}: only tensors are stored as tensors; put plain values into values=")
        return plan

    @_in_words_for_all
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._folder.make()
        if self._folder.is_local:
            Folder(os.path.dirname(self._folder.url)).sync()
        names = self._folder.names()
        used = [int(found[1] or 1) for name in names if (found := DATA_FILE.fullmatch(name))] if MANIFEST in names else []
        suffix = f"-{max(used, default=1) + 1}" if MANIFEST in names else ""
        files = [f"rank-{rank:05d}{suffix}.safetensors" for rank in range(len(plans))]
        self._files = set(files)
        return [dataclasses.replace(plan, storage_data=file) for plan, file in zip(plans, files, strict=True)]

    @_in_words_for_all
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write_file(plan.storage_data, plan.items, planner) if plan.items else [])
        return future

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        items = sorted(items, key=_element_bytes, reverse=True)  # every tensor aligned to its own elements, as safetensors readers expect
        header, entries = _layout(items)
        self._name = name
        with Checksum() as checksum:
            with self._create(name) as file:
                checksum.add(memoryview(header))
                write_all(file, header)
                for item, entry in zip(items, entries, strict=True):
                    tensor = planner.resolve_data(item)
                    assert isinstance(tensor, torch.Tensor)
                    if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
                        raise CheckpointError(f"{item.index.fqn} became {tensor.dtype} {tuple(tensor.shape)} during the save")
                    for piece in host_pieces(tensor.detach()):
                        checksum.add(piece)
                        write_all(file, piece)
                flush(file)
            crc32 = checksum.finish()
        self._folder.sync()
        record = FileRecord(entries[-1].end, crc32)
        return [WriteResult(i.index, e.end - e.start, (name, e.start, e.end, record)) for i, e in zip(items, entries, strict=True)]

    def _create(self, name: str) -> IO[Any]:
        """Open a new file in the folder that rank 0 made."""
        deadline = time.monotonic() + SECONDS_TO_SEE_FOLDER
        while not self.team.is_main and self._folder.is_local and not self._folder.exists():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {self.team.rank} does not see the folder {self._folder.path()}, which rank 0 has made; all ranks write into one "
                    "folder: choose one on a file system that they share"
                )
            time.sleep(0.05)
        return self._folder.open(name, "wb")

    @_in_words_for_all
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for part in results for result in part}
        files = {place[0]: place[3] for place in places.values()}
        tensors = {name: _record(name, found, places) for name, found in metadata.state_dict_metadata.items()}
        if not self.team.is_alone:
            check_sizes(self._folder, files, "rank 0 does not see what another rank wrote: choose a folder on a file system they share")
        manifest = Manifest(step=self._step, identity=self._identity, values=self._values, tensors=tensors, files=files)
        self._folder.write_durably(MANIFEST, manifest.encode())
        try:
            for name in self._folder.names():
                if DATA_FILE.fullmatch(name) and name not in files:
                    self._folder.remove(name)
        except OSError as error:  # the checkpoint is complete: superfluous files do not make the save a failure
            _log.warning("files of an earlier save are left in %s: %s", self._folder.path(), error)

    def abandon(self) -> None:
        """Remove what was written, and the folder if nothing else is in it. Once a manifest lists the files, they stay: they are valid."""
        if not self.team.on_main(self._is_published):
            self.team.everywhere(self._remove_own_file)
            self.team.on_main(self._remove_folder)

    def _is_published(self) -> bool:
        return self._folder.exists(MANIFEST) and not self._files.isdisjoint(read_manifest(self._folder).files)

    def _remove_own_file(self) -> None:
        if self._name is not None:
            self._folder.remove(self._name)

    def _remove_folder(self) -> None:
        self._folder.remove(f"{MANIFEST}.tmp")
        if self._folder.exists() and not self._folder.names():
            self._folder.remove()


def _element_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype.itemsize


def _layout(items: list[WriteItem]) -> tuple[bytes, list[TensorEntry]]:
    """The header of a file with these items. A shard has its offsets in its name, so that other tools can tell shards apart."""
    tensors, taken = [], set()
    for item in items:
        data = item.tensor_data
        assert data is not None
        sizes = tuple(data.chunk.sizes)
        name = item.index.fqn if sizes == tuple(data.size) else f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"
        if name in taken:
            raise CheckpointError(f"two tensors would have the name {name!r} in one file; rename the one that ends like a shard's offsets")
        taken.add(name)
        tensors.append((name, data.properties.dtype, sizes))
    return build_header(tensors, {"format": "pt"})


def _record(name: str, found: Any, places: Mapping[MetadataIndex, tuple[str, int, int, FileRecord]]) -> TensorRecord:
    assert isinstance(found, TensorStorageMetadata)
    chunks = []
    for chunk in found.chunks:
        file, start, end, _ = places[MetadataIndex(name, chunk.offsets)]
        chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), file, start, end))
    return TensorRecord(found.properties.dtype, tuple(found.size), tuple(chunks))
