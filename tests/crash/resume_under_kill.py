"""Kills a training process at any moment and restarts it: the end must be, bit by bit, that of the uninterrupted run.

    python tests/crash/resume_under_kill.py --trials 50

Two kinds of death, for synchronous and asynchronous saves. Every operation: the process dies at the k-th file operation on the
checkpoint folder, for every k up to the end of the first saves with retention (half of the bytes of a write are there); then it is
started again and left alone. Random moments: it dies, one to three times, after a random time or at a random file operation, of a
restarted run too. Compared are exported weights, the last checkpoint, the log, and the samples of every step (`comparison.py`).

Children are forked from a process that has imported torch and never runs it, since the import is what takes the time of a start.
Exit status 1 if a run ended otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

# What the first optimizer and the first save import: here, once, for all children.
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.tensor
from comparison import MANIFEST, differences
from deaths import DeathByOperation
from job import NUM_STEPS, SAVE_EVERY, train

NUM_SAVES = 4  # the fourth save is the second one after which an old checkpoint goes
TIMEOUT = 120.0


@dataclass
class Trial:
    """One run with its deaths: seconds after the start (a float) or the number of a file operation (an int)."""

    kind: str
    asynchronous: bool
    deaths: list[float | int]
    num_kills: int = 0
    num_inside_saves: int = 0
    faults: list[str] = field(default_factory=list)


def start_child(folder: Path, asynchronous: bool, at_operation: int = 0, count_to: Path | None = None) -> int:
    """Fork a child that trains in `folder`; returns its process id. count_to: a file that gets the number of operations after each save."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        warnings.simplefilter("ignore")
        death = DeathByOperation(folder / "checkpoints", at_operation)
        death.install()
        train(folder, asynchronous=asynchronous)
        if count_to is not None:
            count_to.write_text(str(death.count))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait_for(pid: int, kill_after: float | None = None) -> int:
    """The wait status of the child; it is killed after so many seconds, and if it hangs."""
    begin = time.monotonic()
    limit = TIMEOUT if kill_after is None else kill_after
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() - begin > limit:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1]
        time.sleep(0.0005)


def run_trial(trial: Trial, folder: Path, reference: Path) -> None:
    """Kill, restart and compare; what is wrong goes to `trial.faults`."""
    for death in trial.deaths:
        by_operation = isinstance(death, int)
        pid = start_child(folder, trial.asynchronous, death if by_operation else 0)
        status = wait_for(pid, None if by_operation else death)
        if status == 0:
            break
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            trial.faults.append(f"a restarted run failed:\n{last_lines(folder)}")
            return
        trial.num_kills += 1
        trial.num_inside_saves += any(not (path / MANIFEST).exists() for path in folder.glob("checkpoints/step-*"))
    status = wait_for(start_child(folder, trial.asynchronous))
    trial.faults += differences(folder, reference) if status == 0 else [f"the last run ended with status {status}:\n{last_lines(folder)}"]


def last_lines(folder: Path) -> str:
    """The end of what the children printed."""
    return "\n".join((folder / "output.txt").read_text().splitlines()[-12:])


def run_reference(folder: Path, asynchronous: bool) -> tuple[float, int]:
    """The uninterrupted run: seconds and number of file operations. Another run in its folder must do nothing."""
    folder.mkdir()
    begin = time.monotonic()
    status = wait_for(start_child(folder, asynchronous, count_to=folder / "count.txt"))
    seconds = time.monotonic() - begin
    if status:
        raise RuntimeError(f"the uninterrupted run failed:\n{last_lines(folder)}")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("checkpoints/**/*")}
    status = wait_for(start_child(folder, asynchronous))
    if status or before != {path: path.stat().st_mtime_ns for path in folder.glob("checkpoints/**/*")}:
        raise RuntimeError(f"starting the finished run again changed its checkpoints:\n{last_lines(folder)}")
    return seconds, int((folder / "count.txt").read_text())


def make_trials(
    num_random: int, every_kth: int, asynchronous: bool, seconds: float, num_operations: int, rng: random.Random
) -> list[Trial]:
    """The deaths of one kind of saving; half of `num_random`."""
    num_saves = -(-NUM_STEPS // SAVE_EVERY)
    last = num_operations * NUM_SAVES // num_saves
    trials = [Trial("every operation", asynchronous, [k]) for k in range(1, last + 1, every_kth)]
    for _ in range(num_random // 2):
        by_time = [rng.uniform(0.05, 1.0) * seconds for _ in range(rng.randint(1, 3))]
        deaths = [rng.randint(1, num_operations // 2) if rng.random() < 0.25 else moment for moment in by_time]
        trials.append(Trial("random moments", asynchronous, deaths))
    return trials


def in_processes(trials: list[Trial], work: Callable[[Trial, int], None], num_processes: int, folder: Path) -> list[Trial]:
    """`work(trial, index)` for all trials in forked processes; gives them back with their outcomes."""
    pids = []
    for number in range(num_processes):
        pid = os.fork()
        if not pid:
            mine = [(index, trial) for index, trial in enumerate(trials) if index % num_processes == number]
            for index, trial in mine:
                try:
                    work(trial, index)
                except Exception:
                    trial.faults.append(traceback.format_exc())
            (folder / f"outcome-{number}.json").write_text(json.dumps([asdict(trial) for _, trial in mine]))
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    return [Trial(**item) for number in range(num_processes) for item in json.loads((folder / f"outcome-{number}.json").read_text())]


def report(trials: list[Trial]) -> bool:
    """Print the table and the verdict; whether all is well."""
    print(f"{'saves':14}{'death at':18}{'runs':>6}{'kills':>7}{'inside a save':>15}{'wrong':>7}")
    for asynchronous in (False, True):
        for kind in ("every operation", "random moments"):
            rows = [trial for trial in trials if (trial.asynchronous, trial.kind) == (asynchronous, kind)]
            saves = "asynchronous" if asynchronous else "synchronous"
            kills, inside = sum(trial.num_kills for trial in rows), sum(trial.num_inside_saves for trial in rows)
            print(f"{saves:14}{kind:18}{len(rows):6}{kills:7}{inside:15}{sum(bool(trial.faults) for trial in rows):7}")
    wrong_trials = [trial for trial in trials if trial.faults]
    for trial in wrong_trials[:5]:
        print(f"\n{'asynchronous' if trial.asynchronous else 'synchronous'}, deaths {trial.deaths}:\n  " + "\n  ".join(trial.faults[:6]))
    print(f"FAILED: {len(wrong_trials)} of {len(trials)} runs are not the uninterrupted one" if wrong_trials
          else f"passed: {len(trials)} killed runs are bitwise the uninterrupted one")  # fmt: skip
    return not wrong_trials


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50, help="runs with random deaths")
    parser.add_argument("--every-kth", type=int, default=1, help="take every k-th file operation only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        references = {asynchronous: root / f"reference-{asynchronous}" for asynchronous in (False, True)}
        trials: list[Trial] = []
        for asynchronous, reference in references.items():
            seconds, num_operations = run_reference(reference, asynchronous)
            trials += make_trials(options.trials, options.every_kth, asynchronous, seconds, num_operations, rng)

        def work(trial: Trial, index: int) -> None:
            folder = root / f"trial-{index}"
            folder.mkdir()
            run_trial(trial, folder, references[False])  # how a checkpoint is saved changes nothing of the run
            shutil.rmtree(folder)

        return 0 if report(in_processes(trials, work, options.processes, root)) else 1


if __name__ == "__main__":
    sys.exit(main())
