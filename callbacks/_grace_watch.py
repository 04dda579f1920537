"""Ends the process when SIGTERM came twice, or once and no step boundary follows in time.

A thread of its own, because Python runs signal handlers only between the bytecodes of the main thread: blocked in a collective it
runs none. The C-level handler still writes the number of each signal to the wakeup descriptor, which this thread reads.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable

EXIT_CODE = 143  # 128 + SIGTERM

_watches: weakref.WeakSet[GraceWatch] = weakref.WeakSet()


def _leave(code: int) -> None:
    os._exit(code)


class GraceWatch:
    """Watches between `start` and `stop`, both in the main thread. `leave` ends the process without any cleanup that could block."""

    def __init__(self, grace: float, leave: Callable[[int], None] = _leave) -> None:
        self._grace, self._leave = grace, leave
        self._boundary_reached = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Take over the wakeup descriptor of the process; signals still reach whoever had it."""
        self._boundary_reached = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="trainer_kit-signals", daemon=True)
        self._thread.start()
        _watches.add(self)

    def boundary_reached(self) -> None:
        """The run is ending in order: time no longer matters, a second signal still does."""
        self._boundary_reached = True

    def stop(self) -> None:
        """Give the descriptor back and end the thread; no-op if not started."""
        if self._thread is None:
            return
        _watches.discard(self)
        signal.set_wakeup_fd(self._previous, warn_on_full_buffer=False)
        os.write(self._write, b"\0")
        self._thread.join()
        self._thread = None
        os.close(self._read)
        os.close(self._write)

    def _watch(self) -> None:
        num_terms, deadline = 0, None
        while True:
            timeout = None if deadline is None or self._boundary_reached else max(0.0, deadline - time.monotonic())
            if not select.select([self._read], [], [], timeout)[0]:
                if not self._boundary_reached:
                    self._leave(EXIT_CODE)
                deadline = None
                continue
            for number in os.read(self._read, 64):
                if number == 0:
                    return
                self._pass_on(number)
                if number == signal.SIGTERM:
                    num_terms += 1
                    deadline = time.monotonic() + self._grace
                    if num_terms > 1:
                        self._leave(EXIT_CODE)

    def _pass_on(self, number: int) -> None:
        if self._previous != -1:
            with contextlib.suppress(OSError):  # its owner may have closed it meanwhile
                os.write(self._previous, bytes([number]))


def _forget_in_child() -> None:
    """A forked child shares the pipe: its own signals must not count as the parent's."""
    if _watches:
        signal.set_wakeup_fd(-1)
        _watches.clear()


os.register_at_fork(after_in_child=_forget_in_child)
