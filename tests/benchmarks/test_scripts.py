"""Each benchmark in its smallest form: it runs, prints its table, and its last line says what its exit status says. No times are judged."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPTS = {
    "step_overhead": (
        ["--rounds", "2", "--steps", "5", "--smoke", "--large-rounds", "1", "--no-peers"],
        ["hand-written loop", "trainer_kit ", "trainer_kit, AutoDataProvider", "log_every=50", "ratio"],
    ),
    "experts": (["--pairs", "1", "--smoke"], ["by hand, ms", "tiny (16, 32, 32)", "of CPU time"]),
    "startup": (["--rounds", "1"], ["import torch", "import trainer_kit"]),
    "pipeline": (["--smoke", "--pairs", "1", "--ranks", "2", "--only", "1f1b", "zbv"], ["1f1b ", "zbv ", "by torch, ms", "ratio"]),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_prints_its_table_and_verdict(name):
    """Contract 43, for startup: neither a heavy module nor a device is among the complaints."""
    arguments, expected = SCRIPTS[name]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": path}, check=False)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    for text in expected:
        assert text in done.stdout
    verdict = done.stdout.splitlines()[-1]
    assert verdict == "passed" if done.returncode == 0 else verdict.startswith("FAILED: ")
    assert "is imported" not in verdict and "initialised" not in verdict and "process group" not in verdict


def test_the_step_clock_takes_the_measured_steps_alone(monkeypatch):
    """Five steps of 1, 2, 4, 8 and 16 seconds; two of them measured after a lead of two: (4 + 8) / 2 seconds per step."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import contenders

    now = 0.0
    monkeypatch.setattr(contenders.time, "process_time", lambda: now)
    watch = contenders.Stopwatch(lead=2, steps=2)
    for _ in range(2):
        watch.start_round()
        for seconds in (1, 2, 4, 8, 16):
            now += seconds
            watch.step_done()
        assert watch.seconds_per_step() == 6.0
    watch.start_round()
    with pytest.raises(RuntimeError, match="made 0 steps"):
        watch.seconds_per_step()


def test_contenders_train_the_same_job(monkeypatch, tmp_path):
    """The comparison is of equal work: after one pass in the same order, by hand and with trainer_kit, the weights are the same."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import contenders
    import torch

    torch.manual_seed(0)
    job = contenders.tiny_job(6)
    start = job.make_model()
    job.make_model = lambda: copy.deepcopy(start)
    batches = list(job.loader())
    job.loader = lambda: batches
    plain, ours = contenders.Plain(job), contenders.TrainerKit(job, tmp_path)
    for contender in (plain, ours):
        contender.run_round(contenders.Stopwatch(1, 4))
    for mine, theirs, first in zip(ours._trainer.model.parameters(), plain._model.parameters(), start.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7) and not torch.equal(mine, first)

