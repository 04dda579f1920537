"""`launch`: ranks from a module, a script and a notebook; errors, Ctrl-C, and nothing left running."""

from __future__ import annotations

import builtins
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

import trainer_kit
from trainer_kit import launch
from trainer_kit.exceptions import ConfigurationError, Interrupted, StateError, UnsupportedError
from trainer_kit.ranks import collecting, launching
from trainer_kit.testing import run_on_ranks

REPOSITORY = Path(__file__).parents[1]


def is_gone(pid: int, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.02)
    return not os.path.exists(f"/proc/{pid}")


def pids_in(folder: Path, number: int, seconds: float = 60.0) -> list[int]:
    """The ranks that wrote themselves down, and what they are forked from."""
    until = time.monotonic() + seconds
    while len(list(folder.glob("*.pid"))) < number and time.monotonic() < until:
        time.sleep(0.02)
    return [int(pid) for path in folder.glob("*.pid") for pid in path.read_text().split()]


def write_down(folder: Path) -> None:
    path = Path(folder, os.environ["RANK"])
    path.write_text(f"{os.getpid()} {os.getppid()}")
    path.rename(path.with_suffix(".pid"))


def fail(folder: Path) -> None:
    write_down(folder)
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("on purpose")
    time.sleep(60)


@pytest.fixture
def in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only this process has runs in forks of it."""
    monkeypatch.setattr(builtins, "get_ipython", None, raising=False)


def test_the_first_error_ends_all_ranks(tmp_path, monkeypatch, in_a_notebook):
    """Contract 41, B135."""
    monkeypatch.setattr(collecting, "GRACE_AFTER_ERROR", 1.0)
    with pytest.raises(StateError, match=r"(?s)rank 1 of 2 raised ZeroDivisionError: on purpose.*in fail.*rank 0 had not") as caught:
        launch(lambda: fail(tmp_path), 2)
    assert type(caught.value.__cause__) is ZeroDivisionError
    pids = set(pids_in(tmp_path, 2)) - {os.getpid()}
    assert len(pids) == 2 and all(is_gone(pid) for pid in pids)


def end_in_order(folder: Path) -> None:
    def terminate(*_: object) -> None:
        raise Interrupted(f"saved by rank {os.environ['RANK']}")

    signal.signal(signal.SIGTERM, terminate)
    write_down(folder)
    time.sleep(60)


def test_a_request_to_end_is_passed_on(tmp_path, in_a_notebook):
    """SIGTERM, as schedulers send it: the ranks save and end, and so does this process, with code 143."""

    def ask() -> None:
        pids_in(tmp_path, 2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(Interrupted, match="saved by rank .") as caught:
        launch(lambda: end_in_order(tmp_path), 2)
    thread.join()
    assert caught.value.code == 143 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert all(is_gone(pid) for pid in set(pids_in(tmp_path, 2)) - {os.getpid()})


def launch_inside() -> None:
    launch(fail, 2, "")


def test_what_can_not_be_launched_is_refused(monkeypatch):
    with pytest.raises(ConfigurationError, match="lambda.* top level of a module"):
        launch(lambda: 1, 2)
    with pytest.raises(ConfigurationError, match="num_processes=0"):
        launch(fail, 0)
    with pytest.raises(StateError, match=r"(?s)launch was called in a rank \(WORLD_SIZE=1\).*__main__"):
        run_on_ranks(1, launch_inside)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(StateError, match=r"launch was called in a rank \(WORLD_SIZE=4\)"):
        launch(fail, 2)


def test_the_name_is_the_function_and_not_the_module():
    assert trainer_kit.launch is launch and callable(launch)


def test_a_used_accelerator_is_refused_only_where_this_process_would_be_forked(monkeypatch, in_a_notebook):
    """It does not survive a fork."""

    class Module:
        is_initialized = staticmethod(lambda: True)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    with pytest.raises(UnsupportedError, match="already uses cuda, which does not survive a fork"):
        launch(lambda: 1, 2)
    assert launching._call(fail, ()) is not None, "a function of a module needs no fork"


SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from trainer_kit import MeshStrategy, launch

class Box:
    def __init__(self, value):
        self.value = value

def job(box):
    rank = MeshStrategy().build().rank
    total = box.value * (rank + 1)
    dist.all_reduce(total)
    print("from a rank", sys.argv[2])
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return Box([total.tolist(), *(os.environ[name] for name in names), torch.get_num_threads()])

def sleep(folder):
    path = folder / os.environ["RANK"]
    path.write_text(f"{os.getpid()} {os.getppid()}")
    path.rename(path.with_suffix(".pid"))
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted in order")
        raise

if __name__ == "__main__":
    for box in launch(job, 2, Box(torch.tensor([1.0, -2.0]))):
        print(box.value)
    launch(sleep, 2, Path(sys.argv[1]))
"""


def test_a_script_and_ctrl_c(tmp_path):
    """Functions and classes of `__main__`: a sum in closed form. An interrupt reaches the ranks, ends them, and then the script."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    del environment["OMP_NUM_THREADS"]
    with subprocess.Popen(
        [sys.executable, script, tmp_path, "argument"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        pids = pids_in(tmp_path, 2)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=30.0)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in "01":
        assert str([[3.0, -6.0], rank, "2", rank, "2", "127.0.0.1", threads]) in printed, errors
    assert printed.count("from a rank argument") == 2
    assert printed.count("interrupted in order") == 2 and errors.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT
    assert len(set(pids)) == 3 and all(is_gone(pid) for pid in pids)


CELLS = [
    """
import logging, os, signal, time
import torch, torch.distributed as dist
import tqdm.auto  # chooses a bar of widgets
from trainer_kit import MeshStrategy, launch

torch.set_num_threads(2)
x = torch.randn(700, 700)
(x @ x).exp().sum()  # OpenMP has its threads now
torch.nn.Linear(700, 700)(x).sum().backward()
logging.basicConfig()
""",
    """
class Box:
    def __init__(self, value):
        self.value = value

def job(factor):
    context = MeshStrategy().build()
    torch.set_num_threads(2)
    torch.nn.Linear(700, 700)(x @ x).exp().sum().backward()
    total = torch.tensor(1.0 + context.rank)
    dist.all_reduce(total)
    from tqdm.auto import tqdm
    for _ in tqdm(range(2)):
        pass
    logging.getLogger("some").warning("logged by %d", context.rank)
    print("printed by", context.rank)
    return Box(total.item() * factor)

print([box.value for box in launch(job, 2, 5)], launch(lambda: os.environ["WORLD_SIZE"], 1))
""",
    """
def fail():
    if MeshStrategy().build().rank == 1:
        raise ZeroDivisionError("on purpose")
    dist.barrier()

try:
    launch(fail, 2)
except Exception as error:
    print(type(error).__name__, error, repr(error.__cause__))
""",
    """
def sleep():
    try:
        print("sleeps", os.getpid())
        open("asleep" + os.environ["RANK"], "w").close()
        while not os.path.exists("asleep0"):
            time.sleep(0.01)
        if os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGINT)  # the button that interrupts the kernel
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted in order")

try:
    launch(sleep, 2)
except KeyboardInterrupt:
    print("interrupted here", launch(lambda: 7, 1))
""",
]


def test_a_notebook(tmp_path, monkeypatch):
    """Functions and classes of cells, after this process has used threads; what ranks print shows in the cell; Ctrl-C."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in CELLS])
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    values, error, interrupt = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells[1:]]
    assert "[15.0, 15.0] ['1']" in values
    for rank in range(2):
        assert f"printed by {rank}" in values and f"logged by {rank}" in values
    assert "2/2" in values, "a plain bar"
    assert "StateError launch: rank 1 of 2 raised ZeroDivisionError: on purpose" in error and "ZeroDivisionError('on purpose')" in error
    assert interrupt.count("interrupted in order") == 2 and "interrupted here" in interrupt and "[7]" in interrupt
    sleepers = [int(pid) for pid in re.findall(r"sleeps (\d+)", interrupt)]  # two ranks may print on one line
    assert len(sleepers) == 2 and all(is_gone(pid) for pid in sleepers)
