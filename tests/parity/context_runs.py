"""Sequences that are cut over ranks: a small Llama on every mesh must run as on one process with the same microbatches.

A step has four microbatches, which the data ranks share: with and without packed documents or padding, some of whose parts have no label
that counts, and one without any. Everything by parameter, as in `pipeline_runs.py`.
The first functions are for the script, the last ones run in the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.parity.mesh_runs import TIMEOUT, MeshSpec, Microbatches, print_meshes, print_resumes
from tests.weights.memory import LiveBytes
from trainer_kit import CausalLMTask, MeshStrategy, ModelProvider, Task, Trainer
from trainer_kit.callbacks import Progress, Signals, Summary
from trainer_kit.data import DataProvider
from trainer_kit.models import DecoderConfig, DecoderProvider
from trainer_kit.testing import run_on_ranks

RING, ULYSSES = {"context_attention": "ring"}, {"context_attention": "ulysses"}
MESHES: dict[str, dict[str, Any]] = {
    "one process": {},
    "cp_shard 2, ring": {"cp_shard": 2, **RING},
    "cp_shard 2, ulysses": {"cp_shard": 2, **ULYSSES},
    "cp_replicate 2, ring": {"cp_replicate": 2, **RING},
    "cp_shard 4, ring": {"cp_shard": 4, **RING},
    "cp_shard 4, ulysses": {"cp_shard": 4, **ULYSSES},
    "cp 2x2, chosen": {"cp_shard": 2, "cp_replicate": 2},
    "cp_shard 2 x tp 2, ring": {"cp_shard": 2, "tp": 2, **RING},
    "cp_replicate 2 x tp 2, ulysses": {"cp_replicate": 2, "tp": 2, **ULYSSES},
    "cp_replicate 2 x dp_replicate 2": {"cp_replicate": 2, "dp_replicate": 2},
    "cp_shard 2 x HSDP 2x2, ring": {"cp_shard": 2, "dp_replicate": 2, "dp_shard": 2, **RING},
    "cp_shard 2 x dp_shard 2 x pp 2, ring": {"cp_shard": 2, "dp_shard": 2, "pp": 2, **RING},
    "cp_shard 2 x dp_shard 2 x pp 2, zbv": {
        "cp_shard": 2, "dp_shard": 2, "pp": 2, "pipeline": "zbv", "fsdp_sync": "pack", **ULYSSES,
    },
    "cp_shard 2 x tp 2 x pp 2, ring": {"cp_shard": 2, "tp": 2, "pp": 2, **RING},
}  # fmt: skip
RESUMES = [
    "one process", "cp_shard 2, ring", "cp_replicate 2, ring", "cp_shard 4, ulysses", "cp_shard 2 x tp 2, ring",
    "cp_shard 2 x dp_shard 2 x pp 2, ring",
]  # fmt: skip
MEMORY_LIMIT = 0.35
NUM_MICROBATCHES, SEQ_LEN, VOCAB, LONG = 4, 16, 37, 4096


@dataclass(frozen=True)
class Spec(MeshSpec):
    """One run."""

    meshes = MESHES

    def model(self) -> ModelProvider:
        return DecoderProvider(config())

    def task(self) -> Task:
        return CausalLMTask()

    def data(self) -> DataProvider:
        return Microbatches(_microbatch, NUM_MICROBATCHES)


def print_all() -> bool:
    """All of it; whether everything is as it must be."""
    meshes = [mesh for mesh in MESHES if mesh != "one process"]
    tables = [print_meshes("Llama", [Spec(mesh, double) for mesh in meshes]) for double in (True, False)]
    return all([*tables, print_resumes([Spec(mesh) for mesh in RESUMES]), print_memory()])


def print_memory() -> bool:
    """The bytes that a step on one long sequence holds at most; whether those of each rank of cp 4 are few enough."""
    (whole,) = run_on_ranks(1, peak, "one process")
    good = True
    for mesh in ("cp_shard 4, ring", "cp_shard 4, ulysses"):
        share = max(run_on_ranks(4, peak, mesh, timeout=TIMEOUT)) / whole
        print(f"\n{LONG} tokens, {mesh}: a rank holds {share:.3f} of the {whole / 1e6:.1f} MB of one process (limit {MEMORY_LIMIT})")
        good &= share <= MEMORY_LIMIT
    return good


def _microbatch(step: int, index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + index)
    tokens = torch.randint(0, VOCAB, (1 + index % 3, SEQ_LEN), generator=generator)
    labels = tokens.clone()
    labels[:, 2 + (5 * index + step) % 13 :] = -100  # with few, some parts have none
    if (step + index) % 7 == 6:
        labels[:] = -100
    batch = {"input_ids": tokens, "labels": labels}
    places = torch.arange(SEQ_LEN).expand_as(tokens)
    if index % 3 == 1:
        ends = torch.randint(1, SEQ_LEN, (len(tokens), 3), generator=generator)
        batch["document_ids"] = (places[..., None] >= ends[:, None]).sum(-1).masked_fill(places >= 14, -1)
    if index % 3 == 2:
        batch["attention_mask"] = (places < SEQ_LEN - 1 - step % 3).long()
        batch["labels"] = labels.masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def config(max_seq_len: int = SEQ_LEN) -> DecoderConfig:
    """A small Llama."""
    return DecoderConfig(
        vocab_size=VOCAB, num_layers=4, num_heads=8, num_kv_heads=4, hidden_size=32, intermediate_size=48, max_seq_len=max_seq_len,
        rope_theta=500_000.0, norm_eps=1e-5, init_std=0.1,
    )  # fmt: skip


def peak(mesh: str) -> int:
    """The job of a rank: the bytes that one step on one long sequence holds at a time."""
    tokens = torch.randint(0, VOCAB, (1, LONG), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        DecoderProvider(config(LONG)),
        CausalLMTask(),
        [tokens],
        MeshStrategy(**Spec(mesh).options()),
        callbacks=[Progress(False), Summary(False), Signals(False)],
        total_steps=1,
    )
    try:
        trainer.build()
        with LiveBytes() as live:
            trainer.fit()
        return live.peak
    finally:
        trainer.close()
