"""How a tensor lies on the ranks: which box of the whole this rank holds, and how often that box is there.

A plain tensor is whole on every rank. A DTensor says its placements itself; nothing else is asked. Optimizers, norms, checkpoints,
initial values and exports work on the local tensor of a rank and on its box, so they know no parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.torch_private import distributed_tensor_type, local_tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the local tensor of this rank lies in the whole one.

    shape: of the whole. offsets, sizes: of this rank's box, per dim; sizes has a 0 where a rank holds nothing.
    num_shards: into how many boxes the whole is cut; every box is on `world_size / num_shards` ranks of a stage.
    sharded_over: names of the mesh dimensions along which it is cut.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    num_shards: int = 1
    sharded_over: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of it by construction."""
        return not self.sharded_over

    @property
    def box(self) -> tuple[slice, ...]:
        """The index of this rank's part of the whole."""
        return box_index(self.offsets, self.sizes)


def box_index(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    """The index of a box in what holds it."""
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. Asking does not import torch.distributed.tensor."""
    dtensor = distributed_tensor_type()
    return dtensor is not None and isinstance(tensor, dtensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank, detached, sharing storage; the tensor itself, detached, if it is plain."""
    return local_tensor(tensor).detach() if is_distributed(tensor) else tensor.detach()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes, sharing it: not every back-end sends every dtype, and bytes compare bit by bit."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # with one element or none any stride counts as contiguous


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a plain tensor or a DTensor. Raises ModelError for placements that are no part of the whole (Partial)."""
    if not is_distributed(tensor):
        shape = tuple(tensor.shape)
        return Layout(shape, (0,) * len(shape), shape)
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    sharded = []
    for name, placement in zip(names, placements, strict=True):
        if is_shard(placement):
            sharded.append(name)
        elif not isinstance(placement, Replicate):
            raise ModelError(
                f"a tensor of shape {tuple(tensor.shape)} has the placement {placement} on the mesh dimension {name!r}; expected "
                f"{Shard.__name__} or {Replicate.__name__}. Usual cause: a redistribute(...) is missing after a partial result"
            )
    sizes = tuple(local_tensor(tensor).shape)
    offsets = _offsets(tensor)
    num_shards = math.prod(mesh.size(names.index(name)) for name in sharded)
    return Layout(tuple(tensor.shape), offsets, sizes, num_shards, tuple(sharded))


def is_shard(placement: Any) -> bool:
    """Whether a placement cuts the tensor; the strided one that FSDP makes on top of tensor parallelism too."""
    return bool(placement.is_shard()) or type(placement).__name__ == "_StridedShard"


def _offsets(tensor: torch.Tensor) -> tuple[int, ...]:
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]  # what DTensor offers to checkpoints
    return tuple(chunk.offsets)


def fill(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of `whole`, a plain tensor, into the memory of `tensor`."""
    local_of(tensor).copy_(whole[layout_of(tensor).box])


def like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` in the layout of `tensor`: a DTensor around it if that is one. It shares the storage; shapes must agree."""
    if not is_distributed(tensor):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=_contiguous_stride(tensor.shape)  # type: ignore[attr-defined]
    )


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
