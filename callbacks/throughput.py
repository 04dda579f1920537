"""Measures speed over the steps between two records: samples, tokens, time per step, and utilisation of the device.

Not here: traces (`Profiler`). Know before editing: nothing waits for the device; over a window the host cannot run ahead by more than
the queue holds. The time of evaluations and saves is taken out: it ends with their end event, or with the next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.callbacks._arguments import number
from trainer_kit.callbacks._peak_flops import PEAK_BF16_FLOPS, device_name
from trainer_kit.callbacks._records import is_recorded
from trainer_kit.data import batch_size
from trainer_kit.exceptions import ConfigurationError

if TYPE_CHECKING:
    from trainer_kit.events import CheckpointSaved, CheckpointStart, EvaluateEnd, EvaluateStart, FitStart, ForwardBackwardEnd, StepStart


class Throughput(Callback):
    """Adds to each training record `speed/samples_per_second`, `speed/step_seconds`, and what the arguments allow.

    tokens: microbatch -> its number of tokens, a host number; gives `speed/tokens_per_second`.
    flops_per_token, flops_per_sample: forward and backward together; one of them gives `speed/mfu`, the share of the peak that is used.
    peak_flops: bf16 FLOPs per second of one device; looked up by the device's name if not given. An unknown device has no `speed/mfu`.

    Numbers are for all data ranks together: the mean of the ranks times their number. The first step of a fit is not counted.
    """

    def __init__(
        self,
        *,
        tokens: Callable[[Any], int] | None = None,
        flops_per_token: float | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if tokens is not None and not callable(tokens):
            raise ConfigurationError(f"Throughput(tokens={tokens!r}): expected a function microbatch -> number of tokens")
        if flops_per_token is not None and flops_per_sample is not None:
            raise ConfigurationError("Throughput takes one of flops_per_token= and flops_per_sample=, found both")
        if flops_per_token is not None and tokens is None:
            raise ConfigurationError("Throughput(flops_per_token=...) needs tokens=, a function microbatch -> number of tokens")
        self.flops = flops_per_token if flops_per_token is not None else flops_per_sample
        if self.flops is None and peak_flops is not None:
            raise ConfigurationError("Throughput(peak_flops=...) has no effect without flops_per_token= or flops_per_sample=")
        if self.flops is not None:
            number(self, "flops_per_token" if flops_per_token is not None else "flops_per_sample", self.flops, above=0)
        self.peak_flops = None if peak_flops is None else number(self, "peak_flops", peak_flops, above=0)
        self.tokens = tokens
        self._flops_by_token = flops_per_token is not None
        self._peak: float | None = self.peak_flops
        self._device = ""
        self._begin_window(0.0)
        self._is_first = True
        self._paused_at: float | None = None

    def describe(self) -> str:
        if self.flops is None:
            return "Throughput"
        if self._peak is not None:
            return f"Throughput(peak {self._peak:.4g} FLOP/s per device)"
        if not self._device:
            return "Throughput(peak looked up by the name of the device)"
        return f"Throughput(no speed/mfu: the bf16 peak of {self._device!r} is unknown; give peak_flops=)"

    def _begin_window(self, now: float) -> None:
        self._started, self._paused = now, 0.0
        self._num_steps = self._num_samples = self._num_tokens = 0

    def on_fit_start(self, event: FitStart) -> None:
        self._device = device_name(event.trainer.context.device)
        self._peak = self.peak_flops if self.peak_flops is not None else PEAK_BF16_FLOPS.get(self._device)
        self._is_first, self._paused_at = True, None

    def on_step_start(self, event: StepStart) -> None:
        self._resume()
        self._num_steps += 1
        for microbatch in event.microbatches:
            self._num_samples += batch_size(microbatch) or 0
            if self.tokens is not None:
                self._num_tokens += self.tokens(microbatch)

    def on_forward_backward_end(self, event: ForwardBackwardEnd) -> None:
        # The same point of every step, before the record of the step is closed.
        if self._is_first:
            self._is_first = False
            self._begin_window(time.perf_counter())
        elif is_recorded(event.trainer, event.step):
            now = time.perf_counter()
            self._log(event.trainer, now - self._started - self._paused)
            self._begin_window(now)

    def _log(self, trainer: Any, seconds: float) -> None:
        seconds, ranks = max(seconds, 1e-9), trainer.context.num_data_ranks
        samples, tokens = self._num_samples * ranks / seconds, self._num_tokens * ranks / seconds
        trainer.log("speed/step_seconds", seconds / self._num_steps)
        if self._num_samples:
            trainer.log("speed/samples_per_second", samples)
        if self.tokens is not None:
            trainer.log("speed/tokens_per_second", tokens)
        if self.flops is not None and self._peak is not None:
            rate = tokens if self._flops_by_token else samples
            trainer.log("speed/mfu", rate * self.flops / (self._peak * trainer.context.world_size))

    def _pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = time.perf_counter()

    def _resume(self) -> None:
        if self._paused_at is not None:
            self._paused += time.perf_counter() - self._paused_at
            self._paused_at = None

    def on_evaluate_start(self, event: EvaluateStart) -> None:
        self._pause()

    def on_evaluate_end(self, event: EvaluateEnd) -> None:
        self._resume()

    def on_checkpoint_start(self, event: CheckpointStart) -> None:
        self._pause()

    def on_checkpoint_saved(self, event: CheckpointSaved) -> None:
        self._resume()  # a save in the background is over for us with the next step, which comes first
