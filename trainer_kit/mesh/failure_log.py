"""What ended ranks, as a list in the store that all ranks append to and read. Which entries matter, and to whom, is in `failure.py`.

Before editing: it has a connection of its own, with a short time limit, because the main thread may be blocked in its connection.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

MAX_TEXT, MAX_TRACEBACK = 2_000, 20_000  # characters
_ANSWER_TIME = timedelta(seconds=3)
_READ_TIME = 1.5  # seconds that a rank waits for the others to read its entry


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ended a rank. `section` is the number of the section it was in."""

    rank: int
    section: int
    error: str
    traceback: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.error}"


def failure_of(error: BaseException, rank: int, section: int) -> Failure:
    """The error as text, cut to a size that the store carries easily: the end of a traceback says most."""
    lines = "".join(traceback.format_exception(error))
    return Failure(rank, section, _headline(error), lines[-MAX_TRACEBACK:])


def is_same(failure: Failure, error: BaseException) -> bool:
    """Whether a rank failed by an error like this one, as all do that are configured wrongly."""
    return failure.error == _headline(error)


def _headline(error: BaseException) -> str:
    text = f"{type(error).__name__}: {traceback.TracebackException.from_exception(error)}"  # also if its `__str__` fails
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ..."


class FailureLog:
    """The list, as one rank sees it. Its methods raise torch's DistError when the store does not answer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._connection: Store | None = None
        self._num_read = 0
        self._lock = threading.Lock()

    def append(self, failure: Failure, *, num_readers: int = 0) -> None:
        """Add an entry; then wait a moment until so many ranks have read it, because the store ends with this process."""
        with self._lock:
            store = self._connected()
            number = store.add("failures", 1) - 1
            store.set(f"failure/{number}", json.dumps(asdict(failure)))
            end = time.monotonic() + _READ_TIME
            while num_readers and store.add(f"readers/{number}", 0) < num_readers and time.monotonic() < end:
                time.sleep(0.02)

    def read(self) -> list[Failure]:
        """The entries that were added since the last call."""
        with self._lock:
            store = self._connected()
            found = []
            while store.check([f"failure/{self._num_read}"]):
                found.append(Failure(**json.loads(store.get(f"failure/{self._num_read}"))))
                store.add(f"readers/{self._num_read}", 1)
                self._num_read += 1
            return found

    def _connected(self) -> Store:
        if self._connection is None:
            self._connection = self._store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
            self._connection.set_timeout(_ANSWER_TIME)
        return self._connection
