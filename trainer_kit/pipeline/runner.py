"""`PackRunner`: what the loops ask of a runner, be it through one stage or a pipeline of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from trainer_kit.data import Pack
from trainer_kit.metrics import Metric
from trainer_kit.pipeline.loss_sums import LossSums
from trainer_kit.task import Task, Weight


class PackRunner(Protocol):
    """Runs packs through the stages of this rank. On several ranks every method is a collective of all of them.

    begin_microbatch: told of the backwards of a step, as `Gradients.begin_microbatch` wants it; None: nobody is.
    hosts_last_stage: whether losses, metrics and predictions come from this rank.
    """

    begin_microbatch: Callable[[bool], None] | None

    @property
    def hosts_last_stage(self) -> bool:
        """See the class."""
        ...

    def run_pack(
        self,
        pack: Pack,
        task: Task,
        metrics: dict[str, Metric],
        *,
        losses: LossSums | None,
        on_microbatch: Callable[[int, torch.Tensor | None], None] | None = None,
    ) -> Weight:
        """Forward and backward of every microbatch; gradients accumulate. Returns the weight by which to divide them, on every rank.

        losses: where this rank adds the losses that it has, if they are wanted. on_microbatch: called with (index, loss or None) after each
        backward of the last stage, where that is.
        """
        ...

    def evaluate_pack(self, pack: Pack, task: Task, metrics: dict[str, Metric], losses: LossSums) -> None:
        """Forward, loss and metrics of every microbatch, without a graph; each rank adds what it has to `losses`."""
        ...

    def predict_pack(self, pack: Pack, task: Task) -> Iterator[Any]:
        """What `task.process_outputs` makes of each microbatch, in order, where the last stage is. Go through all of them before any other
        collective."""
        ...
