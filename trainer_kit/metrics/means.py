"""Metrics that are a quotient: means and what follows from one.

Before editing: numerator and denominator are reduced separately and divided in `compute` only, so that the result does not depend on
how the values were cut into microbatches or ranks.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from trainer_kit.metrics.metric import Metric, Number, Reduction, quotient, times, total


class Mean(Metric):
    """The mean over all elements of all updates; each element counts once."""

    reductions: ClassVar[dict[str, Reduction]] = {"total": "sum", "count": "sum"}

    def update(self, values: Number) -> None:
        """Add all elements of `values`, a tensor of any shape or a number."""
        wide = self.widen(values)
        if wide.numel():
            self.accumulate("total", total(wide))
            self.accumulate("count", wide.numel())

    def _compute(self) -> torch.Tensor:
        return quotient(self.state("total"), self.state("count"))


class WeightedMean(Metric):
    """`sum(weight * value) / sum(weight)`, such as the loss per token of microbatches with different numbers of tokens."""

    reductions: ClassVar[dict[str, Reduction]] = {"total": "sum", "weight": "sum"}

    def update(self, values: Number, weights: Number) -> None:
        """Add values with their weights; the shapes broadcast, so one weight for many values counts for each of them.

        A value of weight 0 counts as nothing, also when it is nan: the mean loss of a microbatch without a target.
        """
        wide = self.widen(values)
        if isinstance(weights, torch.Tensor):
            value, weight = torch.broadcast_tensors(wide, self.widen(weights))
            if value.numel():
                self.accumulate("total", torch.where(weight == 0, 0, value * weight).sum())
                self.accumulate("weight", weight.sum())
        elif weights and wide.numel():
            # The loop's path, once per microbatch: a host weight needs no tensor of its own.
            self.accumulate("total", times(total(wide), weights))
            self.accumulate("weight", weights * wide.numel())

    def _compute(self) -> torch.Tensor:
        return quotient(self.state("total"), self.state("weight"))


class Perplexity(WeightedMean):
    """The exponential of the mean loss per token: `update(mean loss in nats, number of tokens)`."""

    def _compute(self) -> torch.Tensor:
        return super()._compute().exp()
