"""`launch`: ranks from a module, a script and a notebook; errors, Ctrl-C, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

import trainer_kit
from trainer_kit import MeshStrategy, launch
from trainer_kit.exceptions import ConfigurationError, StateError, UnsupportedError
from trainer_kit.ranks import collecting
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


def place(data: torch.Tensor, folder: Path) -> tuple[torch.Tensor, list[str], int]:
    write_down(folder)
    context = MeshStrategy().build()
    total = data * (context.rank + 1)
    dist.all_reduce(total)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return total, [os.environ[name] for name in names], torch.get_num_threads()


def test_results_come_by_rank(tmp_path, monkeypatch):
    """The sum in closed form; the cores are shared out; nothing is left."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    data = torch.tensor([1.0, -2.0])
    for rank, (total, variables, num_threads) in enumerate(launch(place, 2, data, tmp_path)):
        torch.testing.assert_close(total, data * 3)
        assert variables == [str(rank), "2", str(rank), "2", "127.0.0.1"]
        assert num_threads == max(1, len(os.sched_getaffinity(0)) // 2)
    pids = pids_in(tmp_path, 2)
    assert len(set(pids)) == 3 and all(is_gone(pid) for pid in pids)


def fail(folder: Path) -> None:
    write_down(folder)
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("on purpose")
    time.sleep(60)


def test_the_first_error_ends_all_ranks(tmp_path, monkeypatch):
    """Contract 41, B135."""
    monkeypatch.setattr(collecting, "GRACE_AFTER_ERROR", 1.0)
    with pytest.raises(StateError, match=r"(?s)rank 1 of 2 raised ZeroDivisionError: on purpose.*in fail.*rank 0 had not") as caught:
        launch(fail, 2, tmp_path)
    assert type(caught.value.__cause__) is ZeroDivisionError
    assert all(is_gone(pid) for pid in pids_in(tmp_path, 2))


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


def test_a_used_accelerator_is_refused_only_where_this_process_would_be_forked(monkeypatch):
    """It does not survive a fork."""
    from trainer_kit.ranks import launching

    class Module:
        is_initialized = staticmethod(lambda: True)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    monkeypatch.setattr(sys.modules["builtins"], "get_ipython", None, raising=False)
    with pytest.raises(UnsupportedError, match="already uses cuda, which does not survive a fork"):
        launch(lambda: 1, 2)
    assert launching._call(fail, ()) is not None, "a function of a module needs no fork"


SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from tests.test_launch import write_down
from trainer_kit import MeshStrategy, launch

class Box:
    def __init__(self, value):
        self.value = value

def job(box):
    total = torch.tensor(float(box.value))
    MeshStrategy().build()
    dist.all_reduce(total)
    print("from a rank", sys.argv[2])
    return Box(total.item())

def sleep(folder):
    write_down(folder)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted in order")
        raise

if __name__ == "__main__":
    print([box.value for box in launch(job, 2, Box(3))], flush=True)
    launch(sleep, 2, Path(sys.argv[1]))
"""


def test_a_script_and_ctrl_c(tmp_path):
    """Functions and classes of `__main__`; an interrupt reaches the ranks, ends them, and then the script."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, tmp_path, "argument"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True) as process:
        pids = pids_in(tmp_path, 2)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=30.0)
    assert printed.count("from a rank argument") == 2 and "[6.0, 6.0]" in printed
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
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("on purpose")
    MeshStrategy().build()

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
    sleepers = [int(line.split()[1]) for line in interrupt.splitlines() if line.startswith("sleeps")]
    assert len(sleepers) == 2 and all(is_gone(pid) for pid in sleepers)
