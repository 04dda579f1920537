"""`LossSums`: the losses of packs, as sums that add up over microbatches, packs and ranks; divided only when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.pipeline.loss_terms import MAIN, Term
from trainer_kit.task import Weight


@dataclass(slots=True)
class LossSums:
    """The sums of weighted losses and of weights, by term.

    coefficients: of each term. One that came with several has 1 here, and its sum is that of the products.
    """

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    coefficients: dict[str, float] = field(default_factory=dict)
    _with_products: set[str] = field(default_factory=set)

    def add(self, terms: Sequence[Term], weighed: set[str] | None = None) -> None:
        """Add the terms of one microbatch; one of weight 0 adds nothing, be its loss nan. Sums are kept in fp64 where there is fp64.

        weighed: the terms for which the weight of this microbatch is counted already, by another stage on this rank; they become more.
        """
        weighed = set() if weighed is None else weighed
        for term in terms:
            name, value = term.name, term.loss.detach()
            weighted = (value.double() if value.device.type != "mps" else value.float()) * term.weight
            if isinstance(term.weight, torch.Tensor):
                weighted = torch.where(term.weight == 0, 0, weighted)
            elif term.weight == 0:
                weighted = torch.zeros_like(weighted)
            if self.coefficients.setdefault(name, term.coefficient) != term.coefficient and name not in self._with_products:
                self.sums[name] = self.sums[name] * self.coefficients[name]
                self.coefficients[name] = 1.0
                self._with_products.add(name)
            if name in self._with_products:
                weighted = weighted * term.coefficient
            self.sums[name] = self.sums[name] + weighted if name in self.sums else weighted
            if name not in weighed:
                weighed.add(name)
                self.weights[name] = self.weights.get(name, 0) + term.weight

    def values(self, prefix: str) -> dict[str, torch.Tensor]:
        """`<prefix>/loss`, which is what is minimised, and with several terms the weighted mean of each as `<prefix>/<term>`."""
        means = {name: _ratio(total, self.weights[name]) for name, total in self.sums.items()}
        if len(means) > 1 and "loss" in means:
            raise ConfigurationError("one of several loss terms has the name 'loss', which is that of their sum; rename it")
        found = {f"{prefix}/{name}": mean for name, mean in means.items() if name not in (MAIN, "loss")}
        if means:
            found[f"{prefix}/loss"] = torch.stack([mean * self.coefficients[name] for name, mean in means.items()]).sum()
        return found


def _ratio(total: torch.Tensor, weight: Weight) -> torch.Tensor:
    if isinstance(weight, torch.Tensor) or weight:
        return total / weight
    return torch.full_like(total, float("nan"))
