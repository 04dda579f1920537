"""The boundary between two steps, where all ranks take the decisions of a run together: to stop, to save, to evaluate.

What one rank wants during a step (a stop, a signal, the end of `max_time`, a finished background save) counts for all of them from the
next boundary on, and what callbacks asked for must be the same on every rank. One small host collective per boundary; none in one process.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from trainer_kit.exceptions import Interrupted, StateError
from trainer_kit.mesh import DistributedContext
from trainer_kit.run_state import RunState

if TYPE_CHECKING:
    from trainer_kit.checkpoint import CheckpointSaver

Pending = Sequence[tuple[str, dict[str, Any]]]


class Boundary(Protocol):
    """Where `Requests` meets the other ranks."""

    def meet(self, pending: Pending) -> None:
        """Settle the wishes of the steps so far; `pending` is what was asked for and not done yet."""


def boundary_of(run: RunState, saver: CheckpointSaver, context: DistributedContext) -> Boundary:
    """The boundary of this run."""
    return LocalBoundary(run, saver) if context.world_size == 1 else MeshBoundary(run, saver, context)


class LocalBoundary:
    """One process: every wish counts at once."""

    def __init__(self, run: RunState, saver: CheckpointSaver) -> None:
        self._run, self._saver = run, saver

    def meet(self, pending: Pending) -> None:
        """Count the wish to stop, and bring out the outcome of a background save that has ended."""
        run = self._run
        if run.deadline is not None:
            _note_deadline(run)
        run.stop_agreed = run.stop_reason is not None
        self._saver.poll()


class MeshBoundary:
    """Several ranks: a wish of one is a wish of all."""

    def __init__(self, run: RunState, saver: CheckpointSaver, context: DistributedContext) -> None:
        self._run, self._saver, self._context = run, saver, context

    def meet(self, pending: Pending) -> None:
        """Every rank calls this at the same boundary. Raises StateError if not all of them ask for the same."""
        self._context.failures.check()
        run, world = self._run, self._context.world_size
        _note_deadline(run)
        asked = _digest(pending)
        stops, interrupts, keyboard, ended, sum_asked = self._context.host.sum(
            [
                run.stop_reason is not None,
                isinstance(run.stop_raising, Interrupted),
                isinstance(run.stop_raising, KeyboardInterrupt),
                self._saver.ended,
                asked,
            ]
        )
        if sum_asked != world * asked:  # if one rank differs, none equals the mean
            self._refuse_requests(pending)
        if stops and run.stop_reason is None:
            run.stop_reason = f"{int(stops)} of {world} ranks asked for it"
        if interrupts and run.stop_raising is None:
            run.stop_raising = Interrupted("the run was ended by SIGTERM on another rank, in order")
        elif keyboard and run.stop_raising is None:
            run.stop_raising = KeyboardInterrupt("on another rank")
        run.stop_agreed = stops > 0
        if ended == world:
            self._saver.settle()

    def _refuse_requests(self, pending: Pending) -> NoReturn:
        found = self._context.host.exchange([kind for kind, _ in pending])
        raise StateError(
            f"the ranks asked for different things by step {self._run.step}: "
            + ", ".join(f"rank {rank}: {' and '.join(kinds) or 'nothing'}" for rank, kinds in enumerate(found))
            + "; trainer.request(), save_checkpoint() and evaluate() concern all ranks: call them on every rank alike"
        )


def _note_deadline(run: RunState) -> None:
    if run.deadline is not None and time.monotonic() >= run.deadline:
        run.stop_reason = run.stop_reason or "max_time is over"


def _digest(pending: Pending) -> float:
    """A number that is exact in a sum over a million ranks; 0 for nothing."""
    if not pending:
        return 0.0
    text = repr([(kind, sorted((name, _plain(value)) for name, value in arguments.items())) for kind, arguments in pending])
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little"))


def _plain(value: Any) -> str:
    return repr(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
