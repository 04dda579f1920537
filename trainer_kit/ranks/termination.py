"""SIGTERM for a process whose ranks do the work: it is passed on to them, and they end in order."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class Termination:
    """While it is entered, SIGTERM makes `reader` readable and nothing else. A handler of the user's own is left alone."""

    def __init__(self, pass_on: Callable[[], None]) -> None:
        self._pass_on = pass_on
        self._is_ours = False
        self.asked = False

    def __enter__(self) -> Termination:
        self.reader, self._writer = os.pipe()
        in_main_thread = threading.current_thread() is threading.main_thread()  # the only one that may set handlers
        self._is_ours = in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._is_ours:
            signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        os.write(self._writer, b"t")

    def read(self) -> bool:
        """Pass on what came; more may come."""
        os.read(self.reader, 1)
        self._pass_on()
        return True

    def __exit__(self, *exception: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(self.reader)
        os.close(self._writer)
