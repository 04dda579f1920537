"""The run that the parity scripts repeat on every mesh: a small transformer with an uneven vocabulary, tied embeddings and a frozen part.

A pack is 36 samples in 3 microbatches per data rank, with different numbers of tokens that count; the last pack of an epoch is short.
Everything here runs in a rank (`train` is the job) and gives plain values back.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_kit import AutoDataProvider, Callback, CausalLMTask, MeshStrategy, Trainer
from trainer_kit.callbacks import Checkpoint, Progress, Signals, Summary
from trainer_kit.models import Decoder, DecoderConfig
from trainer_kit.optim import AdamW, Muon, Piecewise

NUM_SAMPLES, PACK, SEQ_LEN, VOCAB = 36 * 6 + 25, 36, 8, 101
STEPS = 20
MESHES: dict[str, dict[str, int]] = {
    "one process": {},
    "dp_replicate 2": {"dp_replicate": 2},
    "dp_shard 2": {"dp_shard": 2},
    "dp_shard 3": {"dp_shard": 3},
    "dp_shard 4": {"dp_shard": 4},
    "HSDP 2x2": {"dp_replicate": 2, "dp_shard": 2},
    "tp 2": {"tp": 2},
    "tp 2 x dp_shard 2": {"tp": 2, "dp_shard": 2},
    "tp 2 x HSDP 2x2": {"tp": 2, "dp_replicate": 2, "dp_shard": 2},
}


def num_ranks(mesh: str) -> int:
    """Ranks of a mesh."""
    product = 1
    for degree in MESHES[mesh].values():
        product *= degree
    return product


@dataclass
class Outcome:
    """What one rank saw of a run."""

    losses: list[float]
    norms: list[float]
    ids: list[list[int]]  # of this rank's own samples, by step
    data_rank: int
    tensor_rank: int
    replicas: str  # digest of the weights that tensor peers hold alike, and of the random state
    files: dict[str, str] = field(default_factory=dict)  # digest of each exported file, on rank 0


class Samples(torch.utils.data.Dataset):
    """Token sequences with their number; some labels do not count."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCAB, (NUM_SAMPLES, SEQ_LEN), generator=generator)
        self.counted = torch.randint(1, SEQ_LEN, (NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = self.tokens[index].clone()
        labels[self.counted[index] :] = -100
        return {"input_ids": self.tokens[index], "labels": labels, "id": index}


class Language(CausalLMTask):
    """Leaves the number of a sample out of the model's inputs."""

    def build_forward_inputs(self, batch: Any) -> Any:
        return super().build_forward_inputs({name: value for name, value in batch.items() if name != "id"})


class Seen(Callback):
    """The samples of each step on this rank."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []

    def on_step_start(self, event: Any) -> None:
        self.ids.append([int(number) for microbatch in event.microbatches for number in microbatch["id"]])


def build_model(dropout: float) -> nn.Module:
    """Four heads that share two heads of keys and values; one matrix and one norm are frozen."""
    config = DecoderConfig(
        vocab_size=VOCAB, num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=32, intermediate_size=64, max_seq_len=SEQ_LEN,
        dropout=dropout, tie_embeddings=True,
    )  # fmt: skip
    model = Decoder(config)
    model.layers["0"].feed_forward.up_proj.weight.requires_grad_(False)
    model.layers["1"].attention_norm.weight.requires_grad_(False)
    return model


class StopAt(Callback):
    """Ends the run in order after a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, event: Any) -> None:
        if event.trainer.step == self.step:
            event.trainer.stop("half of the run")


@dataclass(frozen=True)
class Spec:
    """One run: its mesh and what differs from the default."""

    mesh: str
    double: bool = False
    optimizer: str = "adamw"
    dropout: float = 0.0
    fsdp_sync: str = "microbatch"
    checkpoints: str | None = None  # a folder: save at step 10 and resume from it
    stop_at: int | None = None
    steps: int = STEPS


def make_trainer(spec: Spec, callbacks: list[Callback]) -> Trainer:
    """The trainer of this rank."""
    degrees = MESHES[spec.mesh]
    sync = {"fsdp_sync": spec.fsdp_sync} if degrees.get("dp_shard", 1) > 1 else {}
    ranks = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    saving = [] if spec.checkpoints is None else [Checkpoint(spec.checkpoints, every=10, asynchronous=False)]
    return Trainer(
        lambda: build_model(spec.dropout),
        Language(),
        AutoDataProvider(Samples(), global_batch_size=PACK, microbatch_size=PACK // (3 * ranks), shuffle=True),
        MeshStrategy(**{"dp_replicate": 1, "device": "cpu", **degrees, **sync}),
        optimizer=AdamW(lr=1e-3) if spec.optimizer == "adamw" else Muon(lr=1e-3, rest=AdamW(lr=1e-3)),
        lr_scheduler=Piecewise().linear(1.0, steps=4).cosine(0.1, rest=True),
        callbacks=[Progress(False), Summary(False), Signals(False), *saving, *callbacks],
        total_steps=spec.steps,
        log_every=1,
        seed=3,
    )


def train(spec: Spec, folder: str) -> Outcome:
    """The job of a rank: one run; exports before and after it into `folder`."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if spec.double else torch.float32)
    try:
        seen = Seen()
        trainer = make_trainer(spec, [seen, StopAt(spec.stop_at)])
        trainer.export(f"{folder}/initial")
        trainer.fit()
        trainer.export(f"{folder}/final")
        files = digests(folder) if trainer.context.is_main else {}
        losses, norms = ([value for _, value in trainer.history.values(name)] for name in ("train/loss", "optim/grad_norm"))
        context = trainer.context
        outcome = Outcome(losses, norms, seen.ids, context.data_rank, context.tensor_rank, replicas(trainer), files)
        trainer.close()
        return outcome
    finally:
        torch.set_default_dtype(default)


def replicas(trainer: Trainer) -> str:
    """A digest of what tensor peers must hold bitwise alike: the weights that are not cut over them."""
    digest = hashlib.sha256()
    for row in trainer.parameters:
        if "tp" not in row.layout.sharded_over:
            digest.update(row.local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def digests(folder: str) -> dict[str, str]:
    """File -> sha256, of the exports below a folder."""
    paths = sorted(Path(folder).rglob("*.safetensors"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
