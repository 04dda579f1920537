"""A tensor that is cut over ranks, brought together on the host of rank 0, one tensor at a time.

For exports and checksums, where one rank needs the whole and nobody else does: only the ranks that hold it together with rank 0 send
anything, so memory is one whole tensor on rank 0 and nothing elsewhere.

Before editing: every call is a collective, so all ranks walk through the same tensors in the same order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.domains import domains_of
from trainer_kit.mesh.layout import Layout, is_distributed, layout_of, local_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trainer_kit.mesh.context import DistributedContext

_DOMAINS = ("dense", "expert", "regular", "batch", "flat")


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether this rank holds only a part of it, so that `whole_on_main` is a collective."""
    return is_distributed(tensor) and layout_of(tensor).num_shards > 1


@torch.no_grad()
def whole_on_main(tensor: torch.Tensor, context: DistributedContext | None) -> torch.Tensor | None:
    """The whole of a tensor on rank 0, None on the others. A plain or replicated one is returned as it is, by every rank."""
    if not is_cut(tensor):
        return local_of(tensor)
    import torch.distributed as dist

    layout = layout_of(tensor)
    group = _group(layout, context)
    assert group is not None, "it is cut, so there are several ranks"
    if dist.get_global_rank(group, 0) != 0:
        return None  # rank 0 gets it from the ranks of its own group
    if dist.get_rank() == 0:
        return _receive(local_of(tensor), layout, group)
    _send(local_of(tensor), layout, group)
    return None


def _group(layout: Layout, context: DistributedContext | None) -> ProcessGroup | None:
    """The ranks that hold each part of the tensor once."""
    domains = {} if context is None else domains_of(context.strategy)
    for name in _DOMAINS:
        if context is not None and set(layout.sharded_over) <= set(domains[name].dims):
            return context.group(name, *layout.sharded_over)
    raise ModelError(
        f"a tensor of shape {layout.shape} is cut along the mesh dimensions {', '.join(layout.sharded_over)}, which no domain of this run "
        "has together; distribute it on the meshes of context.mesh_for(...)"
    )


def _send(local: torch.Tensor, layout: Layout, group: ProcessGroup) -> None:
    import torch.distributed as dist

    dist.send(torch.tensor([layout.offsets, layout.sizes], device=local.device), group=group, group_dst=0)
    if local.numel():
        dist.send(_bytes(local.contiguous()), group=group, group_dst=0)


def _receive(mine: torch.Tensor, layout: Layout, group: ProcessGroup) -> torch.Tensor:
    import torch.distributed as dist

    whole = torch.empty(layout.shape, dtype=mine.dtype, device="cpu")
    whole[layout.box].copy_(mine)
    box = torch.empty((2, len(layout.shape)), dtype=torch.int64, device=mine.device)
    for rank in range(1, dist.get_world_size(group)):
        dist.recv(box, group=group, group_src=rank)
        offsets, sizes = box.tolist()
        if not math.prod(sizes):
            continue
        target = whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
        direct = target.is_contiguous() and mine.device.type == "cpu"
        part = target if direct else torch.empty(sizes, dtype=mine.dtype, device=mine.device)
        dist.recv(_bytes(part), group=group, group_src=rank)
        if not direct:
            target.copy_(part)
    return whole


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: not every back-end sends every dtype."""
    return tensor.view(-1).view(torch.uint8)
