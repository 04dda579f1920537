"""The run of `test_two_hosts.py`, as a user would write it: nothing in it knows of restarts.

Started by torchrun it is a script; `train` is called by the test too, for the run that nothing disturbs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_kit import AutoDataProvider, Callback, MeshStrategy, SupervisedTask, Trainer
from trainer_kit.callbacks import Checkpoint, Progress, Signals, Summary
from trainer_kit.optim import AdamW

NUM_STEPS, SAVE_EVERY, DIES_IN = 12, 3, 7  # the rank dies in the step of index 7: 7 steps are finished, 6 are saved


class Death(Callback):
    """Kills rank 1 in the middle of a step, once: the marker stays in the folder."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def on_gradients_ready(self, event: Any) -> None:
        if event.step == DIES_IN and event.trainer.context.rank == 1 and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Starts(Callback):
    """Writes down each start of a fit: from which step, on which node of how many ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_fit_start(self, event: Any) -> None:
        context = event.trainer.context
        with (self._folder / f"starts-{context.rank}.jsonl").open("a") as file:
            file.write(json.dumps([event.trainer.step, context.node, context.world_size]) + "\n")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Tanh(), nn.Linear(9, 1))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.randn(50, 6, generator=torch.Generator().manual_seed(3))
    return [(row, row.sum(0, keepdim=True)) for row in inputs]


def train(folder: Path, degrees: dict[str, int], *, dies: bool) -> None:
    """Begin the run in this folder or go on with it; then export."""
    trainer = Trainer(
        model,
        SupervisedTask(nn.functional.mse_loss),
        AutoDataProvider(data(), global_batch_size=8, microbatch_size=2, shuffle=True),
        MeshStrategy(device="cpu", **degrees),
        optimizer=AdamW(lr=0.01),
        callbacks=[
            Progress(False),
            Summary(False),
            Signals(False),
            Checkpoint(folder / "checkpoints", every=SAVE_EVERY, asynchronous=False),
            Starts(folder),
            *([Death(folder / "died")] if dies else []),
        ],
        total_steps=NUM_STEPS,
    )
    trainer.fit()
    trainer.export(folder / "model")
    trainer.close()


if __name__ == "__main__":
    train(Path(sys.argv[1]), json.loads(sys.argv[2]), dies=True)
