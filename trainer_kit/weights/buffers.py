"""Persistent buffers that each rank changed by itself, such as the running statistics of a batch normalisation, made the same again.

Ranks see different samples, so these differ. As torch's DistributedDataParallel does, the values of the first rank are taken: before a
save, an export and an evaluation, so that all of them see one model. Nothing is sent for buffers that are equal. Not here: buffers that
are meant to differ; what belongs to one rank must not be persistent, since no checkpoint could hold it for another mesh.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trainer_kit.mesh.layout import local_of
from trainer_kit.weights.format import tensor_crc32
from trainer_kit.weights.whole import is_cut

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trainer_kit.mesh.context import DistributedContext


@torch.no_grad()
def share_buffers(buffers: Mapping[str, torch.Tensor], context: DistributedContext) -> list[str]:
    """Give all ranks of a stage the buffers of its first rank, in place; returns the names of those that differed.

    A collective of the world. buffers: by global name, as `ParameterTable.buffers`. One process: nothing happens.
    """
    if context.world_size == 1:
        return []
    import torch.distributed as dist

    mine = {name: local_of(buffer) for name, buffer in buffers.items() if not is_cut(buffer)}
    differing, group = _differing({name: tensor_crc32(buffer) for name, buffer in mine.items()}, context)
    for name in differing:
        whole = mine[name].contiguous()
        dist.broadcast(whole, group=group, group_src=0)
        if whole is not mine[name]:
            mine[name].copy_(whole)
    return differing


def _differing(digests: dict[str, int], context: DistributedContext) -> tuple[list[str], ProcessGroup | None]:
    """The names of this rank under which not all ranks of its stage have the same digest, and the group of these ranks."""
    everywhere = context.host.exchange((context.pipeline_rank, zlib.crc32(repr(digests).encode())))
    if len(set(everywhere)) == context.num_pipeline_ranks:  # one number for each stage, where nothing changed
        return [], None
    found: dict[str, set[int]] = {}
    for place, of_rank in context.host.exchange((context.pipeline_rank, digests)):
        if place == context.pipeline_rank:
            for name, digest in of_rank.items():
                found.setdefault(name, set()).add(digest)
    # All ranks ask for the group, since making it takes all of them, and in another stage nothing may differ.
    return [name for name in digests if len(found[name]) > 1], context.stage_group
