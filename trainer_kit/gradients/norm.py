"""`NormOverRanks`: the norm over all ranks, from what each rank knows of its own local gradients, and one decision of all ranks.

Every element counts once: a box that several ranks hold enters with its share on each of them. Before editing: the result must be the
same number on every rank, since clipping and retries depend on it, and nan must stay nan, which MAX of some backends loses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.parameters import ParameterRow

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext


class NormOverRanks:
    """For gradients of which some rank has only a part. Its methods are collectives of the whole world.

    dtype: that of the norm, at least; the same on all ranks, some of which may have no gradient to tell it.
    """

    def __init__(self, context: DistributedContext, dtype: torch.dtype = torch.float32) -> None:
        self._group = context.group("flat", "world")
        self._host, self._device, self._dtype = context.host, context.device, dtype
        self._ranks_per_stage = math.prod(context.dense_sizes().values())

    @classmethod
    def of(cls, rows: Sequence[ParameterRow], context: DistributedContext) -> NormOverRanks | None:
        """None if every rank has the whole of all gradients: its own norm is that of everything."""
        has_all = math.prod(context.dense_sizes().values()) == context.world_size
        if has_all and all(row.layout.num_shards == 1 for row in rows):
            return None
        widest = functools.reduce(torch.promote_types, (row.local.grad_dtype or row.local.dtype for row in rows), torch.float32)
        return cls(context, functools.reduce(torch.promote_types, context.host.exchange(widest)))

    def shares(self, rows: Iterable[ParameterRow]) -> torch.Tensor:
        """Which part of the p-th power of a local norm counts on this rank: one divided by the number of ranks with the same box."""
        counts = [self._ranks_per_stage * len(row.stages) / row.layout.num_shards for row in rows]
        return torch.tensor([1 / count for count in counts], dtype=torch.float64, device=self._device)

    def norm(self, norms: torch.Tensor, shares: torch.Tensor, p: float) -> torch.Tensor:
        """The p-norm of everything, from the p-norms of the local gradients and their shares. One collective."""
        import torch.distributed as dist

        norms = norms.to(torch.promote_types(norms.dtype, self._dtype))
        if p == math.inf:
            known = torch.cat([norms.nan_to_num(nan=0.0, posinf=math.inf), norms.new_zeros(1)])
            largest = torch.stack([known.amax(), norms.isnan().any().to(norms.dtype)])
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
            return torch.where(largest[1] > 0, math.nan, largest[0])
        # In fp64, whose range holds the squares and cubes of everything that fp32 holds.
        total = norms.double().pow(p).mul(shares).sum()
        dist.all_reduce(total, group=self._group)
        return total.pow(1 / p).to(norms.dtype)

    def agree(self, flag: torch.Tensor) -> None:
        """Set `flag`, a float32 element of 0 or 1, to 1 if it is 1 on any rank."""
        import torch.distributed as dist

        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)

    def exchange(self, value: Any) -> list[Any]:
        """The plain values of all ranks, by rank; slow, for the way to an error."""
        return self._host.exchange(value)
