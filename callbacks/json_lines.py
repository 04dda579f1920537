"""Writes each record as one line of JSON.

Not here: the file and its continuation after a resume (`_record_file`). Know before editing: lines are strict JSON, which knows no
NaN, so such values are the strings "NaN", "Infinity" and "-Infinity"; `float()` reads them.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, ClassVar

from trainer_kit.callback import Callback
from trainer_kit.callbacks._arguments import local_path
from trainer_kit.callbacks._record_file import RecordFile

if TYPE_CHECKING:
    from trainer_kit.events import FitStart, Metrics


def _plain(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _step_of(line: str, _index: int) -> int:
    return int(json.loads(line)["step"])


class JSONLines(Callback):
    """One line per record: `{"step": 10, "train/loss": 0.5, ...}`. A training and an evaluation record of one step are two lines.

    path: a local file. The settings of the run go to `<path without its ending>.settings.json`, once per run.
    name: the key of this callback; give another one to a second JSONLines.

    A resumed run drops the lines behind its step and goes on; a run that starts at step 0 moves old files aside,
    to `<path>.previous-1`, `-2` and so on.
    """

    is_logger: ClassVar[bool] = True

    def __init__(self, path: str | os.PathLike[str], *, name: str = "JSONLines") -> None:
        self._file = RecordFile(local_path(self, "path", path))
        self.name = name

    @property
    def state_key(self) -> str:
        return self.name

    def describe(self) -> str:
        return f"{self.name}({self._file.path})"

    def on_fit_start(self, event: FitStart) -> None:
        if event.trainer.context.is_main:
            kept = self._file.open(event.trainer.step, _step_of)
            if not kept:
                self._file.write_settings(event.settings)

    def on_metrics(self, event: Metrics) -> None:
        if self._file.is_open:
            self._file.append(json.dumps({"step": event.step} | {k: _plain(v) for k, v in event.values.items()}, allow_nan=False))

    def close(self) -> None:
        self._file.close()
