"""Reads the files of a checkpoint for torch.distributed.checkpoint (DCP): ranged reads into the memory of the tensors.

Importing this module imports DCP: do it only when loading. DCP's planner decides which boxes each rank needs (resharding), from the
manifest alone, so ranks plan and read without each other. Before the first tensor is changed all of them wait for the outcome of the
checks in `prepare_local_plan`: each rank verifies its share of the files, and that it sees those which it will read.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainer_kit.checkpoint.checks import Chunk, TensorRecord
from trainer_kit.checkpoint.checksum import DAMAGED, check_checksums, check_sizes
from trainer_kit.checkpoint.manifest import Manifest
from trainer_kit.exceptions import CheckpointError
from trainer_kit.mesh.team import Team
from trainer_kit.storage import Folder
from trainer_kit.weights.regions import read_region


def plan_reads(reader: CheckpointReader, tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Check everything and return what fills `tensors`, of which distributed ones are filled with their parts alone."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    [plan] = reader.prepare_global_plan(plans)
    return lambda: reader.read_data(planner.finish_plan(plan), planner).wait()


class CheckpointReader(StorageReader):
    """One load. `verify=False` leaves out the checksums of the files; sizes are always checked."""

    def __init__(self, folder: Folder, manifest: Manifest, *, verify: bool = True, team: Team | None = None) -> None:
        self._folder, self._manifest = folder, manifest
        self._verify, self._team = verify, team or Team()
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
        team, files = self._team, self._manifest.files
        share = dict(sorted(files.items())[team.rank :: team.num_ranks])
        needed = share | {name: files[name] for name in sorted({self._chunk(item).file for item in plan.items})}
        if team.is_alone:
            check_sizes(self._folder, needed)
        else:
            check_sizes(self._folder, needed, f"{DAMAGED}, or rank {team.rank} does not see the file system that the other ranks see")
        if self._verify:
            check_checksums(self._folder, share)
        return plan

    def _chunk(self, item: ReadItem) -> Chunk:
        if item.type == LoadItemType.BYTE_IO:
            raise CheckpointError(f"{item.storage_index.fqn}: only tensors are stored as tensors, found bytes")
        assert item.storage_index.offset is not None
        return self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset)]

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Chunk, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            chunk = self._chunk(item)
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
