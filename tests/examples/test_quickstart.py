"""The quickstart, shrunk: interrupted, resumed, finished, and started once more, each time as the README says it is started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

REPOSITORY = Path(__file__).parents[2]


def start(folder: Path, steps: int) -> subprocess.Popen[str]:
    """The example as a process of its own, in another folder than the repository."""
    command = [sys.executable, REPOSITORY / "examples" / "quickstart.py", "--steps", str(steps), "--out", folder / "run", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], *, code: int = 0) -> str:
    """Its output, once it has ended with that code."""
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == code, output
    return output


def recorded_steps(folder: Path, name: str) -> list[int]:
    lines = (folder / "run" / "log.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if name in record]


def checkpoint_steps(folder: Path) -> list[int]:
    return sorted(int(entry.name.removeprefix("step-")) for entry in (folder / "run" / "checkpoints").glob("step-*"))


def interrupted(folder: Path, steps: int) -> str:
    """The output of a run that got a Ctrl-C after its first record."""
    process, log = start(folder, steps), folder / "run" / "log.jsonl"
    deadline = time.monotonic() + 240
    while process.poll() is None and not (log.exists() and log.read_text()):
        if time.monotonic() > deadline:
            pytest.fail(f"no record after 240 s: {finish(process, code=-signal.SIGKILL)}")
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    return finish(process, code=1)


def test_a_run_is_interrupted_resumed_finished_and_started_again(tmp_path: Path) -> None:
    """Contracts 30b and 32: the log has each step once, and a finished run makes no step and no new file."""
    assert "start it again to go on" in interrupted(tmp_path, steps=5000)
    (stopped_at,) = checkpoint_steps(tmp_path)
    assert stopped_at >= 10

    steps = stopped_at + 10
    assert "model.safetensors writes:\n\nThe " in finish(start(tmp_path, steps))
    assert checkpoint_steps(tmp_path) == [stopped_at, steps]
    trained = recorded_steps(tmp_path, "train/loss")
    assert trained == [*range(10, steps, 10), steps], "every recorded step once, across the interruption"
    with safe_open(tmp_path / "run" / "model" / "model.safetensors", framework="pt") as file:
        assert "embedding.weight" in file.keys()  # noqa: SIM118

    again = finish(start(tmp_path, 5))  # fewer than are finished
    assert f"{steps} of 5 steps are finished" in again
    assert "model.safetensors writes:\n\nThe " in again
    assert checkpoint_steps(tmp_path) == [stopped_at, steps]
    assert recorded_steps(tmp_path, "train/loss") == trained
