"""What a rank does for `huggingface.py`: load a model of transformers, compare logits and gradients with those of transformers, export.

Nothing here imports transformers, so that ranks start soon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer_kit import AutoDataProvider, Callback, CausalLMTask, MeshStrategy, Trainer
from trainer_kit.callbacks import Progress, Signals, Summary
from trainer_kit.models import provider_from_hf
from trainer_kit.torch_private import whole_tensor

MESHES: dict[str, dict[str, int]] = {
    "one process": {},
    "dp_shard 2": {"dp_replicate": 1, "dp_shard": 2},
    "tp 2": {"dp_replicate": 1, "tp": 2},
    "pp 2": {"dp_replicate": 1, "pp": 2},
}
NUM_SAMPLES, SEQ_LEN = 4, 16


@dataclass(frozen=True)
class Job:
    """A model in `folder`: its weights in `source` and, in bfloat16, in `source-bf16`; what transformers computes in `reference.pt`."""

    folder: Path
    export_layout: str | None


@dataclass(frozen=True)
class Differences:
    """The largest absolute difference of logits; the largest relative one of a gradient, by norm, and its name; the names of all."""

    logits: float
    gradient: float
    worst: str
    names: frozenset[str]


class Numbered(CausalLMTask):
    """The second token of a sample is its number."""

    def process_outputs(self, pipeline_results: Any, state: Any) -> tuple[list[int], torch.Tensor]:
        return state.targets[:, 0].tolist(), super().process_outputs(pipeline_results, state)


class SeeGradients(Callback):
    """Keeps the whole gradients of the step by name. A collective."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.Tensor] = {}

    def on_gradients_ready(self, event: Any) -> None:
        for row in event.trainer.parameters.trainable():
            self.seen[row.name] = whole_tensor(row.parameter.grad.detach()).clone()


def make_trainer(job: Job, mesh: str, source: str, callbacks: Sequence[Callback] = ()) -> Trainer:
    """For one step that changes nothing."""
    tokens = torch.load(f"{job.folder}/reference.pt")["tokens"]
    path = f"{job.folder}/{source}"
    return Trainer(
        provider_from_hf(path, expert_layout=job.export_layout),
        Numbered(),
        AutoDataProvider(tokens, global_batch_size=NUM_SAMPLES, microbatch_size=NUM_SAMPLES // 2),
        MeshStrategy(device="cpu", **MESHES[mesh]),
        optimizer=partial(torch.optim.SGD, lr=0.0),
        callbacks=[Progress(False), Summary(False), Signals(False), *callbacks],
        source_model=path,
        total_steps=1,
    )


def carry_out(jobs: Sequence[Job], mesh: str) -> list[Differences]:
    """The job of a rank: every model, whose exports go into `{mesh}` and `{mesh}-bf16`."""
    return [compare(job, mesh) for job in jobs]


def compare(job: Job, mesh: str) -> Differences:
    """One model. Of the logits only rank 0 knows."""
    reference = torch.load(f"{job.folder}/reference.pt")
    seeing = SeeGradients()
    trainer = make_trainer(job, mesh, "source", [seeing])
    try:
        logits = [torch.zeros(0)] * NUM_SAMPLES
        for numbers, rows in trainer.predict(AutoDataProvider(reference["tokens"], global_batch_size=NUM_SAMPLES)):
            for number, row in zip(numbers, rows, strict=True):
                logits[number] = row
        trainer.fit()
        trainer.export(f"{job.folder}/{mesh}")
        of_logits = (torch.stack(logits) - reference["logits"]).abs().max().item() if trainer.context.is_main else 0.0
    finally:
        trainer.close()
    trainer = make_trainer(job, mesh, "source-bf16")
    try:
        trainer.export(f"{job.folder}/{mesh}-bf16", dtype=torch.bfloat16)
    finally:
        trainer.close()
    distances = {name: relative(gradient, reference["gradients"][name]) for name, gradient in seeing.seen.items()}
    worst = max(distances, key=distances.__getitem__)
    return Differences(of_logits, distances[worst], worst, frozenset(distances))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """By norm; anything is far from a gradient of zeros."""
    distance = (found - expected).norm().item()
    return distance / expected.norm().item() if distance else 0.0
