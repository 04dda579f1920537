"""One rank fails and the others learn why: with two watches in one process, and with ranks that really hang and really end."""

import contextlib
import io
import os
import signal
import sys
import threading
import time

import pytest
import torch.distributed as dist

from tests.mesh.support import build
from trainer_kit import MeshStrategy
from trainer_kit.exceptions import Interrupted, StateError
from trainer_kit.mesh import failure, failure_log
from trainer_kit.mesh.failure import FailureWatch
from trainer_kit.mesh.failure_log import MAX_TEXT, MAX_TRACEBACK, FailureLog, failure_of
from trainer_kit.testing import run_on_ranks


@pytest.fixture
def pair(monkeypatch):
    """The watches of rank 0 and rank 1; what would end the process is in `pair[0].exits`."""
    store = dist.HashStore()
    watches = [FailureWatch(store, rank, 2, interval=0.01, grace=0.2) for rank in range(2)]
    watches[0].exits = []
    monkeypatch.setattr(failure.os, "_exit", watches[0].exits.append)
    return watches


def failed(error: BaseException) -> BaseException:
    """The error with a traceback, as one that was raised."""
    try:
        raise error
    except BaseException as raised:
        return raised


def fail_in_a_section(watch: FailureWatch, error: BaseException) -> BaseException:
    with pytest.raises(type(error)) as caught, watch.section():
        raise error
    return caught.value


def wait_until(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def comes_to_know(watch: FailureWatch) -> str:
    """What `check` raises, soon."""
    for _ in range(1000):
        watch.check()
        time.sleep(0.005)
    return ""


def test_one_process_watches_nobody():
    """Contract 10: no thread, nothing written, nothing raised."""
    failures = MeshStrategy(device="cpu").build().failures
    with failures.section():
        assert "trainer_kit-failures" not in [thread.name for thread in threading.enumerate()]
        failures.check()
    failures.tell(ValueError("x"))
    failures.check()


def test_an_error_of_another_rank_is_raised_at_the_next_check(pair, capsys):
    """Contract 41 and B135: with the rank, the error and its traceback; the process lives on."""
    with pytest.raises(StateError, match=r"rank 1 failed: ValueError: bad sample 17") as caught, pair[0].section():
        pair[0].check()
        fail_in_a_section(pair[1], ValueError("bad sample 17"))
        comes_to_know(pair[0])
    assert "fail_in_a_section" in str(caught.value)
    assert pair[0].exits == [] and capsys.readouterr().err == ""
    with pair[0].section(), pair[1].section():  # both failed: a new section begins clean
        time.sleep(0.05)
        pair[0].check()
        pair[1].check()


def test_a_rank_that_hangs_prints_the_error_and_ends(pair, capsys):
    """Contract 41: nobody waits for a collective that will not end."""
    with pair[0].section():
        pair[1].section_number = 1
        pair[1].tell(failed(ValueError("bad sample 17")))
        wait_until(lambda: pair[0].exits)
    assert pair[0].exits == [1]
    printed = capsys.readouterr().err
    assert printed.index("rank 1 failed: ValueError: bad sample 17") < printed.index("in failed") < printed.index("rank 0 ends")


def test_a_rank_that_does_not_come_out_after_the_check_ends_too(pair):
    """Contract 41: the way out may hang as well."""
    with contextlib.suppress(StateError), pair[0].section():
        pair[1].section_number = 1
        pair[1].tell(ValueError("first"))
        try:
            comes_to_know(pair[0])
        finally:
            wait_until(lambda: pair[0].exits)
    assert pair[0].exits == [1]


def test_a_rank_on_the_way_out_of_its_own_error_has_time(pair, capsys):
    """Contract 42: what all ranks raise must not cut off the one whose callbacks have something to finish; and not for ever."""
    pair[0]._way_out = 1.0
    with pytest.raises(ValueError), pair[0].section():
        fail_in_a_section(pair[1], ValueError("wrong"))
        pair[0].report(ValueError("wrong"))
        time.sleep(0.6)
        assert pair[0].exits == [] and capsys.readouterr().err == ""
        wait_until(lambda: pair[0].exits)
        raise ValueError("wrong")
    assert pair[0].exits == [1]


def test_the_same_error_on_all_ranks_is_told_once(pair, capsys):
    """Contract 41: a wrong configuration raises everywhere. Nothing is printed besides, and no process ends."""
    errors = [fail_in_a_section(watch, ValueError("wrong")) for watch in pair]
    time.sleep(0.3)
    assert pair[0].exits == [] and capsys.readouterr().err == ""
    assert all(not hasattr(error, "__notes__") for error in errors)


def test_what_follows_from_the_failure_of_another_rank_says_so(pair):
    """B135: gloo says that a connection was closed, which is not what went wrong."""
    fail_in_a_section(pair[1], ValueError("bad sample 17"))
    error = fail_in_a_section(pair[0], RuntimeError("Connection closed by peer"))
    (note,) = error.__notes__
    assert note.startswith("before it, rank 1 failed: ValueError: bad sample 17") and "fail_in_a_section" in note


def test_what_follows_is_not_told_back(pair):
    """The first error is the one to see."""
    with pytest.raises(RuntimeError), pair[0].section():
        fail_in_a_section(pair[1], ValueError("first"))
        raise RuntimeError("second")
    entries = FailureLog(pair[0]._log._store).read()
    assert [entry.error for entry in entries] == ["ValueError: first"]


def test_only_the_first_error_of_a_rank_counts(pair):
    with pytest.raises(ValueError, match="second"), pair[0].section():
        pair[0].tell(ValueError("first"))
        raise ValueError("second")
    assert [entry.error for entry in FailureLog(pair[0]._log._store).read()] == ["ValueError: first"]


def test_an_error_is_reported_before_the_way_out(pair):
    """Contract 41: closing may take long, and the others should not wait for it."""
    with pytest.raises(ValueError), pair[0].section():
        error = ValueError("first")
        pair[0].report(error)
        assert [entry.error for entry in FailureLog(pair[0]._log._store).read()] == ["ValueError: first"]
        raise error
    assert [entry.error for entry in FailureLog(pair[0]._log._store).read()] == ["ValueError: first"]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), Interrupted("in order"), SystemExit(0)])
def test_an_end_that_comes_to_all_ranks_is_no_failure(pair, end):
    """Design decision 7: after Ctrl-C and SIGTERM all ranks end in order; whoever is first must not end the others."""
    fail_in_a_section(pair[0], end)
    with pair[1].section():
        time.sleep(0.05)
        pair[1].check()


def test_a_rank_that_is_ahead_is_heard(pair):
    """It left this section in order, and failed in the next one, for which this rank would make it wait."""
    with pair[1].section():
        pass
    with pytest.raises(StateError, match="rank 1 failed: ValueError: ahead"), pair[0].section():
        fail_in_a_section(pair[1], ValueError("ahead"))
        comes_to_know(pair[0])


def test_a_rank_that_fails_at_the_end_of_a_section_is_heard_in_the_next(pair):
    """It will not come there."""
    with pair[0].section():
        pass
    with pytest.raises(StateError, match="rank 1 failed: ValueError: late"), pair[0].section():
        fail_in_a_section(pair[1], ValueError("late"))
        comes_to_know(pair[0])


def test_no_thread_is_left(pair):
    """Contract 42."""
    with pair[0].section():
        with pair[0].section():
            assert [t.name for t in threading.enumerate()].count("trainer_kit-failures") == 1
        assert [t.name for t in threading.enumerate()].count("trainer_kit-failures") == 1
    assert "trainer_kit-failures" not in [t.name for t in threading.enumerate()]


class Gone:
    """A store whose server has ended."""

    def clone(self):
        return self

    def set_timeout(self, timeout):
        pass

    def __getattr__(self, name):
        def fail(*_):
            raise dist.DistNetworkError("Broken pipe")

        return fail


def test_a_store_that_is_gone_is_noted_on_the_error(capsys):
    """Contract 41: the error of the rank itself stays the one that surfaces."""
    error = fail_in_a_section(FailureWatch(Gone(), 0, 2), ValueError("mine"))
    assert error.__notes__ == ["the other ranks could not be told of this error, the store does not answer: Broken pipe"]
    assert capsys.readouterr().err == ""


def test_an_error_is_cut_to_a_size_the_store_takes():
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        raise ValueError("x" * 100_000)

    with pytest.raises(ValueError) as caught:
        deep(50)
    cut = failure_of(caught.value, 1, 1)
    assert len(cut.error) < MAX_TEXT + 50 and len(cut.traceback) == MAX_TRACEBACK
    assert failure_of(Unspeakable(), 1, 1).error.startswith("Unspeakable: ")


def test_the_rank_that_hosts_the_store_waits_until_it_is_read(monkeypatch):
    """Its end is the end of the store: the others must have read why. It goes on as soon as they have."""
    monkeypatch.setattr(failure_log, "_READ_TIME", 600.0)
    store = dist.HashStore()
    host, other = FailureLog(store), FailureLog(store)
    append = threading.Thread(target=host.append, args=(failure_of(ValueError("x"), 0, 1),), kwargs={"num_readers": 1}, daemon=True)
    append.start()
    append.join(0.1)
    assert append.is_alive()
    other.read()
    append.join(60.0)
    assert not append.is_alive()


def test_a_timeout_shows_where_the_others_were(pair, capsys):
    """Contract 4: the rank that did not come says where it is."""
    with pair[0].section():
        pair[1].section_number = 1
        pair[1].tell(failed(RuntimeError("Timed out waiting 3000ms for recv operation to complete")))
        wait_until(lambda: pair[0].exits)
    printed = capsys.readouterr().err
    assert "rank 1 waited in vain" in printed
    assert "test_a_timeout_shows_where_the_others_were" in printed.partition("rank 0 was here")[2]


# ---- on ranks


def job_fail(where: str) -> object:
    """Rank 1 fails at its second step; rank 0 is on its way to the boundary, or in `agree`."""
    context = build()
    sys.stderr = printed = io.StringIO()
    try:
        with context.failures.section():
            for step in range(200):
                context.failures.check()
                if context.rank == 1 and step == 1:
                    raise ValueError("bad sample 17")
                if where == "agree" and step == 1:
                    context.host.agree("export()")
                time.sleep(0.02)
        return None
    except (StateError, ValueError) as error:
        outcome = f"{type(error).__name__}: {error}"
    finally:
        sys.stderr = sys.__stderr__
    with context.failures.section():  # afterwards everything goes on
        context.host.agree("evaluate()")
        total = context.host.sum([1.0])
    names = [thread.name for thread in threading.enumerate()]
    return outcome, printed.getvalue(), total, "trainer_kit-failures" in names


@pytest.mark.parametrize("where", ["step", "agree"])
def test_ranks_end_together_and_can_begin_again(where):
    """Contracts 41 and 42: one failed, the other raises that error at its boundary, and the next call works."""
    other, failing = run_on_ranks(2, job_fail, where)
    assert failing[0] == "ValueError: bad sample 17"
    assert other[0].startswith("StateError: rank 1 failed: ValueError: bad sample 17") and "job_fail" in other[0]
    for _, printed, total, thread_left in (other, failing):
        assert printed == "" and total == [2.0] and not thread_left


def job_hang() -> None:
    """Rank 0 is in a collective; rank 1 fails and takes its time to go."""
    context = build()
    context.failures._grace = 0.4
    with context.failures.section():
        if context.rank == 0:
            context.host.barrier()
        context.failures.tell(failed(ValueError("bad sample 17")))
        time.sleep(2.0)


def test_a_rank_in_a_collective_ends_with_the_error_in_sight():
    """B135 and contract 41: the process ends by itself, long before a timeout, and calls no collective."""
    with pytest.raises(StateError, match=r"(?s)rank 0.*rank 1 failed: ValueError: bad sample 17.*rank 0 ends"):
        run_on_ranks(2, job_hang, timeout=8.0)


def job_terminated() -> None:
    """Rank 0 is blocked in a receive and gets a SIGTERM."""
    context = build()
    pids = context.host.exchange(os.getpid())
    with context.failures.section():
        if context.rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            context.host.barrier()
        time.sleep(0.3)
        os.kill(pids[0], signal.SIGTERM)


def test_a_blocked_rank_ends_by_sigterm():
    """B140: the thread of the section does not keep it alive."""
    with pytest.raises(StateError, match=r"rank 0 of 2 was killed by signal 15"):
        run_on_ranks(2, job_terminated, timeout=8.0)
