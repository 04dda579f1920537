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
    """The sums of weighted losses and of weights, by term."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    coefficients: dict[str, float] = field(default_factory=dict)

    def add(self, terms: Sequence[Term]) -> None:
        """Add the terms of one microbatch; one of weight 0 adds nothing, be its loss nan. Sums are kept in fp64 where there is fp64."""
        for term in terms:
            value = term.loss.detach()
            weighted = (value.double() if value.device.type != "mps" else value.float()) * term.weight
            if isinstance(term.weight, torch.Tensor):
                weighted = torch.where(term.weight == 0, 0, weighted)
            elif term.weight == 0:
                weighted = torch.zeros_like(weighted)
            self.sums[term.name] = self.sums[term.name] + weighted if term.name in self.sums else weighted
            self.weights[term.name] = self.weights.get(term.name, 0) + term.weight
            self.coefficients[term.name] = term.coefficient

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
