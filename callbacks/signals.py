"""Ends a run in order on Ctrl-C and SIGTERM.

Ctrl-C: the running step is finished, `fit` ends as usual and raises KeyboardInterrupt; the trainer stays usable. A second Ctrl-C
raises at once. SIGTERM: the step is finished, the end of the fit saves (if there is a Checkpoint), and `fit` raises `Interrupted`, a
SystemExit with code 143. A second SIGTERM, or no step boundary within the grace time, leaves at once. Not here: agreement of ranks
(`boundary.py`). Know before editing: handlers only set flags; a signal may arrive at any bytecode of the main thread, and a process
that is forked during a fit has inherited the handlers.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.callbacks._arguments import number
from trainer_kit.callbacks._grace_watch import GraceWatch
from trainer_kit.exceptions import Interrupted

if TYPE_CHECKING:
    from trainer_kit.events import CheckpointSaved, EvaluateEnd, FitEnd, FitStart, RunException, StepEnd
    from trainer_kit.trainer import Trainer


class Signals(Callback):
    """Handles SIGINT and SIGTERM during a fit, in the main thread only; elsewhere it does nothing and `describe` says so.

    enabled: False leaves the signals alone. A trainer adds a Signals by itself, so `Signals(False)` is the way to be without.
    grace: seconds from SIGTERM to the next step boundary, after which the process leaves with code 143. Launchers and schedulers kill
        after 30 seconds and wait for all ranks, one of which may hang in a collective.
    """

    def __init__(self, enabled: bool = True, *, grace: float = 12.0) -> None:
        self.enabled = enabled
        self.grace = number(self, "grace", grace, above=0.0)
        self._watch = GraceWatch(self.grace)
        self._previous: dict[int, Any] = {}  # signal -> the handler from before
        self._pid = 0
        self._num_interrupts = 0
        self._term = False
        self._acted = False

    def describe(self) -> str:
        if not self.enabled:
            return "Signals (off)"
        if threading.current_thread() is not threading.main_thread():
            return "Signals (off: not in the main thread, where alone Python handles signals)"
        return f"Signals(grace={self.grace:g} s)"

    def on_fit_start(self, event: FitStart) -> None:
        self._num_interrupts, self._term, self._acted, self._pid = 0, False, False, os.getpid()
        if not self.enabled or threading.current_thread() is not threading.main_thread():
            return
        for signum, handler in ((signal.SIGINT, self._on_interrupt), (signal.SIGTERM, self._on_terminate)):
            previous = signal.getsignal(signum)
            # SIG_IGN: a background job that was told to ignore it. None: somebody's C handler, which could not be put back.
            if previous is not None and not (signum == signal.SIGINT and previous == signal.SIG_IGN):
                signal.signal(signum, handler)
                self._previous[signum] = previous
        if signal.SIGTERM in self._previous:
            self._watch.start()

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # in a data worker, which the trainer's process ends
            return
        self._num_interrupts += 1
        if self._num_interrupts > 1:
            raise KeyboardInterrupt
        _tell("Ctrl-C: finishing the step; press again to stop at once\n")

    def _on_terminate(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child ends as it would have without us
            signal.signal(signum, self._previous[signum])
            signal.raise_signal(signum)
            return
        self._term = True
        _tell("SIGTERM: finishing the step, then leaving\n")

    @property
    def _pending(self) -> bool:
        return (self._term or self._num_interrupts > 0) and not self._acted

    def _error(self) -> BaseException:
        return Interrupted("the run was ended by SIGTERM, in order") if self._term else KeyboardInterrupt()

    def _act(self, trainer: Trainer) -> None:
        if self._pending:
            self._acted = True
            self._watch.boundary_reached()
            trainer.stop("SIGTERM" if self._term else "interrupted", raising=self._error())

    def on_step_end(self, event: StepEnd) -> None:
        if self._term or self._num_interrupts:
            self._act(event.trainer)

    def on_evaluate_end(self, event: EvaluateEnd) -> None:
        self._act(event.trainer)

    def on_checkpoint_saved(self, event: CheckpointSaved) -> None:
        self._act(event.trainer)

    def on_fit_end(self, event: FitEnd) -> None:
        self._act(event.trainer)

    def on_exception(self, event: RunException) -> None:
        self._acted = True  # the run ends with the first error, which an interrupt must not hide

    def close(self) -> None:
        self._watch.stop()
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()
        if self._pending:  # it came when no boundary was left, and must not be swallowed
            self._acted = True
            raise self._error()


def _tell(text: str) -> None:
    os.write(2, text.encode())  # buffered streams are not re-entrant, and the handler may have interrupted one
