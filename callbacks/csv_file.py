"""Writes the records as a table, one row per record and one column per name.

Not here: the file and its continuation after a resume (`_record_file`). Know before editing: a name that appears later, such as the
first `val/loss`, adds a column, for which the file is written anew; that is rare, so the table stays easy to read.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from trainer_kit.callback import Callback
from trainer_kit.callbacks._arguments import local_path
from trainer_kit.callbacks._record_file import RecordFile

if TYPE_CHECKING:
    from trainer_kit.events import FitStart, Metrics


def _line(cells: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def _step_of(line: str, index: int) -> int | None:
    if index == 0:
        if not line.startswith("step"):
            raise ValueError(f"the header starts with {line[:40]!r}, expected 'step'")
        return None
    return int(_cells(line)[0])


class CSV(Callback):
    """Columns `step`, then the names in order of appearance; a value that a record lacks is empty, NaN is `nan`, infinity `inf`.

    path: a local file. The settings of the run go to `<path without its ending>.settings.json`, once per run.
    name: the key of this callback; give another one to a second CSV.

    A resumed run drops the rows behind its step and goes on; a run that starts at step 0 moves old files aside,
    to `<path>.previous-1`, `-2` and so on.
    """

    is_logger: ClassVar[bool] = True

    def __init__(self, path: str | os.PathLike[str], *, name: str = "CSV") -> None:
        self._file = RecordFile(local_path(self, "path", path))
        self.name = name
        self._columns: list[str] = []

    @property
    def state_key(self) -> str:
        return self.name

    def describe(self) -> str:
        return f"{self.name}({self._file.path})"

    def on_fit_start(self, event: FitStart) -> None:
        if event.trainer.context.is_main:
            kept = self._file.open(event.trainer.step, _step_of)
            self._columns = _cells(kept[0]) if kept else []
            if not kept:
                self._file.write_settings(event.settings)

    def on_metrics(self, event: Metrics) -> None:
        if not self._file.is_open:
            return
        new = [name for name in event.values if name not in self._columns]
        if new or not self._columns:
            self._widen(new)
        values: dict[str, Any] = {"step": event.step} | event.values
        self._file.append(_line(values.get(column, "") for column in self._columns))

    def _widen(self, new: list[str]) -> None:
        rows = self._file.lines()[1:]
        padding = "," * len(new)
        self._columns = [*(self._columns or ["step"]), *new]
        self._file.replace([_line(self._columns), *(row + padding for row in rows)])

    def close(self) -> None:
        self._file.close()
