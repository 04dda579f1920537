"""The boundary between two steps, where all ranks take the decisions of a run together: to stop, to save, to evaluate.

What one rank wants during a step (a stop, a signal, the end of `max_time`, a record of values of no step, a finished background save)
counts for all of them from the next boundary on, and what callbacks asked for must be the same on every rank. One small host collective
per boundary, and another one where somebody wants to stop; none in one process.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from trainer_kit.exceptions import Interrupted, StateError
from trainer_kit.mesh import DistributedContext
from trainer_kit.records import Records
from trainer_kit.run_state import RunState

if TYPE_CHECKING:
    from trainer_kit.checkpoint import CheckpointSaver

Pending = Sequence[tuple[str, dict[str, Any]]]
TERMINATED, KEYBOARD = "SIGTERM", "Ctrl-C"


class Boundary(Protocol):
    """Where `Requests` meets the other ranks."""

    def meet(self, pending: Pending) -> None:
        """Settle the wishes of the steps so far; `pending` is what was asked for and not done yet."""


def boundary_of(run: RunState, saver: CheckpointSaver, context: DistributedContext, records: Records) -> Boundary:
    """The boundary of this run."""
    return LocalBoundary(run, saver) if context.world_size == 1 else MeshBoundary(run, saver, context, records)


class LocalBoundary:
    """One process: every wish counts at once."""

    def __init__(self, run: RunState, saver: CheckpointSaver) -> None:
        self._run, self._saver = run, saver

    def meet(self, pending: Pending) -> None:
        """Count the wish to stop, and bring out the outcome of a background save that has ended."""
        run = self._run
        _note_deadline(run)
        run.stop_agreed, run.raising_agreed = run.stop_reason is not None, run.stop_raising is not None
        self._saver.poll()


class MeshBoundary:
    """Several ranks: a wish of one is a wish of all."""

    def __init__(self, run: RunState, saver: CheckpointSaver, context: DistributedContext, records: Records) -> None:
        self._run, self._saver, self._context, self._records = run, saver, context, records

    def meet(self, pending: Pending) -> None:
        """Every rank calls this at the same boundary. Raises StateError if not all of them ask for the same."""
        self._context.failures.check()
        run, world = self._run, self._context.world_size
        _note_deadline(run)
        asked = _digest(pending)
        stops, raisings, records, ended, sum_asked = self._context.host.sum(
            [
                run.stop_reason is not None,
                run.stop_raising is not None,
                self._records.waits_for_ranks,
                self._saver.ended,
                asked,
            ]
        )
        if sum_asked != world * asked:  # a rank that differs is, up to a chance of 1 in 2^32, not the mean of all
            self._refuse_requests(pending)
        if (stops and not run.stop_agreed) or (raisings and not run.raising_agreed):
            self._agree_to_stop()
        if records:
            self._records.close_step(run.step)
            if run.phase == "idle":
                self._records.flush()
        if ended == world:
            self._saver.settle()

    def _agree_to_stop(self) -> None:
        """The first rank that gave a reason, and the first one that wants `fit` to raise, speak for those that did not."""
        run = self._run
        found = self._context.host.exchange((run.stop_reason, _raising(run.stop_raising)))
        reasons, raisings = ([part[index] for part in found if part[index] is not None] for index in (0, 1))
        if reasons:
            run.stop_reason, run.stop_agreed = run.stop_reason or reasons[0], True
        if raisings:
            run.stop_raising, run.raising_agreed = run.stop_raising or _raised_elsewhere(raisings[0]), True

    def _refuse_requests(self, pending: Pending) -> NoReturn:
        found = self._context.host.exchange([f"{kind}({', '.join(_plain_arguments(arguments))})" for kind, arguments in pending])
        raise StateError(
            f"the ranks asked for different things by step {self._run.step}: "
            + ", ".join(f"rank {rank}: {' and '.join(asked) or 'nothing'}" for rank, asked in enumerate(found))
            + "; trainer.request() and save_checkpoint() concern all ranks: call them on every rank alike"
        )


def _raising(error: BaseException | None) -> str | None:
    """What another rank needs to know of what `fit` is to raise."""
    if isinstance(error, Interrupted):
        return TERMINATED
    if isinstance(error, KeyboardInterrupt):
        return KEYBOARD
    return None if error is None else f"{type(error).__name__}: {error}"


def _raised_elsewhere(what: str) -> BaseException:
    if what == TERMINATED:
        return Interrupted("the run was ended by SIGTERM on another rank, in order")
    if what == KEYBOARD:
        return KeyboardInterrupt("on another rank")
    return StateError(f"the run was ended in order by trainer.stop(raising=...) on another rank: {what}")


def _note_deadline(run: RunState) -> None:
    if run.deadline is not None and time.monotonic() >= run.deadline:
        run.stop_reason = run.stop_reason or "max_time is over"


def _digest(pending: Pending) -> float:
    """A number that is exact in a sum over a million ranks; 0 for nothing."""
    if not pending:
        return 0.0
    text = repr([(kind, sorted(_plain_arguments(arguments))) for kind, arguments in pending])
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little"))


def _plain_arguments(arguments: dict[str, Any]) -> list[str]:
    return [f"{name}={_plain(value)}" for name, value in arguments.items()]


def _plain(value: Any) -> str:
    return repr(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
