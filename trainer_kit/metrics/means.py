"""Metrics that are a quotient: means and what follows from one.

Before editing: numerator and denominator are reduced separately and divided in `compute` only, so that the result does not depend on
how the values were cut into microbatches or ranks.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from trainer_kit.metrics.metric import Metric, Number, Reduction


class Mean(Metric):
    """The mean over all elements of all updates; each element counts once."""

    reductions: ClassVar[dict[str, Reduction]] = {"total": "sum", "count": "sum"}

    def update(self, values: Number) -> None:
        """Add all elements of `values`, a tensor of any shape or a number."""
        wide = self.widen(values)
        if wide.numel():
            self.accumulate("total", wide.sum())
            self.accumulate("count", self.constant(wide.numel(), like=wide))

    def _compute(self) -> torch.Tensor:
        return self.state("total") / self.state("count")


class WeightedMean(Metric):
    """`sum(weight * value) / sum(weight)`, such as the loss per token of microbatches with different numbers of tokens."""

    reductions: ClassVar[dict[str, Reduction]] = {"total": "sum", "weight": "sum"}

    def update(self, values: Number, weights: Number) -> None:
        """Add values with their weights; the shapes broadcast, so one weight for many values counts for each of them.

        A value of weight 0 counts as nothing, also when it is nan: the mean loss of a microbatch without a target.
        """
        value, weight = torch.broadcast_tensors(self.widen(values), self._weight(values, weights))
        if value.numel():
            self.accumulate("total", torch.where(weight == 0, 0, value * weight).sum())
            self.accumulate("weight", weight.sum())

    def _weight(self, values: Number, weights: Number) -> torch.Tensor:
        if isinstance(weights, torch.Tensor) or not isinstance(values, torch.Tensor):
            return self.widen(weights)
        return self.constant(weights, like=values, dtype=torch.float64 if isinstance(weights, float) else torch.int64)

    def _compute(self) -> torch.Tensor:
        return self.state("total") / self.state("weight")


class Perplexity(WeightedMean):
    """The exponential of the mean loss per token: `update(mean loss in nats, number of tokens)`."""

    def _compute(self) -> torch.Tensor:
        return super()._compute().exp()
