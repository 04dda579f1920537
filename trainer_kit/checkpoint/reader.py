"""Reads the files of a checkpoint for torch.distributed.checkpoint (DCP): ranged reads into the memory of the tensors.

Importing this module imports DCP: do it only when loading. DCP's planner decides which boxes each rank needs (resharding).
All files are checked in `prepare_local_plan`, before the first tensor is changed; with several ranks each checks its share of
the files, and DCP brings an error there to all of them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainer_kit.checkpoint.checks import Chunk, TensorRecord
from trainer_kit.checkpoint.checksum import check_checksums, check_sizes
from trainer_kit.checkpoint.manifest import Manifest
from trainer_kit.checkpoint.pieces import read_region
from trainer_kit.exceptions import CheckpointError
from trainer_kit.storage import Folder


def read_checkpoint(reader: CheckpointReader, tensors: dict[str, torch.Tensor], process_group: Any = None) -> None:
    """Fill `tensors` through DCP's planner. Without a process group nothing is communicated."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    if process_group is not None:
        dcp.load(tensors, storage_reader=reader, planner=planner, process_group=process_group)
        return
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    [plan] = reader.prepare_global_plan(plans)
    reader.read_data(planner.finish_plan(plan), planner).wait()


class CheckpointReader(StorageReader):
    """One load. `verify=False` leaves out the checksums of the files; sizes are always checked."""

    def __init__(self, folder: Folder, manifest: Manifest, *, verify: bool = True, rank: int = 0, num_ranks: int = 1) -> None:
        self._folder, self._manifest = folder, manifest
        self._verify, self._rank, self._num_ranks = verify, rank, num_ranks
        self._chunks = {(name, c.offsets): c for name, record in manifest.tensors.items() for c in record.chunks}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            raise ValueError("a CheckpointReader belongs to one folder; leave out checkpoint_id=")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _metadata(record) for name, record in self._manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        files = dict(sorted(self._manifest.files.items())[self._rank :: self._num_ranks])
        check_sizes(self._folder, files)
        if self._verify:
            check_checksums(self._folder, files)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Chunk, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise CheckpointError(f"{item.storage_index.fqn}: only tensors are stored as tensors, found bytes")
            assert item.storage_index.offset is not None
            chunk = self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset)]
            by_file[chunk.file].append((chunk, item))
        for name, items in sorted(by_file.items()):
            self._read_file(name, sorted(items, key=lambda pair: pair[0].start), planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @torch.no_grad()
    def _read_file(self, name: str, items: list[tuple[Chunk, ReadItem]], planner: LoadPlanner) -> None:
        with self._folder.open(name) as file:
            for chunk, item in items:
                target = planner.resolve_tensor(item).detach()
                read_region(file, target, chunk.start, chunk.sizes, item.storage_offsets, self._folder.path(name))
                planner.commit_tensor(item, target)


def _metadata(record: TensorRecord) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(offsets=torch.Size(c.offsets), sizes=torch.Size(c.sizes)) for c in record.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=record.dtype), torch.Size(record.shape), chunks)
