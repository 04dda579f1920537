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
    from trainer_kit.mesh.context import DistributedContext


@torch.no_grad()
def share_buffers(buffers: Mapping[str, torch.Tensor], context: DistributedContext) -> list[str]:
    """Give all ranks of a stage the buffers of its first rank, in place; returns the names of those that differed. A collective.

    buffers: by global name, as `ParameterTable.buffers`. One process: nothing happens.
    """
    if context.world_size == 1:
        return []
    import torch.distributed as dist

    mine = {name: local_of(buffer) for name, buffer in buffers.items() if not is_cut(buffer)}
    differing = _differing({name: tensor_crc32(buffer) for name, buffer in mine.items()}, context)
    for name in differing:
        whole = mine[name].contiguous()
        dist.broadcast(whole, group=context.stage_group, group_src=0)
        if whole is not mine[name]:
            mine[name].copy_(whole)
    return differing


def _differing(digests: dict[str, int], context: DistributedContext) -> list[str]:
    """The names of this rank under which not all ranks have the same digest."""
    if len(set(context.host.exchange(zlib.crc32(repr(digests).encode())))) == 1:  # one number, where nothing changed
        return []
    found: dict[str, set[int]] = {}
    for of_rank in context.host.exchange(digests):
        for name, digest in of_rank.items():
            found.setdefault(name, set()).add(digest)
    return [name for name in digests if len(found[name]) > 1]
