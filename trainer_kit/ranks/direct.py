"""Ranks forked from this very process, for functions that no other process can import: those of a notebook's cells.

A fork copies only the thread that forks. So a thread made for it forks: it has no OpenMP team that the copy would wait for, no event loop,
and it is the main thread of the rank. Before editing: that thread must live until the ranks are gone; the system ends them with it.
"""

from __future__ import annotations

import importlib
import logging
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Pipe

from trainer_kit.ranks.child import become_rank
from trainer_kit.ranks.processes import Rank

_PAUSE = 0.05  # seconds between two looks at which ranks have ended
Entry = Callable[[Connection], None]


class DirectRanks:
    """Starts ranks by forking this process. Has the methods of `Template`."""

    def __init__(self) -> None:
        self._requests: queue.Queue[tuple[Entry, Connection, int | None, int]] = queue.Queue()
        self._pids: queue.Queue[int] = queue.Queue()
        self._status: dict[int, int] = {}  # pid of a living rank -> where its exit code is written
        self._lock = threading.Lock()  # of that; a pid that was reaped may be somebody else's
        self._ranks: list[Rank] = []
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="trainer_kit-ranks", daemon=True)
        self._thread.start()

    def fork(self, entry: Entry, output: int | None = None) -> Rank:
        """A new rank that calls `entry` with its connection. `output`: file descriptor for what it prints."""
        mine, its = Pipe()
        status, its_status = os.pipe()
        self._requests.put((entry, its, output, its_status))
        rank = Rank(self._pids.get(), mine, status)
        its.close()
        self._ranks.append(rank)
        return rank

    def signal(self, ranks: Iterable[Rank], number: int) -> None:
        """Send a signal to those that still live."""
        with self._lock:
            for rank in ranks:
                if rank.pid in self._status:
                    os.kill(rank.pid, number)

    def kill(self, ranks: Iterable[Rank]) -> None:
        """Kill ranks and what they started; they are reaped in a moment."""
        with self._lock:
            for rank in ranks:
                if rank.pid in self._status:
                    os.killpg(rank.pid, signal.SIGKILL)

    def close(self) -> None:
        """End all ranks, and wait for them."""
        self.kill(self._ranks)
        self._is_closing.set()
        self._thread.join()

    def _serve(self) -> None:
        while self._status or not self._is_closing.is_set():
            try:
                entry, connection, output, status = self._requests.get(timeout=_PAUSE)
            except queue.Empty:
                self._reap()
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python's, for a fork of a process with threads
                pid = os.fork()
            if pid == 0:
                self._be_rank(entry, connection, output)
            with self._lock:
                self._status[pid] = status
            self._pids.put(pid)

    def _reap(self) -> None:
        with self._lock:
            for pid in list(self._status):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    fd = self._status.pop(pid)
                    os.write(fd, str(os.waitstatus_to_exitcode(status)).encode())
                    os.close(fd)

    def _be_rank(self, entry: Entry, connection: Connection, output: int | None) -> None:
        """In the forked process; does not return. The parent's exit handlers are not ours to run, its threads are not here."""
        code = 1
        try:
            streams = sys.stdout, sys.stderr
            become_rank(output)
            for rank in self._ranks:
                rank.close()
            _leave_notebook(streams)
            entry(connection)
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()  # a checkpoint being written
            code = 0
        except BaseException:  # nothing is above this frame that could show it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _leave_notebook(streams: tuple[object, object]) -> None:
    """What belongs to the kernel is not used from a rank: its streams in log handlers, widgets, bars made of them."""
    for logger in [logging.getLogger(), *(logging.getLogger(name) for name in list(logging.root.manager.loggerDict))]:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                handler.stream = sys.stderr
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
        if shell is not None:
            if getattr(shell, "kernel", None) is not None:
                shell.kernel.clear_instance()
            shell.clear_instance()
    sys.modules.pop("tqdm.auto", None)  # it chose a bar of widgets when it was imported
    sys.modules["tqdm.autonotebook"] = importlib.import_module("tqdm.std")
