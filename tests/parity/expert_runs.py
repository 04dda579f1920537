"""Experts that are shared out over ranks: a small Qwen3-MoE on every mesh must run as on one process with the same microbatches.

A step has eight microbatches of unequal weights, which the data ranks share; some steps have six, so that a rank may have none. Routers
are balanced by a loss and by biases, or send every token to one expert. Everything by parameter, as in `pipeline_runs.py`.
The first functions are for the script, the last ones run in the ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.parity.meshes import Language
from tests.parity.pipeline_runs import Differences, Found, SeeGradients, compare, load, own_file, whole_weights
from trainer_kit import MeshStrategy, Trainer
from trainer_kit.callbacks import Checkpoint, Progress, Signals, Summary
from trainer_kit.data import DataProvider, Pack
from trainer_kit.models import DecoderConfig, DecoderProvider, MoEConfig, RouterBias
from trainer_kit.models.experts import Router
from trainer_kit.optim import AdamW, Piecewise
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
LIMITS = {False: 1e-5, True: 1e-9}
STEPS, HALF, NUM_MICROBATCHES = 10, 5, 8
NUM_EXPERTS, SEQ_LEN, VOCAB = 8, 8, 37
TIMEOUT = 900.0


@dataclass(frozen=True)
class Spec:
    """One run. all_to_one: every token goes to one expert, all others have none."""

    mesh: str
    double: bool = True
    all_to_one: bool = False

    def __str__(self) -> str:
        return self.mesh

    @property
    def num_ranks(self) -> int:
        degrees = {name: value for name, value in MESHES[self.mesh].items() if isinstance(value, int) and name != "ep"}
        return torch.tensor([1, *degrees.values()]).prod().item()  # type: ignore[return-value]

    @property
    def reference(self) -> str:
        """The file of the run of one process."""
        return f"{'fp64' if self.double else 'fp32'}-{'one' if self.all_to_one else 'balanced'}.pt"

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


def print_all() -> bool:
    """All of it; whether everything is as it must be."""
    meshes = [mesh for mesh in MESHES if mesh != "one process"]
    return all([print_parity(meshes), print_resumes(list(MESHES)), print_memory()])


def print_parity(meshes: Sequence[str]) -> bool:
    """The table of all meshes; whether every line is within the limits."""
    good = True
    for double in (True, False):
        for all_to_one in (False, True):
            what = "all tokens to one expert" if all_to_one else "tokens to 2 of 8 experts"
            dtype, limit = "fp64" if double else "fp32", LIMITS[double]
            print(f"\nQwen3-MoE, {dtype}, {what}, {STEPS} steps: relative difference from one process (limit {limit:g})")
            print(f"{'mesh':<34}{'loss':>9}{'norm':>9}{'gradients':>11}{'weights':>9}  initial")
            for spec, by_rank in measure([Spec(mesh, double, all_to_one) for mesh in meshes]):
                good &= _print_line(spec, by_rank)
    return good


def _print_line(spec: Spec, by_rank: Sequence[Differences]) -> bool:
    names = ("losses", "norms", "gradients", "weights")
    values = [max(getattr(each, name) for each in by_rank) for name in names]
    fine = is_good(spec, by_rank)
    cells = "".join(f"{value:>{width}.1e}" for value, width in zip(values, (9, 9, 11, 9), strict=True))
    equal = "equal" if all(each.initial_is_equal for each in by_rank) else "DIFFER"
    print(f"{spec.mesh:<34}{cells}  {equal}{'' if fine else f'   FAILED: {max(each.worst for each in by_rank)}'}", flush=True)
    return fine


def is_good(spec: Spec, by_rank: Sequence[Differences]) -> bool:
    """Whether a run is that of one process on every rank."""
    largest = max(max(each.losses, each.norms, each.gradients, each.weights) for each in by_rank)
    complete = not set.intersection(*(each.missing for each in by_rank)) and all(each.logged == by_rank[0].logged for each in by_rank)
    return largest <= LIMITS[spec.double] and complete and all(each.initial_is_equal for each in by_rank)


def measure(specs: Sequence[Spec]) -> Iterator[tuple[Spec, list[Differences]]]:
    """The differences of each run from that of one process, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        for spec in specs:
            if not Path(folder, spec.reference).exists():
                run_on_ranks(1, refer, Spec("one process", spec.double, spec.all_to_one), folder, timeout=TIMEOUT)
            yield spec, run_on_ranks(spec.num_ranks, compare_to_one, spec, folder, timeout=TIMEOUT)


def print_resumes(meshes: Sequence[str]) -> bool:
    """Runs in fp64 that were saved after five steps on one mesh and go on on another; whether all of them are as the whole run."""
    limit, good, specs = LIMITS[True], True, [Spec(mesh) for mesh in meshes]
    print(f"\n{STEPS} steps in fp64, saved after {HALF}: largest relative difference from the whole run (limit {limit:g}; 'same': bitwise)")
    print("resumed on, saved on".ljust(38) + "".join(f"{f'({number})':>9}" for number in range(len(specs))))
    with tempfile.TemporaryDirectory() as folder:
        for spec in specs:
            run_on_ranks(spec.num_ranks, save_half, spec, folder, timeout=TIMEOUT)
        for number, spec in enumerate(specs):
            by_rank = run_on_ranks(spec.num_ranks, resume_all, spec, specs, folder, timeout=TIMEOUT)
            found = [max(max(each.losses, each.norms, each.weights) for each in other) for other in zip(*by_rank, strict=True)]
            fine = [value <= (0 if other == number else limit) for other, value in enumerate(found)]
            cells = [("same" if value == 0 else f"{value:.1e}") + "!" * (not ok) for value, ok in zip(found, fine, strict=True)]
            print(f"{f'({number}) {spec}':<38}" + "".join(f"{cell:>9}" for cell in cells), flush=True)
            good &= all(fine)
    return good


def print_memory() -> bool:
    """Elements of the parameters of experts and of their optimizer state on each rank of ep 4; whether each has a quarter."""
    (whole,) = run_on_ranks(1, held, Spec("one process"))
    parts = run_on_ranks(4, held, Spec("dp_shard 4, ep 4"))
    print(f"\nelements of experts and of their optimizer state: {whole} on one process, {parts} on the ranks of ep 4")
    return all(tuple(4 * count for count in part) == whole for part in parts)


class Microbatches(DataProvider):
    """The same microbatches in each step on any number of data ranks."""

    draws_random, knows_all_ranks, global_position = False, True, True

    def setup(self, context: Any, seed: int) -> None:
        self._rank, self._num_ranks = context.data_rank, context.num_data_ranks

    def packs(self, position: Any) -> Iterator[Pack]:
        share = NUM_MICROBATCHES // self._num_ranks
        for step in range((position or {}).get("step", 0), STEPS):
            number = 6 if step % 3 == 1 else NUM_MICROBATCHES
            own = [_microbatch(step, index) for index in range(self._rank * share, (self._rank + 1) * share) if index < number]
            filler = None if own else _microbatch(step, 0)
            yield Pack(own, epoch=0, position={"step": step + 1}, num_on_all=min(share, number), filler=filler)

    def num_packs(self) -> int | None:
        return STEPS


def _microbatch(step: int, index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + index)
    tokens = torch.randint(0, VOCAB, (1 + index % 3, SEQ_LEN), generator=generator)
    labels = tokens.clone()
    labels[:, 3 + (index + step) % 5 :] = -100
    return {"input_ids": tokens, "labels": labels}


def make_trainer(spec: Spec, found: Found, checkpoints: str | None = None) -> Trainer:
    """The trainer of this rank."""
    saving = [] if checkpoints is None else [Checkpoint(checkpoints, every=HALF, asynchronous=False)]
    return Trainer(
        DecoderProvider(spec.config()),
        Language(),
        Microbatches(),
        MeshStrategy(**{"device": "cpu", "dp_replicate": 1, **MESHES[spec.mesh]}),
        # Of an element whose gradient is only rounding, the default eps makes a whole step.
        optimizer=AdamW(lr=1e-3, eps=1e-6),
        lr_scheduler=Piecewise().linear(1.0, steps=4).cosine(0.1, rest=True),
        callbacks=[
            Progress(False), Summary(False), Signals(False), SeeGradients(found, range(STEPS)),
            RouterBias(0.0 if spec.all_to_one else 0.001), *saving,
        ],
        total_steps=STEPS,
        log_every=1,
        seed=3,
    )  # fmt: skip


def carry_out(spec: Spec, *, checkpoints: str | None = None, resume: str | None = None) -> Found:
    """One run in this rank."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if spec.double else torch.float32)
    found = Found()
    trainer = make_trainer(spec, found, checkpoints)
    try:
        trainer.build()
        found.initial = whole_weights(trainer)
        for router in routers(trainer).values() if spec.all_to_one else ():
            router.balance_bias[NUM_EXPERTS - 2] = 10.0
        trainer.fit(resume=resume or "never")
        biases = {(stage, f"{name}.balance_bias"): router.balance_bias.clone() for (stage, name), router in routers(trainer).items()}
        found.weights = whole_weights(trainer) | biases
        found.losses, found.norms = ([value for _, value in trainer.history.values(name)] for name in ("train/loss", "optim/grad_norm"))
    finally:
        trainer.close()
        torch.set_default_dtype(default)
    return found


def routers(trainer: Trainer) -> dict[tuple[int, str], Any]:
    """By (stage, name)."""
    stages = zip(trainer.context.stages, trainer.stages, strict=True)
    return {(index, name): part for index, stage in stages for name, part in stage.named_modules() if isinstance(part, Router)}


def refer(spec: Spec, folder: str) -> None:
    """The job of one process: its run, into a file."""
    torch.save(carry_out(spec), f"{folder}/{spec.reference}")


def compare_to_one(spec: Spec, folder: str) -> Differences:
    """The job of a rank of a mesh."""
    return compare(carry_out(spec), load(f"{folder}/{spec.reference}"))


def save_half(spec: Spec, folder: str) -> None:
    """The job of a rank: a whole run, which saves at its half."""
    torch.save(carry_out(spec, checkpoints=f"{folder}/{spec}"), own_file(spec, folder))


def resume_all(spec: Spec, others: Sequence[Spec], folder: str) -> list[Differences]:
    """The job of a rank: what it gets when it goes on from the half of each of the others."""
    runs = [carry_out(spec, resume=f"{folder}/{other}/step-{HALF:08d}") for other in others]
    return [compare(run, load(own_file(spec, folder))) for run in runs]


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
