"""The LoRA example, shrunk: in one process with its random model, and on two ranks with the model that the first run left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = str(REPOSITORY / "examples" / "finetune_lora.py")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> tuple[float, float]:
    """The first and the last loss of the example as processes of its own."""
    command = [sys.executable, *launcher, EXAMPLE, "--device", "cpu", *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^loss ([0-9.]+) -> ([0-9.]+); transformers reads", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return float(found[1]), float(found[2])


def test_a_model_of_transformers_is_finetuned_and_read_again(tmp_path: Path) -> None:
    """Issue 5, part 6; contract 38: the example itself compares the logits. Exports are a model and adapters."""
    first, last = run(tmp_path, "--steps", "15", "--out", "one")
    assert last < first
    assert {path.name for path in (tmp_path / "one" / "model").iterdir()} >= {"model.safetensors", "config.json"}
    assert {path.name for path in (tmp_path / "one" / "adapters").iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    on_two = run(tmp_path, "--steps", "15", "--out", "two", "--model", "one/random", launcher=LAUNCHER)
    assert on_two == pytest.approx((first, last), abs=2e-3)
