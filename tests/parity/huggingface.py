"""Models of transformers and ours: the same logits and gradients on every mesh, and the same weights there and back.

    python tests/parity/huggingface.py [--only qwen3_moe]

Random tiny Llama, Qwen3 and Qwen3-MoE models that transformers saves are loaded by `source_model=`, in one process and on gloo ranks.
Logits agree to 1e-5, the gradient of each parameter to 1e-4 of its norm; the exports, in float32 and of a bfloat16 checkpoint, hold bitwise
the tensors that transformers writes, and transformers reads them, with the settings of `hf_config`, as the same model. Exit 1 if not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.parity.huggingface_models import MODELS, Model, be_quiet, faults, prepare
from tests.parity.huggingface_runs import MESHES, Differences, Job, carry_out
from trainer_kit.testing import run_on_ranks

LOGITS_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-4
TIMEOUT = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted({model.model_type for model in MODELS}))
    only = parser.parse_args().only
    torch.set_num_threads(1)
    start, models = time.monotonic(), [model for model in MODELS if only in (None, model.model_type)]
    with tempfile.TemporaryDirectory() as folder:
        complaints = print_table(models, list(MESHES), Path(folder))
    verdict = f"FAILED: {len(complaints)} faults, first {complaints[0]}" if complaints else "passed"
    print(f"\n{verdict} ({time.monotonic() - start:.0f} s)")
    return 1 if complaints else 0


def print_table(models: Sequence[Model], meshes: Sequence[str], folder: Path) -> list[str]:
    """A line for each model and mesh; what is wrong."""
    be_quiet()
    jobs = [prepare(model, folder / str(number)) for number, model in enumerate(models)]
    print(f"from transformers: absolute difference of logits (limit {LOGITS_LIMIT:g}), relative of gradients (limit {GRADIENT_LIMIT:g})")
    print(f"{'model':<34}{'mesh':<13}{'logits':>9}{'gradients':>11}  weights")
    complaints: list[str] = []
    for mesh in meshes:
        for model, job, found in zip(models, jobs, differences(jobs, mesh), strict=True):
            wrong = complaints_of(found, job.folder) + (unequal := faults(model, job.folder, mesh))
            equal = "DIFFER" if unequal else "equal"
            print(f"{model.name:<34}{mesh:<13}{found.logits:>9.1e}{found.gradient:>11.1e}  {equal}", *wrong, sep="\n    ", flush=True)
            complaints += [f"{model.name}, {mesh}: {text}" for text in wrong]
    return complaints


def differences(jobs: Sequence[Job], mesh: str) -> list[Differences]:
    """Of each model on a mesh, over all ranks together."""
    num_ranks = 1 if mesh == "one process" else 2
    found = []
    for by_rank in zip(*run_on_ranks(num_ranks, carry_out, jobs, mesh, timeout=TIMEOUT), strict=True):
        worst = max(by_rank, key=lambda each: each.gradient)
        found.append(Differences(by_rank[0].logits, worst.gradient, worst.worst, frozenset().union(*(each.names for each in by_rank))))
    return found


def complaints_of(found: Differences, folder: Path) -> list[str]:
    """What is beyond the limits, or was not compared."""
    wrong = [] if found.logits <= LOGITS_LIMIT else [f"logits differ by {found.logits:.1e}"]
    wrong += [] if found.gradient <= GRADIENT_LIMIT else [f"the gradient of {found.worst} differs by {found.gradient:.1e}"]
    missing = torch.load(folder / "reference.pt")["gradients"].keys() ^ found.names
    return wrong + ([f"only one side has the gradients of {sorted(missing)}"] if missing else [])


if __name__ == "__main__":
    sys.exit(main())
