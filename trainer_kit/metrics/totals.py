"""Metrics that keep one number: a sum, an extreme, the last value.

Before editing: an update without elements is no update, or a `Max` of nothing would have to have a value.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from trainer_kit.metrics.metric import Metric, Number, Reduction, total


class _Total(Metric):
    """One state named `value`."""

    def update(self, values: Number) -> None:
        """Add all elements of `values`, a tensor of any shape or a number."""
        wide = self.widen(values)
        if wide.numel():
            self.accumulate("value", self._fold(wide))

    def _fold(self, values: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _compute(self) -> torch.Tensor:
        return self.state("value")


class Sum(_Total):
    """The sum of all elements; exact int64 when all of them are integers."""

    reductions: ClassVar[dict[str, Reduction]] = {"value": "sum"}

    def _fold(self, values: torch.Tensor) -> torch.Tensor:
        return total(values)


class Max(_Total):
    """The largest element; nan if one is nan."""

    reductions: ClassVar[dict[str, Reduction]] = {"value": "max"}

    def _fold(self, values: torch.Tensor) -> torch.Tensor:
        return values.amax()


class Min(_Total):
    """The smallest element; nan if one is nan."""

    reductions: ClassVar[dict[str, Reduction]] = {"value": "min"}

    def _fold(self, values: torch.Tensor) -> torch.Tensor:
        return values.amin()


class Last(_Total):
    """The last element of the last update."""

    reductions: ClassVar[dict[str, Reduction]] = {"value": "last"}

    def _fold(self, values: torch.Tensor) -> torch.Tensor:
        return values.flatten()[-1]
