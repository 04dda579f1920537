"""From what a task declared and returned to weighted loss terms: the place where the weighting rules live.

Backward starts from the weight of a term; gradients are divided once by the total weight of the main term. A term k with weights
of its own starts from `weight * total_main / total_k`, so that one division makes each term the mean over its own weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class DeclaredWeights:
    """The weights that a task declared for the microbatches of a pack, and their totals by term."""

    def __init__(self, inputs: Sequence[ForwardInputs]) -> None:
        self._weights = [_declared(given.weight) for given in inputs]
        self.totals: dict[str, Weight] = {}
        self.assumed = False  # whether a loss came without any weight, and counted 1
        kinds = {"none" if w is None else "mapping" if isinstance(w, Mapping) else "weight" for w in self._weights}
        if len(kinds) > 1:
            raise ConfigurationError("ForwardInputs.weight is given for some microbatches of a pack and not, or otherwise, for others; declare it the same way in all")
        self.kind = kinds.pop()
        for weight in self._weights:
            for name, value in weight.items() if isinstance(weight, Mapping) else [(MAIN, weight)]:
                if value is not None:
                    self.totals[name] = self.totals.get(name, 0) + value

    def all_zero(self, index: int) -> bool:
        """Whether the host knows that nothing in this microbatch counts."""
        weight = self._weights[index]
        if isinstance(weight, Mapping):
            return all(not isinstance(value, torch.Tensor) and value == 0 for value in weight.values())
        return not isinstance(weight, torch.Tensor) and weight == 0

    def terms(self, index: int, returned: Any, added: Sequence[AddedLoss]) -> list[Term]:
        """The terms of one microbatch from what `compute_loss` returned and the forward added."""
        declared = self._weights[index]
        if self.kind == "mapping":
            terms = self._with_own_weights(index, returned)
        elif isinstance(returned, Mapping):
            terms = self._sharing_one_weight(returned, declared)
        else:
            loss, weight = self._unpack(returned, declared)
            terms = [Term(MAIN, loss, weight, weight)]
        for extra in added:
            weight = declared.get(extra.name, terms[0].weight) if isinstance(declared, Mapping) else terms[0].weight
            start = self._rescaled(extra.name, weight) if isinstance(declared, Mapping) and extra.name in declared else weight
            terms.append(Term(extra.name, extra.value, weight, start * extra.coefficient, extra.coefficient))
        return terms

    def _with_own_weights(self, index: int, returned: Any) -> list[Term]:
        declared = self._weights[index]
        if not isinstance(returned, Mapping):
            raise ConfigurationError("ForwardInputs.weight is a mapping of terms, so compute_loss must return a mapping with the same names")
        missing = [name for name in returned if name not in declared]
        if missing:
            raise ConfigurationError(f"compute_loss returned the terms {missing} without a weight in ForwardInputs.weight, which declares {list(declared)}")
        terms = []
        for name, loss in returned.items():
            if isinstance(loss, Loss):
                if loss.weight is not None:
                    raise ConfigurationError(f"the weight of the loss {name!r} is declared in ForwardInputs.weight and returned in Loss; give it once")
                loss = loss.loss
            terms.append(Term(name, loss, declared[name], self._rescaled(name, declared[name], main=next(iter(returned)))))
        return terms

    def _rescaled(self, name: str, weight: Weight, main: str | None = None) -> Weight:
        main = main if main is not None else next(iter(self.totals))
        if name == main:
            return weight
        mine, wanted = self.totals[name], self.divisor(main)
        if isinstance(mine, torch.Tensor):
            return weight * wanted / torch.where(mine == 0, 1, mine)
        return weight * wanted / mine if mine else 0.0

    def _sharing_one_weight(self, returned: Mapping[str, Any], declared: Weight | None) -> list[Term]:
        if not returned:
            raise ConfigurationError("compute_loss returned an empty mapping, expected at least one loss")
        (first, main), *rest = returned.items()
        loss, weight = self._unpack(main, declared)
        terms = [Term(first, loss, weight, weight)]
        for name, value in rest:
            if isinstance(value, Loss):
                if value.weight is not None:
                    raise ConfigurationError(
                        f"the loss term {name!r} brings a weight of its own; its total over the pack must be known before the first backward: "
                        "declare one weight per term as a mapping in ForwardInputs.weight"
                    )
                value = value.loss
            terms.append(Term(name, value, weight, weight))
        return terms

    def _unpack(self, returned: Any, declared: Weight | None) -> tuple[torch.Tensor, Weight]:
        loss, weight = (returned.loss, returned.weight) if isinstance(returned, Loss) else (returned, None)
        if weight is None and declared is None:
            self.assumed = True
            return loss, 1.0
        if weight is not None and declared is not None:
            raise ConfigurationError("the weight is declared in ForwardInputs.weight and returned in Loss; give it once")
        return loss, _checked(weight, MAIN) if weight is not None else declared  # type: ignore[return-value]

    def divisor(self, main: str) -> Weight:
        """The total weight of the main term; 1 where it has none but another term counts."""
        total = self.totals[main]
        others = any(isinstance(value, torch.Tensor) or value for name, value in self.totals.items() if name != main)
        if isinstance(total, torch.Tensor):
            return torch.where(total == 0, 1, total) if others else total
        return total if total or not others else 1.0


def _declared(weight: Weight | Mapping[str, Weight] | None) -> Weight | Mapping[str, Weight] | None:
    if isinstance(weight, Mapping):
        return {name: _checked(value, name) for name, value in weight.items()}
    return None if weight is None else _checked(weight, MAIN)


def _checked(weight: Weight, name: str) -> Weight:
    where = f" of the term {name!r}" if name else ""
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise ConfigurationError(f"the weight{where} has shape {tuple(weight.shape)}, expected a number or one element")
        if weight.device.type != "cpu":
            return weight.detach().reshape(())
        weight = read_cpu_scalar(weight)  # on a CPU there is nothing to wait for, and a weight of 0 is known before the backward
    if not 0 <= weight < float("inf"):
        raise ConfigurationError(f"the weight{where} is {weight}, expected a finite number that is not negative")
    return weight


def check_loss(term: Term, *, needs_graph: bool) -> None:
    """A term must be a scalar tensor; in training, one with a graph."""
    name = f"the loss term {term.name!r}" if term.name else "the loss"
    loss = term.loss
    if not isinstance(loss, torch.Tensor):
        raise ModelError(f"{name} is a {type(loss).__name__}, expected a scalar tensor; return it from compute_loss, or wrap it as Loss(loss, weight)")
    if loss.numel() != 1:
        raise ModelError(f"{name} has shape {tuple(loss.shape)}, expected a scalar: the mean over the microbatch; reduce it in compute_loss")
    if needs_graph and not loss.requires_grad:
        raise ModelError(
            f"{name} has no graph, so nothing can be learned from it. Usual causes: detach(), item(), no_grad or argmax on the way, or all parameters frozen"
        )
