"""The template: a process that has imported torch and trainer_kit once and from which ranks are forked in a few milliseconds.

Runs in a process of its own (`trainer_kit.ranks.processes` starts it) and only imports, forks, signals and reaps: it must never start a
thread or touch a device, because a fork copies neither in a working state. It ends when the other side of its socket is closed or its
parent is gone, and then takes all ranks with it.

Requests are one JSON object per message, each answered by one: {"fork": "module:function"} with the file descriptors of the rank
(connection, status, optionally output) -> {"pid": ...}; {"signal": number, "pids": [...]}, {"kill": [pids]} and {"end": true} -> {}.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
from multiprocessing.connection import Connection, wait
from typing import Any

from trainer_kit.ranks.child import become_rank

MAX_REQUEST = 65536


def main(control_fd: int) -> None:
    """Serve until the parent says so or is gone. In a forked rank this returns when the rank's function has returned."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _preload()
    forked = _Template(socket.socket(fileno=control_fd)).serve()
    if forked is not None:
        entry, connection = forked
        module, function = entry.split(":")
        getattr(importlib.import_module(module), function)(connection)


def _preload() -> None:
    """Import what a rank needs for its first step: an optimizer imports torch's compiler, which takes long."""
    import torch

    torch.set_num_threads(1)
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    import trainer_kit  # noqa: F401

    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    gc.collect()
    gc.freeze()  # a collection in a rank then leaves these pages shared


class _Template:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._parent = os.getppid()
        self._status: dict[int, int] = {}  # pid of a living rank -> where its exit code is written
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def serve(self) -> tuple[str, Connection] | None:
        """Answer requests. Returns (entry, connection) in a forked rank, None in the template when it is over."""
        while os.getppid() == self._parent:  # a child of the parent may hold the socket open
            ready = wait([self._control, self._woken], 1.0)
            if self._woken in ready:
                os.read(self._woken, 4096)
            self._reap()
            if self._control not in ready:
                continue
            data, fds, _, _ = socket.recv_fds(self._control, MAX_REQUEST, 8)
            request: dict[str, Any] = json.loads(data) if data else {"end": True}
            if "fork" in request:
                pid = os.fork()
                if pid == 0:
                    return request["fork"], self._leave_for_rank(fds)
                self._status[pid] = fds[1]
                for fd in (fds[0], *fds[2:]):
                    os.close(fd)
                self._answer({"pid": pid})
            else:
                self._obey(request)
                self._answer({})
            if "end" in request:
                break
        self._kill(self._status)
        return None

    def _obey(self, request: dict[str, Any]) -> None:
        """A pid that was reaped already may be somebody else's by now."""
        for pid in self._status.keys() & request.get("pids", []):
            os.kill(pid, request["signal"])
        self._kill(self._status.keys() & request.get("kill", []))

    def _answer(self, answer: dict[str, int]) -> None:
        try:
            self._control.sendall(json.dumps(answer).encode())
        except BrokenPipeError:
            pass  # the parent is gone; the loop sees that next

    def _reap(self) -> None:
        for pid in list(self._status):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._report(pid, status)

    def _report(self, pid: int, status: int) -> None:
        fd = self._status.pop(pid)
        try:
            os.write(fd, str(os.waitstatus_to_exitcode(status)).encode())
        except BrokenPipeError:
            pass  # nobody wants to know any more
        os.close(fd)

    def _kill(self, pids: Any) -> None:
        """Kill ranks with everything they started, and wait for them."""
        pids = list(pids)
        for pid in pids:
            os.killpg(pid, signal.SIGKILL)
        for pid in pids:
            self._report(pid, os.waitpid(pid, 0)[1])

    def _leave_for_rank(self, fds: list[int]) -> Connection:
        """In the forked rank: what belongs to the template goes, and this becomes the process of a rank."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for fd in (self._woken, self._wake, fds[1], *self._status.values()):
            os.close(fd)
        become_rank(fds[2] if len(fds) > 2 else None)
        return Connection(fds[0])
