"""Draws what the ranks of a pipeline computed when in one step, below the simulation of the same step.

Not here: how it is measured and drawn (`trainer_kit.pipeline`).
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from trainer_kit.callback import Callback
from trainer_kit.callbacks._arguments import local_path, whole_number

if TYPE_CHECKING:
    from trainer_kit.events import FitStart, StepEnd, StepStart


class PipelineTimeline(Callback):
    """Two timelines in one image: that of a step, and that of a simulation in which the parts take as long as they took on average.

    path: where rank 0 writes it; `.svg` is an image, any other name a text. step: which step, counted from 0; the first ones are slow.
    Ranks wait for each other at the begin of this step, so it takes a little longer than the others.
    """

    def __init__(self, path: str | os.PathLike[str], *, step: int = 5) -> None:
        self.path = local_path(self, "path", path)
        self.step = whole_number(self, "step", step, minimum=0)

    def describe(self) -> str:
        return f"PipelineTimeline({self.path}, step={self.step})"

    def on_fit_start(self, event: FitStart) -> None:
        if event.trainer.pipeline is None and event.trainer.context.is_main:
            warnings.warn("PipelineTimeline draws nothing: the run has no pipeline ranks (pp of MeshStrategy is 1)", stacklevel=2)

    def on_step_start(self, event: StepStart) -> None:
        if event.trainer.pipeline is not None:
            event.trainer.pipeline.record = event.step == self.step

    def on_step_end(self, event: StepEnd) -> None:
        if event.trainer.pipeline is None or event.step != self.step:
            return
        event.trainer.pipeline.record = False
        drawing = event.trainer.pipeline.drawing()
        if event.trainer.context.is_main and drawing is not None:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            drawing.save(self.path)
