"""The run that `resume_under_kill.py` kills: small, with everything random that a run can have, and a trace of what it saw.

Not here: dying (`deaths.py`) and comparing (`comparison.py`). It is called in a forked child; a folder that holds a killed run of it
is gone on with, as a restarted script would.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from trainer_kit import AutoDataProvider, Callback, ForwardInputs, Task, Trainer
from trainer_kit.callbacks import EMA, Checkpoint, GradientClipping, JSONLines, Progress, Signals, Summary
from trainer_kit.events import StepStart
from trainer_kit.metrics import Mean
from trainer_kit.optim import AdamW, Piecewise

NUM_STEPS = 20
NUM_SAMPLES = 70  # six packs of 12 in an epoch, the last one short: the run ends in its fourth epoch
SAVE_EVERY = 3
KEEP_LAST = 2


class NoisySamples(Dataset[Any]):
    """Samples by number, with noise from torch's and from python's stream at each reading."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(NUM_SAMPLES, 8, generator=generator)
        self._y = torch.randn(NUM_SAMPLES, 1, generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "x": self._x[index] + 0.1 * torch.randn(8) + 0.1 * random.random(), "y": self._y[index]}


class Regression(Task):
    """Mean squared error, and a metric of the outputs."""

    def build_forward_inputs(self, batch: dict[str, torch.Tensor]) -> ForwardInputs:
        return ForwardInputs(inputs=batch["x"], state=batch["y"], weight=len(batch["y"]))

    def compute_loss(self, pipeline_results: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(pipeline_results, state)

    def metrics(self) -> dict[str, Any]:
        return {"output": Mean()}

    def update_metrics(self, metrics: dict[str, Any], pipeline_results: torch.Tensor, state: torch.Tensor) -> None:
        metrics["output"].update(pipeline_results)


class SampleTrace(Callback):
    """Appends the sample ids of every step to a file, and puts a number made of them into the record of the step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_start(self, event: StepStart) -> None:
        ids = [int(i) for microbatch in event.microbatches for i in microbatch["id"]]
        with self._path.open("a") as file:
            file.write(f"{event.step} {ids}\n")
        number = 0
        for i in ids:
            number = (number * 31 + i) % 1_000_003
        event.trainer.log("samples", number)


def make_model() -> nn.Module:
    """Dropout draws from the run's stream in every forward."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


def train(folder: Path, *, asynchronous: bool) -> None:
    """Begin the run in this folder or go on with it; then export."""
    trainer = Trainer(
        make_model,
        Regression(),
        AutoDataProvider(NoisySamples(), global_batch_size=12, microbatch_size=4, shuffle=True),
        optimizer=AdamW(lr=1e-2, weight_decay=0.1),
        lr_scheduler=Piecewise().linear(1.0, steps=4).cosine(0.1, rest=True),
        callbacks=[
            Progress(False),
            Summary(False),
            Signals(False),
            SampleTrace(folder / "samples.txt"),
            GradientClipping(0.5),
            EMA(0.9),
            Checkpoint(folder / "checkpoints", every=SAVE_EVERY, keep_last=KEEP_LAST, asynchronous=asynchronous),
            JSONLines(folder / "log.jsonl"),
        ],
        total_steps=NUM_STEPS,
        log_every=1,
    )
    trainer.fit()
    trainer.export(folder / "model")
    trainer.close()
