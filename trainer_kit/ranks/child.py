"""What every rank process is, however it was forked: a process group of its own, killed with its parent, with its own output."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_is_rank = False


def inside_rank() -> bool:
    """Whether this process was started as a rank by this package."""
    return _is_rank


def become_rank(output: int | None) -> None:
    """Make this freshly forked process a rank. output: the file descriptor it prints to, taken over; None leaves the parent's."""
    global _is_rank
    _is_rank = True
    os.setpgid(0, 0)  # data workers that the rank starts can be killed together with it, and Ctrl-C reaches it through its parent only
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # when the thread that forked it ends
    signal.set_wakeup_fd(-1)  # an event loop's; it would wake the parent
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    sys.stdout, sys.stderr = _stream(1), _stream(2)


def _stream(fd: int) -> io.TextIOWrapper:
    """As Python makes it, but by lines, so that what a rank printed is out when it is killed, and lines of ranks do not mix."""
    return io.TextIOWrapper(open(fd, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)
