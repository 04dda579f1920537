"""Stops the run when a recorded metric has not improved for some time.

Not here: the evaluation that records it (`Evaluate`). Know before editing: every rank sees the same records, so every rank decides
the same; the state is loaded before `on_fit_start`, which must not reset it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.callbacks._arguments import choice, metric_name, number, warn_missing_metric, whole_number

if TYPE_CHECKING:
    from trainer_kit.events import BuildStart, FitEnd, FitStart, Metrics


class EarlyStopping(Callback):
    """Stop after `patience` records of `metric` in a row without an improvement.

    metric: the recorded name.
    patience: how many records without improvement end the run.
    mode: "min" if smaller is better, "max" if larger is.
    min_delta: an improvement must be larger than this.

    A value that is NaN is no improvement.
    """

    def __init__(self, metric: str = "val/loss", *, patience: int = 3, mode: str = "min", min_delta: float = 0.0) -> None:
        self.metric = metric_name(self, "metric", metric)
        self.patience = whole_number(self, "patience", patience)
        self.mode = choice(self, "mode", mode, ("min", "max"))
        self.min_delta = number(self, "min_delta", min_delta, at_least=0.0)
        self._start_anew()

    def _start_anew(self) -> None:
        self.best: float | None = None
        self.best_step = 0
        self.num_bad = 0
        self._seen: set[str] = set()
        self._first_step = 0

    @property
    def state_key(self) -> str:
        return f"EarlyStopping.{self.metric}"

    def describe(self) -> str:
        return f"EarlyStopping({self.metric}, {self.mode}, patience={self.patience}, min_delta={self.min_delta})"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "num_bad": self.num_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_step, self.num_bad = state["best"], state["best_step"], state["num_bad"]

    def _improves(self, value: float) -> bool:
        if value != value:
            return False
        if self.best is None:
            return True
        return self.best - value > self.min_delta if self.mode == "min" else value - self.best > self.min_delta

    def _reason(self) -> str:
        return f"{self.metric} has not improved on {self.best} of step {self.best_step} in {self.num_bad} records"

    def on_build_start(self, event: BuildStart) -> None:
        self._start_anew()  # it may have been in another trainer

    def on_fit_start(self, event: FitStart) -> None:
        self._first_step = event.trainer.step
        if event.resumed and self.num_bad >= self.patience:  # a restarted job must not train on from where it was stopped
            event.trainer.stop(self._reason())

    def on_metrics(self, event: Metrics) -> None:
        if self.metric not in self._seen:
            self._seen.update(event.values)
        value = event.values.get(self.metric)
        if value is None:
            return
        if self._improves(value):
            self.best, self.best_step, self.num_bad = value, event.step, 0
            return
        self.num_bad += 1
        if self.num_bad >= self.patience:
            event.trainer.stop(self._reason())

    def on_fit_end(self, event: FitEnd) -> None:
        if event.trainer.step > self._first_step and self.metric not in self._seen:
            warn_missing_metric(self, event.trainer, self.metric, self._seen)
