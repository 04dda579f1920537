"""Writes traces of some steps, with torch.profiler.

Not here: timing of a whole run (`Throughput`). Know before editing: a profiler that is left running slows everything after it, so
`close` stops it on any way out.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import torch

from trainer_kit.callback import Callback
from trainer_kit.callbacks._arguments import local_path, whole_number

if TYPE_CHECKING:
    from trainer_kit.events import FitStart, StepEnd


class Profiler(Callback):
    """Chrome traces `trace-rank0-step00000010.json.gz` of rank 0, for chrome://tracing or Perfetto.

    folder: a local path.
    wait, warmup, active: skip so many steps, then run the profiler unrecorded, then record; one trace per round.
    repeat: rounds; 0: until the end.
    """

    def __init__(self, folder: str | os.PathLike[str], *, wait: int = 5, warmup: int = 2, active: int = 3, repeat: int = 1) -> None:
        self.folder = local_path(self, "folder", folder)
        self.wait = whole_number(self, "wait", wait, minimum=0)
        self.warmup = whole_number(self, "warmup", warmup)  # without it the first recorded step holds the start of the profiler
        self.active = whole_number(self, "active", active)
        self.repeat = whole_number(self, "repeat", repeat, minimum=0)
        self._profile: torch.profiler.profile | None = None
        self._step = 0

    def describe(self) -> str:
        return f"Profiler({self.folder}, wait={self.wait}, warmup={self.warmup}, active={self.active}, repeat={self.repeat})"

    def _write(self, profile: torch.profiler.profile) -> None:
        os.makedirs(self.folder, exist_ok=True)
        profile.export_chrome_trace(os.path.join(self.folder, f"trace-rank0-step{self._step:08d}.json.gz"))

    def on_fit_start(self, event: FitStart) -> None:
        if not event.trainer.context.is_main:
            return
        schedule = torch.profiler.schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=self.repeat)
        self._step = event.trainer.step
        self._profile = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write)
        self._profile.start()

    def on_step_end(self, event: StepEnd) -> None:
        if self._profile is not None:
            self._step = event.trainer.step
            with warnings.catch_warnings():  # that only the current round is kept is what a trace per round needs
                warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
                self._profile.step()

    def close(self) -> None:
        if self._profile is not None:
            profile, self._profile = self._profile, None
            profile.stop()
