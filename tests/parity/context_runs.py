"""Sequences that are cut over ranks: a small Llama on every mesh must run as on one process with the same microbatches.

A step has four microbatches, which the data ranks share: with and without packed documents or padding, some of whose parts have no label
that counts, and one without any. Everything by parameter, as in `pipeline_runs.py`.
The first functions are for the script, the last ones run in the ranks.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.parity.pipeline_runs import Differences, Found, SeeGradients, compare, load, own_file, whole_weights
from tests.weights.memory import LiveBytes
from trainer_kit import CausalLMTask, MeshStrategy, Trainer
from trainer_kit.callbacks import Checkpoint, Progress, Signals, Summary
from trainer_kit.data import DataProvider, Pack
from trainer_kit.models import DecoderConfig, DecoderProvider
from trainer_kit.optim import AdamW, Piecewise
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
LIMITS = {False: 1e-5, True: 1e-9}
MEMORY_LIMIT = 0.35
STEPS, HALF, NUM_MICROBATCHES = 10, 5, 4
SEQ_LEN, VOCAB, LONG = 16, 37, 4096
TIMEOUT = 900.0


@dataclass(frozen=True)
class Spec:
    """One run."""

    mesh: str
    double: bool = True

    def __str__(self) -> str:
        return self.mesh

    @property
    def num_ranks(self) -> int:
        return math.prod(degree for degree in MESHES[self.mesh].values() if isinstance(degree, int))

    @property
    def reference(self) -> str:
        """The file of the run of one process."""
        return f"{'fp64' if self.double else 'fp32'}.pt"

    def options(self) -> dict[str, Any]:
        """Those of MeshStrategy."""
        return {"device": "cpu", "dp_replicate": 1, **MESHES[self.mesh]}


def print_all() -> bool:
    """All of it; whether everything is as it must be."""
    meshes = [mesh for mesh in MESHES if mesh != "one process"]
    return all([print_parity(meshes), print_resumes(RESUMES), print_memory()])


def print_parity(meshes: Sequence[str]) -> bool:
    """The table of all meshes; whether every line is within the limits."""
    good = True
    for double in (True, False):
        print(f"\nLlama, {'fp64' if double else 'fp32'}, {STEPS} steps: relative difference from one process (limit {LIMITS[double]:g})")
        print(f"{'mesh':<40}{'losses':>10}{'norms':>10}{'gradients':>11}{'weights':>10}  initial")
        for spec, by_rank in measure([Spec(mesh, double) for mesh in meshes]):
            names = ("losses", "norms", "gradients", "weights")
            values = [max(getattr(each, name) for each in by_rank) for name in names]
            cells = "".join(f"{value:>{width}.1e}" for value, width in zip(values, (10, 10, 11, 10), strict=True))
            equal = "equal" if all(each.initial_is_equal for each in by_rank) else "DIFFER"
            fine = is_good(spec, by_rank)
            print(f"{spec.mesh:<40}{cells}  {equal}{'' if fine else f'   FAILED: {max(each.worst for each in by_rank)}'}", flush=True)
            good &= fine
    return good


def is_good(spec: Spec, by_rank: Sequence[Differences]) -> bool:
    """Whether a run is that of one process on every rank."""
    largest = max(map(_largest, by_rank))
    complete = not set.intersection(*(each.missing for each in by_rank)) and all(each.logged == by_rank[0].logged for each in by_rank)
    return largest <= LIMITS[spec.double] and complete and all(each.initial_is_equal for each in by_rank)


def _largest(found: Differences) -> float:
    return max(found.losses, found.norms, found.gradients, found.weights)


def measure(specs: Sequence[Spec]) -> Iterator[tuple[Spec, list[Differences]]]:
    """The differences of each run from that of one process, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        for spec in specs:
            if not Path(folder, spec.reference).exists():
                run_on_ranks(1, refer, Spec("one process", spec.double), folder, timeout=TIMEOUT)
            yield spec, run_on_ranks(spec.num_ranks, compare_to_one, spec, folder, timeout=TIMEOUT)


def print_resumes(meshes: Sequence[str]) -> bool:
    """Runs in fp64 that were saved after five steps on one mesh and go on on another; whether all of them are as the whole run."""
    limit, good, specs = LIMITS[True], True, [Spec(mesh) for mesh in meshes]
    print(f"\n{STEPS} steps in fp64, saved after {HALF}: largest relative difference from the whole run (limit {limit:g}; 'same': bitwise)")
    print("resumed on, saved on".ljust(44) + "".join(f"{f'({number})':>9}" for number in range(len(specs))))
    for number, (spec, found) in enumerate(zip(specs, resumed(specs), strict=True)):
        fine = [value <= (0 if other == number else limit) for other, value in enumerate(found)]
        cells = [("same" if value == 0 else f"{value:.1e}") + "!" * (not ok) for value, ok in zip(found, fine, strict=True)]
        print(f"{f'({number}) {spec}':<44}" + "".join(f"{cell:>9}" for cell in cells), flush=True)
        good &= all(fine)
    return good


def resumed(specs: Sequence[Spec]) -> Iterator[list[float]]:
    """By mesh that goes on, by mesh that saved: the largest difference."""
    with tempfile.TemporaryDirectory() as folder:
        for spec in specs:
            run_on_ranks(spec.num_ranks, save_half, spec, folder, timeout=TIMEOUT)
        for spec in specs:
            by_rank = run_on_ranks(spec.num_ranks, resume_all, spec, specs, folder, timeout=TIMEOUT)
            yield [max(map(_largest, other)) for other in zip(*by_rank, strict=True)]


def print_memory() -> bool:
    """The bytes that a step on one long sequence holds at most; whether those of each rank of cp 4 are few enough."""
    (whole,) = run_on_ranks(1, peak, "one process")
    good = True
    for mesh in ("cp_shard 4, ring", "cp_shard 4, ulysses"):
        share = max(run_on_ranks(4, peak, mesh, timeout=TIMEOUT)) / whole
        print(f"\n{LONG} tokens, {mesh}: a rank holds {share:.3f} of the {whole / 1e6:.1f} MB of one process (limit {MEMORY_LIMIT})")
        good &= share <= MEMORY_LIMIT
    return good


class Microbatches(DataProvider):
    """The same microbatches in each step on any number of data ranks."""

    draws_random, knows_all_ranks, global_position = False, True, True

    def setup(self, context: Any, seed: int) -> None:
        self._rank, self._num_ranks = context.data_rank, context.num_data_ranks

    def packs(self, position: Any) -> Iterator[Pack]:
        share = NUM_MICROBATCHES // self._num_ranks
        for step in range((position or {}).get("step", 0), STEPS):
            own = [_microbatch(step, index) for index in range(self._rank * share, (self._rank + 1) * share)]
            yield Pack(own, epoch=0, position={"step": step + 1}, num_on_all=share)

    def num_packs(self) -> int | None:
        return STEPS


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


def make_trainer(spec: Spec, found: Found, checkpoints: str | None = None) -> Trainer:
    """The trainer of this rank."""
    saving = [] if checkpoints is None else [Checkpoint(checkpoints, every=HALF, asynchronous=False)]
    return Trainer(
        DecoderProvider(config()),
        CausalLMTask(),
        Microbatches(),
        MeshStrategy(**spec.options()),
        # Of an element whose gradient is only rounding, the default eps makes a whole step.
        optimizer=AdamW(lr=1e-3, eps=1e-6),
        lr_scheduler=Piecewise().linear(1.0, steps=4).cosine(0.1, rest=True),
        callbacks=[Progress(False), Summary(False), Signals(False), SeeGradients(found, range(STEPS)), *saving],
        total_steps=STEPS,
        log_every=1,
        seed=3,
    )


def carry_out(spec: Spec, *, checkpoints: str | None = None, resume: str | None = None) -> Found:
    """One run in this rank."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if spec.double else torch.float32)
    found = Found()
    trainer = make_trainer(spec, found, checkpoints)
    try:
        trainer.build()
        found.initial = whole_weights(trainer)
        trainer.fit(resume=resume or "never")
        found.weights = whole_weights(trainer)
        found.losses, found.norms = ([value for _, value in trainer.history.values(name)] for name in ("train/loss", "optim/grad_norm"))
    finally:
        trainer.close()
        torch.set_default_dtype(default)
    return found


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
