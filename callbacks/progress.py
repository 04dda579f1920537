"""The progress bar: one live bar in a terminal or notebook, a plain line now and then anywhere else.

Not here: the summary at the start and end (`Summary`). Know before editing: `on_step_end` runs in every step and must do next to
nothing; it keeps the step and looks at the clock. An evaluation shows in the same bar, never in a second one.
"""

from __future__ import annotations

import io
import shutil
import sys
import time
from typing import IO, TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.callbacks._arguments import number

if TYPE_CHECKING:
    from trainer_kit.events import EpochStart, EvaluateEnd, EvaluateStart, FitStart, Metrics, RunException, StepEnd

_PLAIN = "{n_fmt}/{total_fmt} steps [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_SHOWN = {"train/loss": "loss", "val/loss": "val", "optim/lr": "lr"}


class Progress(Callback):
    """Shows steps, speed, loss and learning rate on the main rank's standard error.

    enabled: False shows nothing. A trainer adds a Progress by itself, so `Progress(False)` is the way to be without.
    refresh: seconds between two refreshes of a live bar.
    plain_every: seconds between two lines where there is no terminal and no notebook.
    bar: the tqdm object of the running or the last fit.
    """

    def __init__(self, enabled: bool = True, *, refresh: float = 0.1, plain_every: float = 30.0) -> None:
        self.enabled = enabled
        self.refresh = number(self, "refresh", refresh, above=0.0)
        self.plain_every = number(self, "plain_every", plain_every, above=0.0)
        self.bar: Any = None
        self._plain_stream: IO[str] | None = None
        self._step = 0
        self._next = float("inf")
        self._shown: dict[str, float] = {}
        self._epoch = 0

    def describe(self) -> str:
        return "Progress" if self.enabled else "Progress (off)"

    def on_fit_start(self, event: FitStart) -> None:
        trainer = event.trainer
        self._step, self._shown, self._epoch = trainer.step, {}, trainer.epoch
        if not self.enabled or not trainer.context.is_main:
            return
        from tqdm.auto import tqdm

        in_notebook = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)
        stream = sys.stderr
        is_live = in_notebook or stream.isatty()
        self._plain_stream = None if is_live else stream
        # A terminal that does not tell its width, as some containers give, would show an empty line.
        width: dict[str, Any] = {"dynamic_ncols": True} if shutil.get_terminal_size((0, 0)).columns else {"ncols": 80}
        display: dict[str, Any] = {**width, "file": stream}
        if in_notebook:
            del display["file"]
        elif not is_live:  # it only counts and formats: nothing that tqdm writes by itself, or redraws after a print, is shown
            display = {"delay": float("inf"), "bar_format": _PLAIN, "file": io.StringIO()}
        self.bar = tqdm(total=trainer.total_steps, initial=trainer.step, unit=" step", mininterval=0.0, miniters=0, leave=True, **display)
        self._schedule(time.monotonic())

    def _schedule(self, now: float) -> None:
        self._next = now + (self.refresh if self._plain_stream is None else self.plain_every)

    def on_step_end(self, event: StepEnd) -> None:
        self._step = event.step + 1
        now = time.monotonic()
        if now >= self._next:
            self._show()
            self._schedule(now)

    def _show(self) -> None:
        self.bar.set_postfix_str(" ".join(f"{label}={value:.4g}" for label, value in self._shown.items()), refresh=False)
        if self._plain_stream is None:
            self.bar.update(self._step - self.bar.n)  # tqdm's own refresh, since its interval is 0
            self.bar.refresh()
        else:
            self.bar.n = self._step
            self._plain_stream.write(f"{self.bar}\n")
            self._plain_stream.flush()

    def on_metrics(self, event: Metrics) -> None:
        self._shown.update({label: event.values[name] for name, label in _SHOWN.items() if name in event.values})

    def on_epoch_start(self, event: EpochStart) -> None:
        self._epoch = event.epoch
        self._set_description("")

    def on_evaluate_start(self, event: EvaluateStart) -> None:
        self._set_description("evaluating")

    def on_evaluate_end(self, event: EvaluateEnd) -> None:
        self._set_description("")

    def _set_description(self, activity: str) -> None:
        if self.bar is not None and self._plain_stream is None and self._next != float("inf"):
            self.bar.set_description_str(activity or (f"epoch {self._epoch}" if self._epoch else ""), refresh=bool(activity))

    def on_exception(self, event: RunException) -> None:
        self._step = event.trainer.step  # a handler that failed before this one may have kept the last step end from it

    def close(self) -> None:
        if self.bar is not None and self._next != float("inf"):
            self._next = float("inf")
            try:
                self._show()
            finally:
                self.bar.close()
                self._plain_stream = None
