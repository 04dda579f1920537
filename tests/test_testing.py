"""`run_on_ranks`: right values, errors with their rank, hangs and deaths, nothing of a job in the next one, nothing left running."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import random
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor, init_device_mesh

from trainer_kit import testing
from trainer_kit.exceptions import ConfigurationError, StateError
from trainer_kit.ranks import collecting
from trainer_kit.testing import run_on_ranks


def weighted_sum(weights: torch.Tensor) -> tuple[int, torch.Tensor]:
    total = weights * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return os.getpid(), total


def who() -> tuple[int, str, str, str, str, int]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return (os.getpid(), *(os.environ[name] for name in names), torch.get_num_threads())


def test_values_are_those_of_the_ranks():
    """The sum over ranks 1..n in closed form; a pool grows, and smaller jobs use its first ranks."""
    weights = torch.tensor([1.0, -2.0])
    for num_ranks in (2, 3, 1, 2):
        for _, total in run_on_ranks(num_ranks, weighted_sum, weights):
            torch.testing.assert_close(total, weights * num_ranks * (num_ranks + 1) / 2)
    three, two = run_on_ranks(3, who), run_on_ranks(2, who)
    assert [place[1:] for place in three] == [(str(rank), "3", str(rank), "3", 1) for rank in range(3)]
    assert [place[0] for place in two] == [place[0] for place in three[:2]]


def large(data: torch.Tensor, module: nn.Module) -> tuple[torch.Tensor, nn.Module]:
    return data[::2], module


def test_arguments_and_results_travel_by_value():
    data, module = torch.arange(3_000_000.0), nn.Linear(2, 3)
    for half, sent in run_on_ranks(2, large, data, module):
        assert torch.equal(half, data[::2]) and torch.equal(sent.weight, module.weight) and not half.is_shared()


def along(dim: str, other_groups_first: bool) -> torch.Tensor:
    if other_groups_first:
        for ranks in ([0, 2], [1, 3], [0, 1, 2, 3]):
            dist.new_group(ranks)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    cut = distribute_tensor(torch.arange(12.0).view(6, 2), mesh[dim], [Shard(0)])
    (cut * 2).redistribute(placements=[Shard(1)])
    ranks = torch.full((2,), float(dist.get_rank()))
    partial = DTensor.from_local(ranks, mesh[dim], [Partial()], run_check=False)
    return (partial + partial).full_tensor()


def test_meshes_of_an_earlier_group_are_forgotten():
    """DTensor keeps results by the shape and ranks of a mesh. Of a mesh whose group is gone, they would lead to other ranks' groups."""
    for other_groups_first in (False, True):
        for dim, expected in (("a", [4.0, 8.0, 4.0, 8.0]), ("b", [2.0, 2.0, 10.0, 10.0])):
            for result, value in zip(run_on_ranks(4, along, dim, other_groups_first), expected, strict=True):
                torch.testing.assert_close(result, torch.full((2,), value))
        run_on_ranks(2, who)


def raise_on(rank: int, delay: float = 0.0) -> int:
    print(f"said by rank {dist.get_rank()}")
    if dist.get_rank() == rank:
        raise ZeroDivisionError("on purpose")
    time.sleep(delay)
    return dist.get_rank()


def test_an_error_is_raised_here_with_rank_traceback_and_output():
    pids = [pid for pid, _ in run_on_ranks(2, weighted_sum, torch.ones(1))]
    with pytest.raises(StateError) as caught:
        run_on_ranks(2, raise_on, 1)
    message = str(caught.value)
    assert "raise_on: rank 1 of 2 raised ZeroDivisionError: on purpose" in message
    assert "in raise_on\n    raise ZeroDivisionError" in message and "living.py" not in message
    assert "rank 0 printed:\nsaid by rank 0" in message and "rank 1 printed:\nsaid by rank 1" in message
    assert type(caught.value.__cause__) is ZeroDivisionError
    assert [pid for pid, _ in run_on_ranks(2, weighted_sum, torch.ones(1))] == pids, "all came back: the ranks stay"


def fail_in_turn() -> None:
    rank = dist.get_rank()
    time.sleep(0.2 * (1 - rank))
    error = KeyError(f"from rank {rank}")
    error.add_note("a note")
    raise error


def all_fail() -> None:
    raise SystemExit(3)


def test_the_first_error_in_time_is_told_first():
    with pytest.raises(StateError, match=r"(?s)rank 1 of 2 raised KeyError: 'from rank 1'.*a note.*rank 0 raised KeyError: 'from rank 0'"):
        run_on_ranks(2, fail_in_turn)
    with pytest.raises(StateError, match=r"(?s)rank . of 3 raised SystemExit: 3.*so did rank ., ."):
        run_on_ranks(3, all_fail)


def compare(left: int) -> None:
    right = 2 * left
    assert left == right


class Unsendable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("two values")


def raise_unsendable() -> None:
    raise Unsendable(1, 2)


def test_a_failed_assertion_tells_the_values():
    with pytest.raises(StateError, match="left = 21\n  right = 42"):
        run_on_ranks(1, compare, 21)
    with pytest.raises(StateError, match="Unsendable: two values") as caught:
        run_on_ranks(1, raise_unsendable)
    assert caught.value.__cause__ is None


def return_unsendable() -> object:
    return threading.Lock()


def test_what_can_not_be_sent_is_refused():
    with pytest.raises(ConfigurationError, match="lambda.* top level of a module"):
        run_on_ranks(2, lambda: 1)
    with pytest.raises(ConfigurationError, match="top level of a module"):
        run_on_ranks(2, functools.partial(raise_on, 1))

    def inner() -> None: ...

    with pytest.raises(ConfigurationError, match="inner.* top level of a module"):
        run_on_ranks(2, inner)
    with pytest.raises(ConfigurationError, match="argument of raise_on given to run_on_ranks can't be pickled: TypeError"):
        run_on_ranks(2, raise_on, threading.Lock())
    with pytest.raises(ConfigurationError, match="num_ranks=0"):
        run_on_ranks(0, who)
    with pytest.raises(StateError, match="cannot pickle '_thread.lock'"):
        run_on_ranks(1, return_unsendable)


def wait_for_nobody(but: int) -> None:
    print("before", flush=True)
    if dist.get_rank() != but:
        dist.barrier()


def is_gone(pid: int, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.02)
    return not os.path.exists(f"/proc/{pid}")


def test_ranks_that_hang_are_killed_and_told_where_they_were():
    """Contract 41: an error, not an endless wait."""
    pids = [place[0] for place in run_on_ranks(2, who)]
    with pytest.raises(StateError) as caught:
        run_on_ranks(2, wait_for_nobody, 1, timeout=1.0)
    message = str(caught.value)
    assert "wait_for_nobody: rank 0 of 2 had not come back 1 s after the start and was killed" in message
    assert "in barrier" in message and "in wait_for_nobody" in message and "rank 1 printed:\nbefore" in message
    assert "most recent call" not in message.split("printed:")[1], "the stack is told once"
    assert all(is_gone(pid) for pid in pids)
    torch.testing.assert_close(run_on_ranks(2, weighted_sum, torch.ones(1))[1][1], torch.full((1,), 3.0))


def test_an_error_is_not_hidden_by_those_who_wait_for_that_rank(monkeypatch):
    """B135: the error of the rank that raised, within the grace that the others get."""
    monkeypatch.setattr(collecting, "GRACE_AFTER_ERROR", 0.5)
    with pytest.raises(StateError, match=r"(?s)rank 1 of 2 raised ZeroDivisionError.*rank 0 had not come back . s after that"):
        run_on_ranks(2, raise_on, 1, 60.0)
    assert [place[1] for place in run_on_ranks(2, who)] == ["0", "1"]


def leave(rank: int, how: str) -> None:
    if dist.get_rank() == rank and how == "exit":
        os._exit(5)
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(("how", "told"), [("exit", "left with exit code 5"), ("kill", "was killed by signal 9")])
def test_a_rank_that_dies_is_named_and_the_next_job_gets_new_ones(how, told):
    with pytest.raises(StateError, match=rf"leave: rank 1 of 2 {told} before its function returned"):
        run_on_ranks(2, leave, 1, how)
    assert [place[1] for place in run_on_ranks(2, who)] == ["0", "1"]


def test_a_rank_that_died_between_jobs_is_replaced():
    pid = run_on_ranks(2, who)[1][0]
    os.kill(pid, signal.SIGKILL)
    assert is_gone(pid)
    assert [place[1] for place in run_on_ranks(2, who)] == ["0", "1"]


def start_and_raise() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.full((1,), 1000.0), async_op=True)
    raise ZeroDivisionError


def destroy() -> None:
    dist.destroy_process_group()


def test_no_collective_of_a_failed_job_reaches_the_next_one():
    """Rank 0 left a sum open: that of the next job must not be added to it."""
    with pytest.raises(StateError):
        run_on_ranks(2, start_and_raise)
    for _, total in run_on_ranks(2, weighted_sum, torch.ones(1)):
        torch.testing.assert_close(total, torch.full((1,), 3.0))
    run_on_ranks(2, destroy)
    for _, total in run_on_ranks(2, weighted_sum, torch.ones(1)):
        torch.testing.assert_close(total, torch.full((1,), 3.0))


def look_around() -> list[object]:
    numbers = (torch.rand(()).item(), random.random())
    settings = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    return [numbers, settings, os.environ.get("LEFT_BY_A_JOB"), os.environ.get("OF_THE_CALLER"), os.getcwd(), warns()]


def warns() -> bool:
    try:
        warnings.warn("a warning", stacklevel=2)
    except UserWarning:
        return True
    return False


def make_a_mess(folder: str) -> None:
    torch.rand(7), random.random()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("ignore")
    os.environ["LEFT_BY_A_JOB"] = "1"
    os.chdir(folder)


def test_every_job_begins_the_same_way(tmp_path, monkeypatch):
    first = run_on_ranks(2, look_around)
    run_on_ranks(2, make_a_mess, "/")
    again = run_on_ranks(2, look_around)
    assert first == again and first[0] == first[1]
    torch.manual_seed(0)
    random.seed(0)
    assert first[0] == [(torch.rand(()).item(), random.random()), (torch.float32, True, 1, False), None, None, os.getcwd(), True]
    monkeypatch.setenv("OF_THE_CALLER", "yes")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_on_ranks(1, look_around)[0][3:] == ["yes", str(tmp_path), False]


def test_a_module_that_no_import_finds_is_loaded_from_its_file(tmp_path, monkeypatch):
    """As pytest names test modules under `--import-mode=importlib`."""
    file = tmp_path / "test_somewhere.py"
    file.write_text("VALUE = 7\nclass Box:\n    value = 8\ndef job(box):\n    return VALUE + box.value\n")
    for package in ("nowhere", "nowhere.tests"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    spec = importlib.util.spec_from_file_location("nowhere.tests.test_somewhere", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert run_on_ranks(2, module.job, module.Box()) == [15, 15]


def nested() -> None:
    run_on_ranks(2, who)


def test_a_rank_does_not_start_ranks():
    with pytest.raises(StateError, match="run_on_ranks was called in a rank"):
        run_on_ranks(1, nested)


def test_an_interrupt_ends_the_ranks_and_the_next_job_works():
    """Contract 42: Ctrl-C."""
    pids = [place[0] for place in run_on_ranks(2, who)]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_on_ranks(2, wait_for_nobody, 1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert all(is_gone(pid) for pid in pids)
    assert [place[1] for place in run_on_ranks(2, who)] == ["0", "1"]


def double() -> tuple[float, int, int]:
    total = torch.ones(1)
    for _ in range(20):
        dist.all_reduce(total)
    return total.item(), os.getpid(), os.getppid()


def in_a_process(then: Callable[[], None]) -> tuple[int, list]:
    """The pid of a forked process with ranks of its own, and the results it got from them; it does `then` afterwards."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, json.dumps(run_on_ranks(2, double)).encode())
            then()
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, "rb", 0) as results:
        return pid, json.loads(results.read(4096))


def close_and_leave() -> None:
    testing._pool().close()
    os._exit(0)


def test_processes_do_not_meet_and_leave_nothing_running():
    """B136: no fixed port. Pools of three processes at once; one of them is killed, one closes its pool."""
    killed, first = in_a_process(signal.pause)
    closing, second = in_a_process(close_and_leave)
    here = run_on_ranks(2, double)
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    assert os.waitpid(closing, 0)[1] == 0
    assert {answer[0] for answer in (*first, *second, *here)} == {2.0**20}
    pids = {pid for answer in (*first, *second) for pid in answer[1:]}
    assert len(pids) == 6, "two ranks each, and what they are forked from"
    assert pids.isdisjoint(pid for answer in here for pid in answer[1:])
    assert all(is_gone(pid) for pid in pids)
