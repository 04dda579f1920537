"""`Accuracy`: the share of right answers. Other measures of classification come from packages such as torchmetrics."""

from __future__ import annotations

from typing import ClassVar

import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.metrics.metric import Metric, Reduction, quotient
from trainer_kit.torch_private import whole_tensor


class Accuracy(Metric):
    """The share of targets that have the largest score.

    dim: where the classes are in the scores. Targets equal to `ignore_index` do not count.
    """

    reductions: ClassVar[dict[str, Reduction]] = {"correct": "sum", "count": "sum"}

    def __init__(self, dim: int = -1, ignore_index: int = -100) -> None:
        super().__init__()
        self.dim, self.ignore_index = dim, ignore_index

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Scores with a dim of classes, or predicted classes in the shape of the targets; targets are class numbers.

        Scores that tensor parallelism cut over the classes are compared among the ranks, all of which must call this.
        """
        predicted = whole_tensor(outputs if outputs.shape == targets.shape else outputs.argmax(self.dim))
        if predicted.shape != targets.shape:
            raise ConfigurationError(
                f"Accuracy.update got outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}; expected the "
                f"shape of the targets plus a dim of classes at dim={self.dim}. Set Accuracy(dim=...) if the classes are in another dim"
            )
        if targets.numel():
            counted = targets != self.ignore_index
            self.accumulate("correct", ((predicted == targets) & counted).sum())
            self.accumulate("count", counted.sum())

    def _compute(self) -> torch.Tensor:
        return quotient(self.state("correct"), self.state("count"))
