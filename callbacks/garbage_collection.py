"""Replaces Python's automatic garbage collection by one at fixed steps.

On many ranks automatic collections happen at different moments, and everybody waits for each of them. Not here: device memory.
Know before editing: the state from before the fit is put back in `close`, which runs after an error too.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from trainer_kit.callback import Callback
from trainer_kit.callbacks._arguments import whole_number

if TYPE_CHECKING:
    from trainer_kit.events import FitStart, StepEnd


class GarbageCollection(Callback):
    """Collect every `every` steps, on all ranks at the same step, and not in between.

    every: steps between collections. A smaller number bounds the memory of reference cycles more tightly.
    """

    def __init__(self, every: int = 100) -> None:
        self.every = whole_number(self, "every", every)
        self._enable_again = False

    def describe(self) -> str:
        return f"GarbageCollection(every {self.every} steps)"

    def on_fit_start(self, event: FitStart) -> None:
        self._enable_again = gc.isenabled()
        gc.disable()

    def on_step_end(self, event: StepEnd) -> None:
        if event.trainer.step % self.every == 0:
            gc.collect()

    def close(self) -> None:
        if self._enable_again:
            gc.enable()
            self._enable_again = False
