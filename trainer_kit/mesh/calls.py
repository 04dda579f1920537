"""Collective calls of all ranks: that they are in the same one, and what to say when they are not.

It goes through the store, since a collective that times out leaves its group broken. Calls are numbered; the ranks write under the number
where they are, and the first verdict on it is that of all, so that nobody goes on alone. Before editing: ranks that were left alone in
a call, or out of one by an error, must find together again in the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from trainer_kit.exceptions import StateError
from trainer_kit.mesh.stores import poll

if TYPE_CHECKING:
    from torch.distributed import Store

    from trainer_kit.mesh.failure import FailureWatch

MAX_NAMED = 8  # ranks in a message
_AGREED, _ABANDONED = "agreed", "abandoned"


class Call(NamedTuple):
    """A call of one rank, such as `export()`, with what it asks for, in the section of this number."""

    what: str
    detail: str
    section: int


class RollCall:
    """Numbers the calls of this rank. `failures` says what ended another rank, which ends the waiting for it."""

    def __init__(self, store: Store, rank: int, world_size: int, failures: FailureWatch) -> None:
        self._store, self._rank, self._world_size, self._failures = store, rank, world_size, failures
        self._number = 0

    def agree(self, what: str, detail: str, timeout: float) -> None:
        """Raise StateError on every rank unless all of them come here for the same within `timeout` seconds."""
        mine = Call(what, detail, self._failures.section_number)
        met = False
        while not met:
            number, self._number = self._number, self._number + 1
            met = self._meet(number, mine, timeout)
        self._forget(number - 1)  # all ranks are here, so they have left it

    def _meet(self, number: int, mine: Call, timeout: float) -> bool:
        """Meet the others in the call of this number. False: it is over, and this rank has nothing to do with it."""
        if self._store.check([f"agree/{number}/verdict"]):
            self._check_missed(number, mine)
            return False
        keys = [f"agree/{number}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], json.dumps(mine))
        try:
            if poll(self._store, keys, time.monotonic() + timeout, self._failures.check):
                calls = self._read(keys)
                if any(call.section < mine.section and call.section <= self._failures.settled for call in calls):
                    return False  # they wait in a section that ended here by an error, and are about to learn of it
                if any(call.section > mine.section for call in calls):
                    self._failures.look()  # whoever is ahead may have left this section by an error
                    self._failures.check()
                verdict = difference(calls) or _AGREED
            else:
                calls = []
                verdict = absence([rank for rank, key in enumerate(keys) if not self._store.check([key])], mine.what, timeout)
        except BaseException:
            self._decide(number, _ABANDONED)
            raise
        self._accept(self._decide(number, verdict))
        self._failures.section_number = max(call.section for call in calls)
        return True

    def _check_missed(self, number: int, mine: Call) -> None:
        """Other ranks ended a call without this rank. Raise StateError if it is the one that this rank makes."""
        verdict = self._store.get(f"agree/{number}/verdict").decode()
        keys = [f"agree/{number}/{rank}" for rank in range(self._world_size) if rank != self._rank]
        here = [key for key in keys if self._store.check([key])]
        now = [call for call in self._read(here) if call.section >= mine.section]
        if verdict == _ABANDONED and now:
            self._accept(verdict)
        elif any(call.what == mine.what for call in now):
            raise StateError(f"{verdict}; this rank came later")

    def _accept(self, verdict: str) -> None:
        """Raise StateError if the verdict is not that all ranks agreed."""
        if verdict == _AGREED:
            return
        if verdict == _ABANDONED:
            self._failures.look()
            self._failures.check()
            verdict = "another rank left the call before all ranks had come to it; see its output for the reason"
        raise StateError(verdict)

    def _decide(self, number: int, verdict: str) -> str:
        return self._store.compare_set(f"agree/{number}/verdict", "", verdict).decode()

    def _read(self, keys: list[str]) -> list[Call]:
        return [Call(*json.loads(text)) for text in self._store.multi_get(keys)] if keys else []

    def _forget(self, number: int) -> None:
        if number >= 0:
            self._store.delete_key(f"agree/{number}/{self._rank}")
            if self._rank == 0:
                self._store.delete_key(f"agree/{number}/verdict")


def difference(calls: Sequence[Call]) -> str:
    """Who is where, by the first rank that differs from rank 0; empty if all are in the same call."""
    first = calls[0]
    for rank, call in enumerate(calls):
        if call.what != first.what:
            return (
                f"{first.what} was called on rank 0, while rank {rank} is in {call.what}; both are collective, call them on every rank "
                "in the same order"
            )
        if call.detail != first.detail:
            return (
                f"{first.what} was called with {first.detail or 'nothing'} on rank 0, but with {call.detail or 'nothing'} on rank {rank}; "
                "every rank must ask for the same"
            )
    return ""


def absence(missing: Sequence[int], what: str, seconds: float) -> str:
    """Which ranks did not come to a call in time."""
    return f"{name_ranks(missing)} did not come to {what} within {seconds:g} s; it is collective, call it on every rank"


def name_ranks(ranks: Sequence[int]) -> str:
    """Such as `rank 3` or `ranks 3, 4`; the first ones of many."""
    named = ", ".join(map(str, ranks[:MAX_NAMED])) + (" ..." if len(ranks) > MAX_NAMED else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
