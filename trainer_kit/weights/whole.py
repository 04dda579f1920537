"""A tensor that is cut over ranks, brought together on the host of the first rank of its stage, one tensor at a time.

For exports and checksums, where one rank needs the whole and nobody else does: only the ranks that hold it together with the first one
send anything, so memory is one whole tensor there and nothing elsewhere. Without a pipeline the first rank is rank 0.

Before editing: every call is a collective of the stage, so all its ranks walk through the same tensors in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.layout import Layout, as_bytes, box_index, is_distributed, layout_of, local_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trainer_kit.mesh.context import DistributedContext


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether this rank holds only a part of it, so that `whole_on_first` is a collective."""
    return is_distributed(tensor) and layout_of(tensor).num_shards > 1


def make_groups(tensors: Iterable[torch.Tensor], context: DistributedContext | None) -> None:
    """Before `whole_on_first` with pipeline stages: make the groups that tensors of any stage need, since making one takes every rank."""
    if context is None or context.num_pipeline_ranks == 1:
        return  # all ranks have the same tensors
    layouts = {layout.sharded_over: layout.shape for layout in map(layout_of, filter(is_cut, tensors))}
    everywhere = [item for of_rank in context.host.exchange(layouts) for item in of_rank.items()]
    for dims, shape in sorted(dict(everywhere).items()):
        _group(dims, shape, context)


@torch.no_grad()
def whole_on_first(tensor: torch.Tensor, context: DistributedContext | None) -> torch.Tensor | None:
    """The whole of a tensor on the first rank of its stage, None on the others. A plain or replicated one is returned as it is, by each."""
    if not is_cut(tensor):
        return local_of(tensor)
    import torch.distributed as dist

    layout = layout_of(tensor)
    group = _group(layout.sharded_over, layout.shape, context)
    assert group is not None and context is not None, "it is cut, so there are several ranks"
    if dist.get_global_rank(group, 0) != context.first_rank_of_stage:
        return None  # the first rank gets it from the ranks of its own group
    if context.rank == context.first_rank_of_stage:
        return _receive(local_of(tensor), layout, group)
    _send(local_of(tensor), layout, group)
    return None


def _group(dims: tuple[str, ...], shape: tuple[int, ...], context: DistributedContext | None) -> ProcessGroup | None:
    """The ranks that hold each part of a tensor once."""
    domain = None if context is None else context.domain_with(dims)
    if context is None or domain is None:
        raise ModelError(
            f"a tensor of shape {shape} is cut along the mesh dimensions {', '.join(dims)}, which no domain of this run has together; "
            "distribute it on the meshes of context.mesh_for(...)"
        )
    return context.group(domain, *dims)


def _send(local: torch.Tensor, layout: Layout, group: ProcessGroup) -> None:
    import torch.distributed as dist

    dist.send(torch.tensor([layout.offsets, layout.sizes], device=local.device), group=group, group_dst=0)
    if local.numel():
        dist.send(as_bytes(local.contiguous()), group=group, group_dst=0)


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
        target = whole[box_index(offsets, sizes)]
        direct = target.is_contiguous() and mine.device.type == "cpu"
        part = target if direct else torch.empty(sizes, dtype=mine.dtype, device=mine.device)
        dist.recv(as_bytes(part), group=group, group_src=rank)
        if not direct:
            target.copy_(part)
    return whole
