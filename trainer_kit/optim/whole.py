"""Whole parameters for optimizers that need them, where the model holds shards: each is put together on one rank, its owner.

The optimizer gets a proxy of the whole shape in place of each such parameter. On the owner it has data during an update; on the other
ranks it is on the meta device and never has a gradient, so their optimizers leave it alone. What the optimizer keeps (momentum) thus
lies whole on the owner, in different places for different parameters. Ranks that hold replicas of the same shards do the same
work again, and stay equal bit by bit. Before editing: `open` and `close` hold collectives of the group, in the same order everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.layout import layout_of
from trainer_kit.optim.exchange import Box, Exchange
from trainer_kit.parameters import ParameterRow

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trainer_kit.mesh import DistributedContext


class WholeParameters:
    """Parameters of one dtype and device that lie in boxes on the ranks of one group.

    rows: of the parameters; boxes: where they lie, by rank of the group; owners: by parameter.
    proxies: what the optimizer gets, in the order of the rows.
    """

    def __init__(self, rows: Sequence[ParameterRow], group: ProcessGroup, boxes: Sequence[Sequence[Box]], owners: Sequence[int]) -> None:
        self.rows = list(rows)
        self.proxies: list[nn.Parameter] = []
        self._owned: dict[int, nn.Parameter] = {}
        for index, (row, owner) in enumerate(zip(rows, owners, strict=True)):
            if owner == group.rank():
                self._owned[index] = nn.Parameter(_placeholder(row))
                self.proxies.append(self._owned[index])
            else:
                self.proxies.append(nn.Parameter(torch.empty(row.layout.shape, dtype=row.local.dtype, device="meta")))
        self._parts = [row.local for row in rows]
        self._exchange = Exchange(group, boxes, owners)

    def proxy_rows(self) -> list[ParameterRow]:
        """The rows as the optimizer sees them: a proxy is a whole, plain parameter."""
        return [
            dataclasses.replace(row, parameter=proxy, local=proxy, layout=layout_of(proxy))
            for row, proxy in zip(self.rows, self.proxies, strict=True)
        ]

    @torch.no_grad()
    def open(self) -> None:
        """Bring the values and gradients of all ranks to the owners."""
        for index, proxy in self._owned.items():
            proxy.data = torch.empty(self.rows[index].layout.shape, dtype=proxy.dtype, device=proxy.device)
        self._exchange.to_owners(self._parts, {index: proxy.data for index, proxy in self._owned.items()})
        # Every rank sends: a parameter without a gradient here counts as one with zeros, as everywhere.
        dtype = _gradient_dtype(self._parts)
        gradients = [torch.zeros_like(part, dtype=dtype) if part.grad is None else part.grad.to(dtype) for part in self._parts]
        wholes = {index: torch.empty_like(proxy, dtype=dtype) for index, proxy in self._owned.items()}
        self._exchange.to_owners(gradients, wholes)
        for index, proxy in self._owned.items():
            proxy.grad_dtype = dtype
            proxy.grad = wholes[index]

    @torch.no_grad()
    def take_back(self) -> None:
        """Bring the updated values from the owners to the parameters."""
        self._exchange.from_owners({index: proxy.data for index, proxy in self._owned.items()}, self._parts)

    def close(self) -> None:
        """Free the values and gradients of the proxies. Not a collective."""
        for index, proxy in self._owned.items():
            proxy.grad = None
            proxy.data = _placeholder(self.rows[index])


def _placeholder(row: ParameterRow) -> torch.Tensor:
    """Zeros in the whole shape that take no memory: readable, but no place to write to."""
    return torch.zeros((), dtype=row.local.dtype, device=row.local.device).expand(row.layout.shape)


def _gradient_dtype(parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """The widest dtype of the gradients; a missing one would have had that in which the parameter accumulates."""
    dtypes = (p.grad_dtype or p.dtype if p.grad is None else p.grad.dtype for p in parameters)
    return functools.reduce(torch.promote_types, dtypes)


def needs_gathering(row: ParameterRow) -> bool:
    """Whether this rank holds only a part of the parameter."""
    return row.layout.num_shards > 1


def gather_whole(rows: Sequence[ParameterRow], context: DistributedContext) -> tuple[list[WholeParameters], bool]:
    """Find the owners of sharded parameters; also, whether any rank of the world has such rows.

    A collective of the world: ranks without such rows call it too.
    """
    by_dims: dict[tuple[str, ...], list[ParameterRow]] = {}
    for row in rows:
        by_dims.setdefault(row.layout.sharded_over, []).append(row)
    found = []
    # Making a group is a collective of the world, and another stage may have other rows: all ranks ask for the groups of all.
    everywhere = sorted({dims for of_rank in context.host.exchange(sorted(by_dims)) for dims in of_rank})
    for dims in everywhere:
        group = context.group(_domain(dims, context), *dims)
        if dims in by_dims:
            assert group is not None
            found += _whole_parameters(by_dims[dims], group)
    return found, bool(everywhere)


def _whole_parameters(rows: Sequence[ParameterRow], group: ProcessGroup) -> list[WholeParameters]:
    """Of the rows of one group, one per dtype and device."""
    import torch.distributed as dist

    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, [(row.layout.offsets, row.layout.sizes) for row in rows], group)
    boxes = [[Box(*of_rank[index]) for of_rank in of_ranks] for index in range(len(rows))]
    owners = balanced_owners([row.parameter.numel() for row in rows], group.size())
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, row in enumerate(rows):
        kinds.setdefault((row.local.device, row.local.dtype), []).append(index)
    return [
        WholeParameters([rows[i] for i in indices], group, [boxes[i] for i in indices], [owners[i] for i in indices])
        for indices in kinds.values()
    ]


def balanced_owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """A rank for each parameter: the largest first, each to the rank that has least so far, the first of equals."""
    owners, loads = [0] * len(sizes), [0] * num_ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = rank = min(range(num_ranks), key=loads.__getitem__)
        loads[rank] += sizes[index]
    return owners


def _domain(dims: Sequence[str], context: DistributedContext) -> str:
    """The domain that has these mesh dimensions."""
    if (name := context.domain_with(dims)) is None:
        raise ConfigurationError(
            f"a parameter is sharded over the mesh dimensions {', '.join(dims)}, which no domain of the mesh has together; use slices of "
            "context.mesh_for('dense') or context.mesh_for('expert') when you distribute it"
        )
    return name
