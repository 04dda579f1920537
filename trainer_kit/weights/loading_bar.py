"""The progress bar of a load: bytes, where there is a terminal or a notebook, and only for loads that take a while."""

from __future__ import annotations

import sys
import time
from typing import Any

SHOWN_AFTER = 2.0  # seconds


class LoadingBar:
    """Is called with the number of bytes each time that some were read. Of a node one rank shows its own part."""

    def __init__(self, label: str, num_bytes: int, *, is_shown: bool = True) -> None:
        self._label, self._num_bytes = label, num_bytes
        self._num_read = 0
        self._start = time.monotonic() if is_shown else float("inf")
        self._bar: Any = None

    def __enter__(self) -> LoadingBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif time.monotonic() - self._start > SHOWN_AFTER:
            self._bar = self._make()

    def _make(self) -> Any:
        from tqdm.auto import tqdm  # here, since the import takes longer than most loads

        in_notebook = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)
        is_off = not in_notebook and not sys.stderr.isatty()
        return tqdm(
            total=self._num_bytes, initial=self._num_read, unit="B", unit_scale=True, desc=self._label, leave=False, disable=is_off
        )
