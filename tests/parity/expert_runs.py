"""Experts that are shared out over ranks: a small Qwen3-MoE on every mesh must run as on one process with the same microbatches.

A step has eight microbatches of unequal weights, which the data ranks share; some steps have six, so that a rank may have none. Routers
are balanced by a loss and by biases, or send every token to one expert. Everything by parameter, as in `pipeline_runs.py`.
The first functions are for the script, the last ones run in the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.parity.mesh_runs import MeshSpec, Microbatches, make_trainer, print_meshes, print_resumes
from tests.parity.meshes import Language
from tests.parity.pipeline_runs import Found
from trainer_kit import Callback, ModelProvider, Task, Trainer
from trainer_kit.data import DataProvider
from trainer_kit.models import DecoderConfig, DecoderProvider, MoEConfig, RouterBias
from trainer_kit.models.experts import Router
from trainer_kit.testing import run_on_ranks

MESHES: dict[str, dict[str, Any]] = {
    "one process": {},
    "dp_replicate 4, ep 2": {"dp_replicate": 4, "ep": 2},
    "dp_shard 4, ep 2": {"dp_shard": 4, "ep": 2},
    "HSDP 2x2, ep 2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "dp_shard 4, ep 4": {"dp_shard": 4, "ep": 4, "fsdp_sync": "pack"},
    "tp 2 x dp_shard 2, ep 2": {"tp": 2, "dp_shard": 2, "ep": 2},
    "tp 2 x dp_shard 2, ep 4": {"tp": 2, "dp_shard": 2, "ep": 4},
    "pp 2 x dp_shard 2, ep 2": {"pp": 2, "dp_shard": 2, "ep": 2},
    "pp 2 x dp_replicate 4, ep 2, zbv": {"pp": 2, "dp_replicate": 4, "ep": 2, "pipeline": "zbv", "fsdp_sync": "pack"},
    "dp_shard 8, ep 4": {"dp_shard": 8, "ep": 4},
}
NUM_MICROBATCHES, NUM_EXPERTS, SEQ_LEN, VOCAB = 8, 8, 8, 37


@dataclass(frozen=True)
class Spec(MeshSpec):
    """all_to_one: every token goes to one expert, all others have none."""

    all_to_one: bool = False

    meshes = MESHES

    @property
    def reference(self) -> str:
        return f"{'one' if self.all_to_one else 'balanced'}-{super().reference}"

    def config(self) -> DecoderConfig:
        """Four layers, one of them without experts."""
        moe = MoEConfig(
            num_experts=NUM_EXPERTS, num_experts_per_token=1 if self.all_to_one else 2, intermediate_size=12, dense_layers=(1,),
            normalize_weights=not self.all_to_one, aux_loss_coef=0.01, balance_bias=True,
        )  # fmt: skip
        return DecoderConfig(
            vocab_size=VOCAB, num_layers=4, num_heads=4, num_kv_heads=2, hidden_size=16, head_size=4, intermediate_size=24,
            max_seq_len=SEQ_LEN, qk_norm=True, init_std=0.1, moe=moe,
        )  # fmt: skip

    def model(self) -> ModelProvider:
        return DecoderProvider(self.config())

    def task(self) -> Task:
        return Language()

    def data(self) -> DataProvider:
        return Microbatches(_microbatch, NUM_MICROBATCHES, _num_microbatches)

    def callbacks(self) -> list[Callback]:
        return [RouterBias(0.0 if self.all_to_one else 0.001)]

    def prepare(self, trainer: Trainer) -> None:
        for router in routers(trainer).values() if self.all_to_one else ():
            router.balance_bias[NUM_EXPERTS - 2] = 10.0

    def weights(self, trainer: Trainer) -> dict[tuple[int, str], torch.Tensor]:
        biases = {(stage, f"{name}.balance_bias"): router.balance_bias.clone() for (stage, name), router in routers(trainer).items()}
        return super().weights(trainer) | biases


def print_all() -> bool:
    """All of it; whether everything is as it must be."""
    meshes = [mesh for mesh in MESHES if mesh != "one process"]
    texts = {False: "tokens to 2 of 8 experts", True: "all tokens to one expert"}
    tables = [
        print_meshes(f"Qwen3-MoE, {text}", [Spec(mesh, double, to_one) for mesh in meshes])
        for double in (True, False) for to_one, text in texts.items()
    ]  # fmt: skip
    return all([*tables, print_resumes([Spec(mesh) for mesh in MESHES]), print_memory()])


def print_memory() -> bool:
    """Elements of the parameters of experts and of their optimizer state on each rank of ep 4; whether each has a quarter."""
    (whole,) = run_on_ranks(1, held, Spec("one process"))
    parts = run_on_ranks(4, held, Spec("dp_shard 4, ep 4"))
    print(f"\nelements of experts and of their optimizer state: {whole} on one process, {parts} on the ranks of ep 4")
    return all(tuple(4 * count for count in part) == whole for part in parts)


def _num_microbatches(step: int) -> int:
    return 6 if step % 3 == 1 else NUM_MICROBATCHES


def _microbatch(step: int, index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + index)
    tokens = torch.randint(0, VOCAB, (1 + index % 3, SEQ_LEN), generator=generator)
    labels = tokens.clone()
    labels[:, 3 + (index + step) % 5 :] = -100
    return {"input_ids": tokens, "labels": labels}


def routers(trainer: Trainer) -> dict[tuple[int, str], Any]:
    """By (stage, name)."""
    stages = zip(trainer.context.stages, trainer.stages, strict=True)
    return {(index, name): part for index, stage in stages for name, part in stage.named_modules() if isinstance(part, Router)}


def held(spec: Spec) -> tuple[int, int]:
    """The job of a rank: how many elements of experts, and of their moments, it holds after a run."""
    trainer = make_trainer(spec, Found())
    try:
        trainer.fit()
        rows = [row for row in trainer.parameters if ".experts." in row.name]
        states = [trainer.optimizer.state[row.local] for row in rows]
        moments = [value for state in states for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
        return sum(row.local.numel() for row in rows), sum(value.numel() for value in moments)
    finally:
        trainer.close()
