"""From what a task declared and returned to weighted loss terms: the place where the weighting rules live.

Backward starts from the weight of a term; gradients are divided once by the total weight of the main term. A term k with weights
of its own starts from `weight * total_main / total_k`, so that one division makes each term the mean over its own weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer_kit.exceptions import ConfigurationError, ModelError
from trainer_kit.mesh.context import AddedLoss
from trainer_kit.task import ForwardInputs, Loss, Weight
from trainer_kit.torch_private import read_cpu_scalar

MAIN = ""  # the name of the only term of a task that returns one loss


@dataclass(slots=True)
class Term:
    """One loss term of a microbatch: the mean loss, its weight, and the gradient that its backward starts from.

    coefficient: how much the mean of the term counts in the loss that is minimised.
    """

    name: str
    loss: torch.Tensor
    weight: Weight
    start: Weight
    coefficient: float = 1.0


def pack_weights(inputs: Sequence[ForwardInputs]) -> SharedWeights | TermWeights:
    """The weights that a task declared for the microbatches of a pack."""
    weights = [given.weight for given in inputs]
    if all([type(weight) in (int, float) and 0 <= weight < math.inf for weight in weights]):  # type: ignore[operator]  # noqa: C419
        return SharedWeights(weights)  # type: ignore[arg-type]  # the usual case, and this runs in every step
    kinds = {"mapping" if isinstance(weight, Mapping) else type(weight) is type(None) for weight in weights}
    if len(kinds) > 1:
        raise ConfigurationError(
            "ForwardInputs.weight is given for some microbatches of a pack and not, or otherwise, for others; "
            "declare it the same way in all"
        )
    if "mapping" in kinds:
        if not all(weights):
            raise ConfigurationError("ForwardInputs.weight is an empty mapping, expected a weight for each loss term")
        return TermWeights([{name: checked_weight(w, name) for name, w in weight.items()} for weight in weights])  # type: ignore[union-attr]
    return SharedWeights([None if weight is None else checked_weight(weight, MAIN) for weight in weights])  # type: ignore[arg-type]


class SharedWeights:
    """All terms of a microbatch count alike: with the weight that was declared, or returned with the loss, or 1.

    total: what gradients are divided by, once all microbatches were seen. assumed: whether a loss counted 1 for want of a weight.
    """

    def __init__(self, weights: Sequence[Weight | None]) -> None:
        self._declared = weights
        self.total: Weight = sum(weight for weight in weights if weight is not None)
        self.assumed = False

    @property
    def num_microbatches(self) -> int:
        """How many microbatches the pack has."""
        return len(self._declared)

    @property
    def is_declared(self) -> bool:
        """Whether the weights are known before the forwards."""
        return all(weight is not None for weight in self._declared)

    def nothing_counts(self, index: int) -> bool:
        """Whether the host knows before the forward that a microbatch has no weight."""
        weight = self._declared[index]
        return weight is not None and not isinstance(weight, torch.Tensor) and weight == 0

    def terms(self, index: int, returned: Any, added: Sequence[AddedLoss]) -> list[Term]:
        """The terms of one microbatch from what `compute_loss` returned and the forward added."""
        others: list[tuple[str, Any]] = []
        name = MAIN
        if type(returned) is not torch.Tensor and isinstance(returned, Mapping):
            if not returned:
                raise ConfigurationError("compute_loss returned an empty mapping, expected at least one loss")
            (name, returned), *others = returned.items()
        loss, weight = self._main(index, returned)
        terms = [Term(name, loss, weight, weight)]
        if not others and not added:
            return terms
        terms += [Term(other, _without_weight(other, value), weight, weight) for other, value in others]
        return terms + _added_terms(added, weight)

    def added_terms(self, index: int, added: Sequence[AddedLoss]) -> list[Term]:
        """The terms that a pipeline stage before the last one added; what `compute_loss` returns is not known there."""
        weight = self._declared[index]
        if weight is None and added:
            raise ConfigurationError(
                f"context.add_loss({added[0].name!r}, ...) was called in a pipeline stage before the last one, which does not know the "
                "weight of the microbatch; declare it as ForwardInputs.weight in place of returning it with the loss"
            )
        return _added_terms(added, 0 if weight is None else weight)

    def _main(self, index: int, returned: Any) -> tuple[torch.Tensor, Weight]:
        declared = self._declared[index]
        loss, weight = (returned.loss, returned.weight) if isinstance(returned, Loss) else (returned, None)
        if declared is not None:
            if weight is not None:
                raise ConfigurationError("the weight is declared in ForwardInputs.weight and returned in Loss; give it once")
            return loss, declared
        if weight is None:
            self.assumed, weight = True, 1.0
        else:
            weight = checked_weight(weight, MAIN)
        self.total = self.total + weight
        return loss, weight


class TermWeights:
    """Each term has weights of its own, all declared before the first forward.

    totals: by term, the main one first. complete: called before the totals are needed, to make them those of all ranks.
    """

    assumed = False

    def __init__(self, weights: Sequence[Mapping[str, Weight]]) -> None:
        self._declared = weights
        self.complete: Callable[[], None] | None = None
        self.totals: dict[str, Weight] = {}
        for weight in weights:
            for name, value in weight.items():
                self.totals[name] = self.totals.get(name, 0) + value

    @property
    def total(self) -> Weight:
        """The total weight of the main term, see `main_total`."""
        return main_total(self.totals.values())

    def nothing_counts(self, index: int) -> bool:
        """Whether the host knows before the forward that no term of a microbatch has a weight."""
        return all(not isinstance(weight, torch.Tensor) and weight == 0 for weight in self._declared[index].values())

    def terms(self, index: int, returned: Any, added: Sequence[AddedLoss]) -> list[Term]:
        """The terms of one microbatch from what `compute_loss` returned and the forward added."""
        if self.complete is not None:
            self.complete()
        declared = self._declared[index]
        if not isinstance(returned, Mapping):
            raise ConfigurationError(
                "ForwardInputs.weight is a mapping of terms, so compute_loss must return a mapping with the same names"
            )
        if missing := [name for name in returned if name not in declared]:
            raise ConfigurationError(
                f"compute_loss returned the terms {missing} without a weight in ForwardInputs.weight, which declares {list(declared)}"
            )
        terms = [Term(n, _without_weight(n, value), declared[n], self._start(n, declared[n])) for n, value in returned.items()]
        return terms + self.added_terms(index, added)

    def added_terms(self, index: int, added: Sequence[AddedLoss]) -> list[Term]:
        """The terms that a forward added."""
        declared, terms = self._declared[index], []
        for extra in added:
            name = extra.name if extra.name in declared else next(iter(self.totals))
            weight = declared.get(name, 0)
            start = self._start(name, weight) * extra.coefficient
            terms.append(Term(extra.name, extra.value, weight, start, extra.coefficient))
        return terms

    def _start(self, name: str, weight: Weight) -> Weight:
        if name == next(iter(self.totals)):
            return weight
        mine = self.totals[name]
        if isinstance(mine, torch.Tensor):
            return weight * self.total / torch.where(mine == 0, 1, mine)
        return weight * self.total / mine if mine else 0.0


def _added_terms(added: Sequence[AddedLoss], weight: Weight) -> list[Term]:
    return [Term(extra.name, extra.value, weight, weight * extra.coefficient, extra.coefficient) for extra in added]


def main_total(totals: Iterable[Weight]) -> Weight:
    """The total weight of the main term, which is the first one; 1 where it has none but another term counts."""
    main, *others = totals
    counts = any(isinstance(value, torch.Tensor) or value for value in others)
    if isinstance(main, torch.Tensor):
        return torch.where(main == 0, 1, main) if counts else main
    return main if main or not counts else 1.0


def _without_weight(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, Loss):
        return value
    if value.weight is not None:
        raise ConfigurationError(
            f"the loss term {name!r} brings a weight of its own; its total over the pack must be known before the first backward: "
            "declare one weight per term as a mapping in ForwardInputs.weight"
        )
    return value.loss


def checked_weight(weight: Weight, name: str) -> Weight:
    """A weight as a host number where that needs no waiting, else as a 0-dim tensor."""
    where = f" of the term {name!r}" if name else ""
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise ConfigurationError(f"the weight{where} has shape {tuple(weight.shape)}, expected a number or one element")
        if weight.device.type != "cpu":
            return weight.detach().reshape(())
        weight = read_cpu_scalar(weight)  # on a CPU a weight of 0 is known before the backward
    if not isinstance(weight, (int, float)):
        raise ConfigurationError(f"the weight{where} is {weight!r}, expected a number or a tensor of one element")
    if not 0 <= weight < math.inf:
        raise ConfigurationError(f"the weight{where} is {weight}, expected a finite number that is not negative")
    return weight


def check_loss(term: Term, *, needs_graph: bool) -> None:
    """A term must be a scalar tensor; in training, one with a graph."""
    loss = term.loss
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and (loss.requires_grad or not needs_graph):
        return
    name = f"the loss term {term.name!r}" if term.name else "the loss"
    if not isinstance(loss, torch.Tensor):
        raise ModelError(
            f"{name} is a {type(loss).__name__}, expected a scalar tensor; return it from compute_loss, or wrap it as Loss(loss, weight)"
        )
    if loss.numel() != 1:
        raise ModelError(
            f"{name} has shape {tuple(loss.shape)}, expected a scalar: the mean over the microbatch; reduce it in compute_loss"
        )
    raise ModelError(
        f"{name} has no graph, so nothing can be learned from it. Usual causes: detach(), item(), no_grad or argmax on the way, "
        "or all parameters frozen"
    )
