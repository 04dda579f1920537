"""The parent's side of rank processes: `Template` starts the process that ranks are forked from, `Rank` is one of them.

A rank is reached through its connection; that it died is seen at `status`, because its children may hold the connection open.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from trainer_kit.exceptions import StateError
from trainer_kit.ranks.template import MAX_REQUEST

_START = "import sys; sys.path[:] = {path!r}; from trainer_kit.ranks.template import main; main({fd})"


def import_path() -> list[str]:
    """The places of imports of this process; the empty one, which means the current folder, by its name."""
    return [path or os.getcwd() for path in sys.path]


@dataclass
class Rank:
    """A living or dead rank process. connection: bytes both ways. status: readable when it has ended."""

    pid: int
    connection: Connection
    status: int
    _exit_code: int | None = None

    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return not wait([self.status], 0)

    def send(self, data: bytes) -> None:
        """Send one message. That the rank has died is not told here; whoever waits for its answer is."""
        try:
            self.connection.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # seen at `status`

    def exit_code(self) -> int:
        """Of a rank whose status is readable; negative: the signal that killed it."""
        if self._exit_code is None:
            self._exit_code = int(os.read(self.status, 16) or -9)  # nothing: the template was killed, and its ranks with it
        return self._exit_code

    def close(self) -> None:
        """Close this side; the process is not touched."""
        self.connection.close()
        os.close(self.status)


class Template:
    """Starts the template process at construction; `environment` is that of every rank until it changes its own."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._control, other = socket.socketpair()
        command = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), "-c"]
        command.append(_START.format(path=import_path(), fd=other.fileno()))
        with other:
            self._process = subprocess.Popen(
                command, pass_fds=[other.fileno()], env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True
            )

    def fork(self, entry: str, output: int | None = None) -> Rank:
        """A new rank that calls `entry`, a "module:function", with its connection. `output`: file descriptor for what it prints."""
        mine, its = Pipe()
        status, its_status = os.pipe()
        fds = [its.fileno(), its_status, *([] if output is None else [output])]
        try:
            pid = self._ask({"fork": entry}, fds)["pid"]
        finally:
            its.close()
            os.close(its_status)
        return Rank(pid, mine, status)

    def signal(self, ranks: Iterable[Rank], number: int) -> None:
        """Send a signal to those that still live."""
        self._ask({"signal": int(number), "pids": [rank.pid for rank in ranks]})

    def kill(self, ranks: Iterable[Rank]) -> None:
        """Kill ranks and what they started, and wait until they are gone."""
        if self.is_alive():
            self._ask({"kill": [rank.pid for rank in ranks]})

    def is_alive(self) -> bool:
        """Whether it can start ranks; if not, its ranks are gone too."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the template and all of its ranks."""
        if self.is_alive():
            self._ask({"end": True})
        self._control.close()
        self._process.wait()

    def _ask(self, request: dict[str, object], fds: Iterable[int] = ()) -> dict[str, Any]:
        with self._lock:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], list(fds))
                answer = self._control.recv(MAX_REQUEST)
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
            except BaseException:  # Ctrl-C: the answer would be taken for that of the next request
                self._process.kill()
                self._process.wait()
                raise
        if not answer:
            raise StateError(
                f"the process that ranks are started from ended with code {self._process.wait()}; if it had an error, that is printed "
                f"above. Usual cause: torch or trainer_kit can't be imported there, or the process was killed"
            )
        return json.loads(answer)
