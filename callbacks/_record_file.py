"""A text file of records that goes on after a resume: one local file, one record per line, appended.

Not here: the format of a line, which `JSONLines` and `CSV` give. Know before editing: the file must never be ahead of the checkpoint,
so records of later steps are dropped when a fit starts, and so is a last line without an end, which a killed process left.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping
from typing import IO, Any

from trainer_kit.callbacks._arguments import logger
from trainer_kit.exceptions import ConfigurationError


class RecordFile:
    """Opened by `open`, which leaves the lines that `keep` accepts."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: IO[str] | None = None

    @property
    def is_open(self) -> bool:
        """Whether lines can be written."""
        return self._file is not None

    def open(self, step: int, step_of: Callable[[str, int], int | None]) -> list[str]:
        """Drop what is later than `step`, open for appending, and give the lines that stay.

        step_of: the finished steps of a line (text, index), or None for a line that always stays; raises ValueError for a foreign line.
        """
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        lines = self.lines()
        kept = []
        for index, line in enumerate(lines):
            try:
                at = step_of(line, index)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigurationError(
                    f"{self.path}, line {index + 1} is not a record of this logger ({error}); "
                    "give the logger another path, or move the file away"
                ) from error
            if at is None or (at <= step and step > 0):
                kept.append(line)
        if lines and step == 0:
            self._move_aside()
            kept = []
        self.replace(kept)
        return kept

    def _move_aside(self) -> None:
        """Give the records and settings of an earlier run names of their own, which nothing has yet."""
        for count in itertools.count(1):
            moves = [(path, f"{path}.previous-{count}") for path in (self._settings_path, self.path) if os.path.exists(path)]
            if not any(os.path.exists(new) for _, new in moves):
                break
        for old, new in moves:
            os.replace(old, new)
        logger.info("%s held records of an earlier run; they are in %s now", self.path, moves[-1][1])

    @property
    def _settings_path(self) -> str:
        return f"{os.path.splitext(self.path)[0]}.settings.json"

    def lines(self) -> list[str]:
        """The complete lines of the file; one without an end was cut by a kill and is left out."""
        if not os.path.exists(self.path):
            return []
        with open(self.path, encoding="utf-8", errors="replace", newline="") as file:
            *lines, _ = file.read().replace("\r\n", "\n").split("\n")
        return lines

    def replace(self, lines: list[str]) -> None:
        """Make the file hold these lines, in one act, and go on behind them."""
        self.close()
        temporary = f"{self.path}.tmp"
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        self._file = open(self.path, "a", encoding="utf-8", newline="")  # noqa: SIM115  closed in close()

    def append(self, line: str) -> None:
        """Write one line and hand it to the system, so that a kill of this process loses none."""
        assert self._file is not None
        self._file.write(f"{line}\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; no-op if it is not open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Put the settings of the run beside the records."""
        with open(self._settings_path, "w", encoding="utf-8") as file:
            json.dump(settings, file, indent=2, default=str)
            file.write("\n")
