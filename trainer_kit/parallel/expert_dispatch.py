"""How tokens come to experts that are shared out over ranks, and back: what a dispatch is, and the one by all-to-all.

Shapes: N tokens of this rank, K experts per token, S = N * K copies of tokens sorted by expert, X experts, D hidden; L = X / ranks experts
of this rank, R copies that arrive for them.
Before editing: every rank of the group takes part in every call, with tokens or without, in the forward and in the backward. The sizes
that torch needs on the host are read once per call; nothing else waits for the device.
"""

# ruff: noqa: N802, N803, N806, N815  (shape suffixes are upper case)
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TokenRouting(Protocol):
    """Which experts each token goes to, with which weights. kept_NK: which of the copies are not dropped; None: all are kept."""

    @property
    def chosen_NK(self) -> torch.Tensor: ...
    @property
    def weights_NK(self) -> torch.Tensor: ...
    @property
    def kept_NK(self) -> torch.Tensor | None: ...


class Dispatch(Protocol):
    """Brings tokens (N, D) to the experts that were chosen for them, and gives the weighted sums of what comes back (N, D).

    experts: called with tokens sorted by expert (R, D) and the row before which those of each expert of this rank end (L,). It is called
    exactly once, without tokens too, so that the ranks that share its parameters stay in step.
    """

    def __call__(self, x_ND: torch.Tensor, routing: TokenRouting, experts: Any) -> torch.Tensor: ...


class DispatchBackend(Protocol):
    """Makes the dispatch of one layer. group: rank r of it has the experts r * L to (r + 1) * L."""

    def __call__(self, group: ProcessGroup, num_experts: int) -> Dispatch: ...


def sort_by_expert(expert_NK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of the copies by their experts, (S,), and the row before which those of each expert end, (X,). Numbers beyond come last."""
    expert_S, order_S = expert_NK.flatten().sort(stable=True)
    return order_S, torch.searchsorted(expert_S, torch.arange(num_experts, device=expert_S.device), right=True)


def combine(y_SD: torch.Tensor, order_S: torch.Tensor, routing: TokenRouting) -> torch.Tensor:
    """The weighted sum over the copies of each token, (N, D), in an order that no arrival changes. Dropped copies count nothing, and may be
    left out at the end of y."""
    weights_NK = routing.weights_NK.to(y_SD.dtype)
    if len(y_SD) < len(order_S):
        y_SD = torch.cat((y_SD, y_SD.new_zeros(len(order_S) - len(y_SD), y_SD.shape[1])))
    if routing.kept_NK is not None:
        weights_NK = weights_NK.masked_fill(~routing.kept_NK, 0)
    y_NKD = y_SD[order_S.argsort()].view(*weights_NK.shape, y_SD.shape[1])
    return (y_NKD * weights_NK.unsqueeze(-1)).sum(1)


class _Sizes(NamedTuple):
    """What goes to each rank and comes from it, on the host, and where what arrives belongs."""

    to_send: list[int]
    to_receive: list[int]
    order_R: torch.Tensor
    ends_L: torch.Tensor


@dataclass(slots=True)
class AllToAll:
    """A `Dispatch` that sends each copy of a token to the rank of its expert, and nothing else but the counts of copies."""

    group: ProcessGroup
    num_experts: int
    _eager: Callable[[torch.Tensor, TokenRouting, Any], torch.Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._eager = torch.compiler.disable(self._run)  # here and not as a decorator, which would import the compiler with this module

    def __call__(self, x_ND: torch.Tensor, routing: TokenRouting, experts: Any) -> torch.Tensor:
        return self._eager(x_ND, routing, experts)

    def _run(self, x_ND: torch.Tensor, routing: TokenRouting, experts: Any) -> torch.Tensor:
        expert_NK = routing.chosen_NK
        if routing.kept_NK is not None:
            expert_NK = expert_NK.masked_fill(~routing.kept_NK, self.num_experts)
        order_S, ends_X = sort_by_expert(expert_NK, self.num_experts)
        sizes = self._exchange_sizes(ends_X)
        sent_SD = x_ND[order_S[: sum(sizes.to_send)] // routing.chosen_NK.shape[1]]
        arrived_RD = _Exchange.apply(sent_SD, sizes.to_send, sizes.to_receive, self.group)
        y_RD = experts(arrived_RD[sizes.order_R], sizes.ends_L)
        y_SD = _Exchange.apply(y_RD[sizes.order_R.argsort()], sizes.to_receive, sizes.to_send, self.group)
        return combine(y_SD, order_S, routing)

    def _exchange_sizes(self, ends_X: torch.Tensor) -> _Sizes:
        import torch.distributed as dist

        num_ranks = dist.get_world_size(self.group)
        num_local = self.num_experts // num_ranks
        sent_X = ends_X.diff(prepend=ends_X.new_zeros(1))
        arriving_X = torch.empty_like(sent_X)  # rank by rank, those for each expert here
        dist.all_to_all_single(arriving_X, sent_X, group=self.group)
        both = torch.stack((sent_X, arriving_X)).view(2, num_ranks, num_local).sum(-1)
        to_send, to_receive = both.tolist()
        expert_X = torch.arange(num_local, device=ends_X.device).repeat(num_ranks)
        expert_R = expert_X.repeat_interleave(arriving_X, output_size=sum(to_receive))
        ends_L = arriving_X.view(num_ranks, num_local).sum(0).cumsum(0)
        return _Sizes(to_send, to_receive, expert_R.argsort(stable=True), ends_L)


class _Exchange(torch.autograd.Function):
    """Rows for each rank of a group, in its order, to the rows from each; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, to_send: Sequence[int], to_receive: Sequence[int], group: ProcessGroup) -> torch.Tensor:
        ctx.sizes, ctx.group = (to_send, to_receive), group
        return _exchanged(x, to_send, to_receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        to_send, to_receive = ctx.sizes
        return _exchanged(gradient, to_receive, to_send, ctx.group), None, None, None


def _exchanged(x: torch.Tensor, to_send: Sequence[int], to_receive: Sequence[int], group: ProcessGroup) -> torch.Tensor:
    import torch.distributed as dist

    received = x.new_empty(sum(to_receive), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), list(to_receive), list(to_send), group=group)
    return received
