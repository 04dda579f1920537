"""Ways to die for a forked child: at the k-th file operation that changes a folder, or whenever the parent says so.

Operations are seen from outside, through an audit hook, `os.fsync` and the files that `trainer_kit.storage` opens; which thread makes
them does not matter. A write dies in its middle, half of the bytes being there. Nothing can be undone in this process: use it in a
child that will not be used for anything else.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import trainer_kit.storage

_CHANGES = {"os.rename": (0, 1), "os.remove": (0,), "os.rmdir": (0,), "os.mkdir": (0,)}  # audit event -> its arguments that are paths


class DeathByOperation:
    """Counts the operations on `folder` from now on; `at`: the process dies at this one (from 1), before it takes effect. 0: never."""

    def __init__(self, folder: Path, at: int) -> None:
        self._folder = os.path.abspath(folder)
        self._at = at
        self.count = 0

    def install(self) -> None:
        """Watch this process."""
        sys.addaudithook(self._on_event)
        plain_fsync = os.fsync

        def fsync(handle: Any) -> None:
            number = handle if isinstance(handle, int) else handle.fileno()
            if self._is_inside(os.readlink(f"/proc/self/fd/{number}")):
                self._operation()
            plain_fsync(handle)

        os.fsync = fsync
        trainer_kit.storage.open = self._open  # type: ignore[attr-defined]  # found before the built-in one

    def _is_inside(self, path: Any) -> bool:
        return isinstance(path, str) and os.path.abspath(path).startswith(self._folder)

    def _operation(self) -> None:
        """Count one, and die here if it is the one."""
        self.count += 1
        if self.count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            paths = arguments[:1] if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else ()
        else:
            paths = tuple(arguments[i] for i in _CHANGES.get(event, ()))
        if any(self._is_inside(path) for path in paths):
            self._operation()

    def _open(self, path: str, mode: str = "r", buffering: int = -1) -> Any:
        if "w" in mode and "b" in mode and buffering == 0 and self._is_inside(path):
            return _TornFile(path, self)
        return open(path, mode, buffering)

    def before_write(self, file: io.FileIO, data: memoryview) -> None:
        """Count a write; if it is the one, write half of it first."""
        if self.count + 1 == self._at:
            io.FileIO.write(file, data[: len(data) // 2])
        self._operation()


class _TornFile(io.FileIO):
    def __init__(self, path: str, death: DeathByOperation) -> None:
        super().__init__(path, "wb")
        self._death = death

    def write(self, data: Any) -> int:
        self._death.before_write(self, memoryview(data).cast("B"))
        return super().write(data)
