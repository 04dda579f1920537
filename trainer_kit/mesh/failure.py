"""`FailureWatch`: an error on one rank ends all ranks at once, with that error in sight.

The rank that fails writes its error to the store. On the others a thread, which lives only inside a section such as a fit, reads it,
and ends the process when the main thread hangs in a collective that nobody will finish. Nothing here is a collective. A rank that was
killed tells nothing; its launcher notices. Before editing: the thread must never use the connection of the main thread, which may be
blocked in it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from trainer_kit.exceptions import StateError
from trainer_kit.mesh.failure_log import Failure, FailureLog, failure_of, is_same
from trainer_kit.mesh.hangs import is_hang, main_thread_stack

if TYPE_CHECKING:
    from torch.distributed import Store


class Failures(Protocol):
    """What the rest of the package calls."""

    def section(self) -> AbstractContextManager[None]:
        """The block is a call that all ranks make. An error that ends it on one ends it on all."""
        ...

    def tell(self, error: BaseException) -> None:
        """Write the error that ends this rank's call where the other ranks see it. The first of a section counts. Never raises."""
        ...

    def report(self, error: BaseException) -> None:
        """This error is about to end the section: say so now, before what the way out of it does. Never raises."""
        ...

    def check(self) -> None:
        """Raise StateError if another rank failed. Costs one truth test."""
        ...


class NoFailures:
    """One process: there is nobody to watch."""

    def section(self) -> AbstractContextManager[None]:
        """See Failures."""
        return nullcontext()

    def tell(self, error: BaseException) -> None:
        """See Failures."""

    def report(self, error: BaseException) -> None:
        """See Failures."""

    def check(self) -> None:
        """See Failures."""


class FailureWatch:
    """Watches the other ranks of a world.

    hosts_store: the store ends with this process, so if it fails it waits a moment until the others have read why.
    explain: adds to an error that ends a section what is known about it. interval: seconds between looks.
    grace: seconds that the main thread has to come to `check` or out of the section, and again to come out after `check`.
    way_out: seconds for the way out of an error of its own, where callbacks may have something to finish.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        hosts_store: bool = False,
        explain: Callable[[BaseException], None] | None = None,
        interval: float = 0.5,
        grace: float = 4.0,
        way_out: float = 30.0,
    ) -> None:
        self._log, self._rank, self._num_others = FailureLog(store), rank, world_size - 1
        self._hosts_store, self._explain = hosts_store, explain
        self._interval, self._grace, self._way_out = interval, grace, way_out
        self.section_number = 0  # ranks count alike; `HostChannel.agree` evens out what an error put in disorder
        self.failed = False  # whether the last section ended by an error
        self.settled = 0  # the last section that failed here too: what other ranks tell of it is no news
        self._told = self._reported = False
        self._failure: Failure | None = None  # of another rank, unsettled
        self._raised = False
        self._inside = False
        self._looking = threading.Lock()

    @contextmanager
    def section(self) -> Iterator[None]:
        """See Failures. A section inside another one is a part of it."""
        if self._inside:
            yield
            return
        self.section_number += 1
        self._inside, self._told, self._reported, self._raised, self.failed = True, False, False, False, False
        left = threading.Event()
        thread = threading.Thread(target=self._watch, args=(left,), name="trainer_kit-failures", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            self.report(error)
            self.settled, self._failure, self.failed = self.section_number, None, True
            raise
        finally:
            self._inside = False
            left.set()
            thread.join(self._grace)

    def check(self) -> None:
        """See Failures."""
        if self._failure is not None:
            self._raised = True
            raise StateError(_in_full(self._failure))

    def tell(self, error: BaseException) -> None:
        """See Failures."""
        failure = self._failure
        if self._told or (failure is not None and failure.section >= self.section_number):
            return  # what follows from the failure of another rank is no news to that one
        self._told = True
        try:
            mine = failure_of(error, self._rank, self.section_number)
            # Before this process ends, and its launcher ends the others, they say where they hang.
            wait = self._hosts_store or is_hang(mine.error)
            self._log.append(mine, num_readers=self._num_others if wait else 0)
        except RuntimeError as gone:  # torch's DistError is one
            error.add_note(f"the other ranks could not be told of this error, the store does not answer: {gone}")

    def report(self, error: BaseException) -> None:
        """See Failures. The error may be only what the failure of another rank looks like from this one."""
        if not self._inside or self._reported or not isinstance(error, Exception):
            return  # Ctrl-C and the end by a signal come to all ranks
        self._reported = True
        if not self._raised:
            self.look()
            if self._failure is not None and not is_same(self._failure, error):
                error.add_note(f"before it, {_in_full(self._failure)}")
        if self._explain is not None and (self._failure is None or is_hang(str(error))):
            self._explain(error)
        self.tell(error)

    def look(self) -> bool:
        """Read what other ranks told. False: the store does not answer any more."""
        with self._looking:
            try:
                entries = self._log.read()
            except RuntimeError:
                # The rank that ran the store has ended. If it failed, the collectives with it fail too; there is nothing to read.
                return False
            for entry in entries:
                if entry.rank != self._rank and entry.section > self.settled and self._failure is None:
                    self._failure = entry
            return True

    # ---- the thread

    def _watch(self, left: threading.Event) -> None:
        """Look for failures of other ranks until the section ends; after one, see to it that this process does not hang."""
        while self.look():
            if self._failure is not None:
                self._see_it_end(self._failure, left)
                return
            if left.wait(self._interval):
                return

    def _see_it_end(self, failure: Failure, left: threading.Event) -> None:
        if is_hang(failure.error):
            _say(f"rank {failure.rank} waited in vain for other ranks. At that time rank {self._rank} was here:\n{main_thread_stack()}")
        quiet = min(1.0, self._grace / 2)
        if left.wait(quiet):  # by the same error, or by what came of it
            return
        if not self._raised and not self._reported:
            self._print(failure)
            left.wait(self._grace - quiet)
        if self._raised:
            left.wait(self._grace)
        if self._reported:  # it is not stuck in a collective of its step, and the others know
            left.wait(self._way_out)
        if not left.is_set():
            self._leave(f"rank {self._rank} ends: it did not come to the end of its step within {self._grace:g} s after that")

    def _print(self, failure: Failure) -> None:
        """In full on one rank, in a line on the others, so that it does not drown in copies of itself."""
        first = 1 if failure.rank == 0 else 0
        _say(_in_full(failure) if self._rank == first else str(failure))

    def _leave(self, why: str) -> None:
        """End the process in the middle of whatever the main thread does: it may never come back from there."""
        try:
            _say(why)
            sys.stdout.flush()
        finally:
            os._exit(1)


def _say(text: str) -> None:
    sys.stderr.write(f"trainer_kit: {text}\n")
    sys.stderr.flush()


def _in_full(failure: Failure) -> str:
    return f"{failure}\nIts traceback:\n{failure.traceback.rstrip()}"
