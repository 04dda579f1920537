"""Prints what is about to be trained when a fit starts, and one line when it ends.

Not here: the long description (`print(trainer.describe())`). Know before editing: it writes around a live progress bar, not through it.
"""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

from trainer_kit.callback import Callback

if TYPE_CHECKING:
    from trainer_kit.events import FitEnd, FitStart


def say(text: str) -> None:
    """A line on the standard output that leaves a live progress bar whole."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stdout)


class Summary(Callback):
    """On the main rank: the parts of the run, then its steps, last loss, time and why it ended.

    enabled: False prints nothing. A trainer adds a Summary by itself, so `Summary(False)` is the way to be without.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._first_step = 0
        self._started = 0.0

    def describe(self) -> str:
        return "Summary" if self.enabled else "Summary (off)"

    def on_fit_start(self, event: FitStart) -> None:
        self._first_step, self._started = event.trainer.step, time.perf_counter()
        if self.enabled and event.trainer.context.is_main:
            say(event.trainer.describe().short())

    def on_fit_end(self, event: FitEnd) -> None:
        if not self.enabled or not event.trainer.context.is_main:
            return
        trainer = event.trainer
        num_steps, seconds = trainer.step - self._first_step, time.perf_counter() - self._started
        last = trainer.history.last("train/loss")
        parts = [f"step {trainer.step}", f"{num_steps} steps in {_duration(seconds)}"]
        if last is not None:
            parts.insert(1, f"train/loss {last[1]:.4g}")
        say(f"fit ended: {', '.join(parts)}" + (f" ({event.reason})" if event.reason else ""))


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(math.floor(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h" if minutes >= 60 else f"{minutes}:{rest:02d} min"
