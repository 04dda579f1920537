"""The total weight of a pack over all loss ranks, which is what gradients are divided by.

Numbers on the host are added up through the hosts, beside the forwards and backwards; weights on a device are added up there and never
waited for. Tensor peers hold the same microbatches and count once. Before editing: every rank makes the same calls in every step,
whatever it has, and what differs from step to step (kinds of weights, names of terms, weights on a device) follows from their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.pipeline.loss_terms import SharedWeights, TermWeights, main_total
from trainer_kit.task import Weight

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext

PackWeights = SharedWeights | TermWeights
DECLARED, RETURNED, BY_TERM = "one weight in ForwardInputs.weight", "no weight in ForwardInputs.weight", "a mapping of weights by term"
KINDS = (DECLARED, RETURNED, BY_TERM)


def kind_of(weights: PackWeights) -> str | None:
    """How the task gives the weights of a pack; None: the pack has no microbatch that would tell."""
    if isinstance(weights, TermWeights):
        return BY_TERM
    if not weights.num_microbatches:
        return None
    return DECLARED if weights.is_declared else RETURNED


class OwnWeights:
    """One loss rank: the totals are those of the pack."""

    sizes_differ = False

    def begin(self, weights: PackWeights) -> None:
        """See RankWeights."""
        self._weights = weights

    def before_backward(self) -> None:
        """See RankWeights."""

    def finish(self, sizes: Sequence[int]) -> Weight:
        """See RankWeights."""
        self.sizes_differ = len(set(sizes)) > 1
        return self._weights.total


class RankWeights:
    """Several loss ranks. Per pack: `begin`, `before_backward` before each backward that has no loss, `finish`.

    sizes_differ: whether microbatches that counted 1 for want of a weight had different sizes, on any rank.
    """

    def __init__(self, context: DistributedContext) -> None:
        self._context = context
        self._names: list[str | None] = [None]  # of the weights that travel, the same on all ranks; None: the one of all terms
        self._kind: str | None = None  # of the packs of this step, on all ranks
        self._is_first = True
        self._wait: Callable[[], list[float]] | None = None
        self._totals: dict[str | None, Weight] = {}
        self.sizes_differ = False

    def begin(self, weights: PackWeights) -> None:
        """Before the first forward: start to add up what is declared. In the first step wait for it, so that ranks that do not fit each
        other end before any other collective."""
        self._weights = weights
        self._wait = self._start()
        if isinstance(weights, TermWeights):
            weights.complete = self._settle  # waits before the first backward, which needs the totals
        if self._is_first:
            self._settle()

    def before_backward(self) -> None:
        """A rank that has no loss does not know whether the others need totals before their backward, and goes with them."""
        if kind_of(self._weights) in (None, BY_TERM):
            self._settle()

    def finish(self, sizes: Sequence[int]) -> Weight:
        """After the last backward: the total by which to divide the gradients.

        sizes: of the microbatches that counted 1 for want of a weight.
        """
        self._settle()
        if self._kind == RETURNED:
            return self._sum_of_returned(sizes)
        if self._kind == BY_TERM:
            return main_total(self._totals.values())
        return self._totals[None]

    def _start(self) -> Callable[[], list[float]]:
        mine = self._declared()
        kind = kind_of(self._weights)
        num_new = sum(name not in self._names for name in mine)
        on_device = any(isinstance(weight, torch.Tensor) for weight in mine.values())
        numbers = [self._on_host(mine.get(name, 0)) for name in self._names]
        return self._context.host.start_sum([*(float(kind == each) for each in KINDS), num_new, float(on_device), *numbers])

    def _declared(self) -> Mapping[Any, Weight]:
        return self._weights.totals if isinstance(self._weights, TermWeights) else {None: self._weights.total}

    def _on_host(self, weight: Weight) -> float:
        return 0.0 if isinstance(weight, torch.Tensor) or not self._context.is_counted else float(weight)

    def _settle(self) -> None:
        """Wait for the sums, and make of them the totals of all ranks. Raises ConfigurationError on every rank that comes here."""
        while self._wait is not None:
            found, self._wait = self._wait(), None
            num_of_kind, (num_new, num_on_device), sums = found[: len(KINDS)], found[len(KINDS) : len(KINDS) + 2], found[len(KINDS) + 2 :]
            self._kind = _only_kind(num_of_kind)
            if num_new:
                every = self._context.host.exchange(list(self._declared()))
                self._names = list(dict.fromkeys([*self._names, *(name for names in every for name in names)]))
                self._wait = self._start()
                continue
            self._is_first = self._is_first and self._kind is None
            totals: dict[str | None, Weight] = dict(zip(self._names, sums, strict=True))
            if num_on_device:
                mine = self._declared()
                on_device = self._sum_on_device([mine.get(name, 0) for name in self._names])
                totals = {name: number + part for (name, number), part in zip(totals.items(), on_device, strict=True)}
            self._totals = {name: total for name, total in totals.items() if (name is None) != (self._kind == BY_TERM)}
            if isinstance(self._weights, TermWeights):
                self._weights.totals, self._weights.complete = self._totals, None  # type: ignore[assignment]

    def _sum_of_returned(self, sizes: Sequence[int]) -> Weight:
        """The total of weights that were known only after the forward, or were missing."""
        total = self._weights.total
        on_device = float(isinstance(total, torch.Tensor))
        known = sizes if self._context.is_counted else ()
        squares = sum(size * size for size in known)
        found = self._context.host.sum([self._on_host(total), on_device, len(known), sum(known), squares])
        self.sizes_differ = found[2] * found[4] != found[3] ** 2  # all are equal if and only if these are
        return found[0] + self._sum_on_device([total])[0] if found[1] else found[0]

    def _sum_on_device(self, weights: Sequence[Weight]) -> Sequence[torch.Tensor]:
        """The parts that are on a device, summed over the loss ranks for all stages; tensor peers sum in groups of their own, so each
        microbatch counts once."""
        import torch.distributed as dist

        nothing = torch.zeros((), dtype=torch.float64, device=self._context.device)
        known = [weight if isinstance(weight, torch.Tensor) and self._context.hosts_last_stage else nothing for weight in weights]
        summed = torch.stack([weight.to(nothing) for weight in known])
        group = self._context.group("batch", "pp", "dp", "cp")
        if group is not None:
            dist.all_reduce(summed, group=group)
        return summed.unbind()


def _only_kind(num_of_kind: Sequence[float]) -> str | None:
    present = {kind: int(num) for kind, num in zip(KINDS, num_of_kind, strict=True) if num}
    if len(present) > 1:
        found = " and ".join(f"{kind} on {num} rank{'s' if num > 1 else ''}" for kind, num in present.items())
        raise ConfigurationError(f"the task gives {found}; build_forward_inputs must declare weights the same way on every rank")
    return next(iter(present), None)
