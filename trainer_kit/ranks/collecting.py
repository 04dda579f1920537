"""Waiting for the answers of ranks: how long after the first error or death the others may take."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import wait
from types import MappingProxyType
from typing import Any

from trainer_kit.ranks.outcomes import Died, Hung, Outcome, Returned
from trainer_kit.ranks.processes import Rank

Readers = Mapping[Any, Callable[[], bool]]
GRACE_AFTER_ERROR = 8.0  # seconds; with the rest of what follows an error, all is over within ten
GRACE_AFTER_DEATH = 2.0  # a lost connection is noticed at once
_ENDING = 5.0  # seconds between the connection of a process and the process itself


def collect(ranks: Mapping[int, Rank], timeout: float | None, readers: Readers = MappingProxyType({})) -> dict[int, Outcome]:
    """The outcomes by rank. Who has not answered at the end of the time, or of the grace after an error of another one, hangs.

    readers: further things to wait for, and what to do when one can be read; it returns False when nothing more will come.
    """
    started = time.monotonic()
    deadline = float("inf") if timeout is None else started + timeout
    readers = dict(readers)
    error_at: float | None = None
    outcomes: dict[int, Outcome] = {}
    while (pending := {number: rank for number, rank in ranks.items() if number not in outcomes}) and time.monotonic() < deadline:
        ready = wait([*readers, *(part for rank in pending.values() for part in (rank.connection, rank.status))], _left(deadline))
        readers = _with_more(readers, ready)
        for number, rank in pending.items():
            outcome = _read(rank, ready)
            if outcome is not None:
                outcomes[number] = outcome
            if outcome is not None and not isinstance(outcome, Returned):
                now = time.monotonic()
                error_at = error_at or now
                deadline = min(deadline, now + (GRACE_AFTER_DEATH if isinstance(outcome, Died) else GRACE_AFTER_ERROR))
    seconds = time.monotonic() - (error_at or started)
    return outcomes | {number: Hung(seconds, error_at is not None) for number in pending}


def _read(rank: Rank, ready: list[Any]) -> Outcome | None:
    """The rank's answer, which comes first, or its death: one that died may have answered before."""
    if rank.connection in ready or (rank.status in ready and rank.connection.poll()):
        try:
            return pickle.loads(rank.connection.recv_bytes())
        except (EOFError, OSError):  # it closed the connection, perhaps in the middle of its answer
            if not wait([rank.status], _ENDING):
                return Hung(_ENDING, after_error=False)
            return Died(rank.exit_code(), time.monotonic())
    return Died(rank.exit_code(), time.monotonic()) if rank.status in ready else None


def wait_for_end(ranks: Iterable[Rank], timeout: float | None, readers: Readers) -> None:
    """Until all processes have ended, or for `timeout` seconds."""
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    living, readers = [rank for rank in ranks if rank.is_alive()], dict(readers)
    while living and time.monotonic() < deadline:
        ready = wait([*readers, *(rank.status for rank in living)], _left(deadline))
        readers = _with_more(readers, ready)
        living = [rank for rank in living if rank.status not in ready]


def _left(deadline: float) -> float | None:
    return None if deadline == float("inf") else max(0.0, deadline - time.monotonic())


def _with_more(readers: Readers, ready: list[Any]) -> dict[Any, Callable[[], bool]]:
    """Call those that can be read, and keep those from which more may come."""
    return {item: read for item, read in readers.items() if item not in ready or read()}
