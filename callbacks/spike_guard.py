"""Finds sudden rises of a recorded metric and warns, or stops the run.

Not here: non-finite gradients (the trainer's `nonfinite` setting). Know before editing: it reads records, which come every
`log_every` steps and a few steps late.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.callbacks._arguments import choice, logger, metric_name, number, warn_missing_metric, whole_number
from trainer_kit.exceptions import ConfigurationError

if TYPE_CHECKING:
    from trainer_kit.events import BuildStart, FitEnd, FitStart, Metrics

_MAD_TO_SIGMA = 1.4826  # of normally distributed values; Rousseeuw and Croux, 1993
_MIN_RECORDS = 10  # fewer say nothing about the usual spread


class SpikeGuard(Callback):
    """A value is a spike if it lies `threshold` robust deviations above the median of the last `window` records, or is NaN or inf.

    metric: the recorded name.
    window: how many finite values the median and the median absolute deviation are taken of (from 10 values on).
    threshold: in standard deviations, estimated as 1.4826 times the median absolute deviation, at least a thousandth of the median.
    patience: so many spikes in a row trigger the action.
    action: "warn" or "stop".
    """

    def __init__(
        self, metric: str = "train/loss", *, window: int = 50, threshold: float = 10.0, patience: int = 1, action: str = "warn"
    ) -> None:
        self.metric = metric_name(self, "metric", metric)
        self.window = whole_number(self, "window", window, minimum=_MIN_RECORDS)
        self.threshold = number(self, "threshold", threshold, above=0.0)
        if self.threshold == math.inf:
            raise ConfigurationError("SpikeGuard(threshold=inf) would see no finite spike; expected a finite number, such as 10.0")
        self.patience = whole_number(self, "patience", patience)
        self.action = choice(self, "action", action, ("warn", "stop"))
        self._start_anew()

    def _start_anew(self) -> None:
        self.num_spikes = 0  # in the whole run
        self._in_a_row = 0
        self._values: deque[float] = deque(maxlen=self.window)
        self._seen: set[str] = set()
        self._first_step = 0

    @property
    def state_key(self) -> str:
        return f"SpikeGuard.{self.metric}"

    def describe(self) -> str:
        return f"SpikeGuard({self.metric}, window={self.window}, threshold={self.threshold}, patience={self.patience}, {self.action})"

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self._values), "num_spikes": self.num_spikes, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values = deque(state["values"], maxlen=self.window)
        self.num_spikes, self._in_a_row = state["num_spikes"], state["in_a_row"]

    def _is_spike(self, value: float) -> bool:
        if not math.isfinite(value):
            return True
        if len(self._values) < _MIN_RECORDS:
            return False
        from statistics import median  # here, as it is not light

        middle = median(self._values)
        deviation = _MAD_TO_SIGMA * median(abs(v - middle) for v in self._values)
        return value - middle > self.threshold * max(deviation, 1e-3 * abs(middle))

    def on_build_start(self, event: BuildStart) -> None:
        self._start_anew()  # it may have been in another trainer

    def on_fit_start(self, event: FitStart) -> None:
        self._first_step = event.trainer.step

    def on_metrics(self, event: Metrics) -> None:
        if self.metric not in self._seen:
            self._seen.update(event.values)
        value = event.values.get(self.metric)
        if value is None:
            return
        spike = self._is_spike(value)
        if math.isfinite(value):
            self._values.append(value)  # spikes too: a new level becomes the usual one, and a median forgives single values
        if not spike:
            self._in_a_row = 0
            return
        self.num_spikes += 1
        self._in_a_row += 1
        if self._in_a_row >= self.patience:
            self._in_a_row = 0
            reason = f"{self.metric} rose to {value:.6g} at step {event.step}"
            if event.trainer.context.is_main:
                logger.warning("SpikeGuard: %s", reason)
            if self.action == "stop":
                event.trainer.stop(reason)

    def on_fit_end(self, event: FitEnd) -> None:
        if event.trainer.step > self._first_step and self.metric not in self._seen:
            warn_missing_metric(self, event.trainer, self.metric, self._seen)
