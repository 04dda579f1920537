"""A run on many meshes beside one process, and saved on one and resumed on another: what `context_runs.py` and `expert_runs.py` share.

They say what is run (`MeshSpec`); here it is carried out, compared parameter by parameter as in `pipeline_runs.py`, and printed.
The first functions are for the scripts, the last ones run in the ranks.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch

from tests.parity.pipeline_runs import Differences, Found, SeeGradients, compare, load, own_file, whole_weights
from trainer_kit import Callback, MeshStrategy, ModelProvider, Task, Trainer
from trainer_kit.callbacks import Checkpoint, Progress, Signals, Summary
from trainer_kit.data import DataProvider, Pack
from trainer_kit.optim import AdamW, Piecewise
from trainer_kit.testing import run_on_ranks

LIMITS = {False: 1e-5, True: 1e-9}  # fp32, fp64
STEPS, HALF = 10, 5
TIMEOUT = 900.0
WIDTH = 40  # of the names of meshes
KINDS = {"losses": 10, "norms": 10, "gradients": 11, "weights": 10}  # with the widths of their columns


@dataclass(frozen=True)
class MeshSpec(ABC):
    """One run."""

    mesh: str
    double: bool = True

    meshes: ClassVar[Mapping[str, Mapping[str, Any]]]  # name -> arguments of MeshStrategy; "one process" has none

    def __str__(self) -> str:
        return self.mesh

    @property
    def num_ranks(self) -> int:
        """Experts lie on the ranks of the other degrees."""
        return prod(degree for name, degree in self.meshes[self.mesh].items() if isinstance(degree, int) and name != "ep")

    @property
    def reference(self) -> str:
        """The file of the run of one process."""
        return f"{'fp64' if self.double else 'fp32'}.pt"

    def options(self) -> dict[str, Any]:
        """Those of MeshStrategy."""
        return {"device": "cpu", "dp_replicate": 1, **self.meshes[self.mesh]}

    @abstractmethod
    def model(self) -> ModelProvider:
        """Made anew for each run, as the next two."""

    @abstractmethod
    def task(self) -> Task:
        """With its loss."""

    @abstractmethod
    def data(self) -> DataProvider:
        """The same microbatches in each step on any number of data ranks."""

    def callbacks(self) -> list[Callback]:
        """More than those that all runs have."""
        return []

    def prepare(self, trainer: Trainer) -> None:
        """What is to be done between the build and the run."""

    def weights(self, trainer: Trainer) -> dict[tuple[int, str], torch.Tensor]:
        """What is compared at the end."""
        return whole_weights(trainer)


class Microbatches(DataProvider):
    """make: of a step and a place in it, one microbatch. most: how many a step has, for all data ranks together; numbers: fewer, by step,
    so that ranks may have less than others, or none."""

    draws_random, knows_all_ranks, global_position = False, True, True

    def __init__(self, make: Callable[[int, int], dict[str, torch.Tensor]], most: int, numbers: Callable[[int], int] | None = None) -> None:
        self._make, self._most, self._numbers = make, most, numbers or (lambda step: most)

    def setup(self, context: Any, seed: int) -> None:
        self._rank, self._num_ranks = context.data_rank, context.num_data_ranks

    def packs(self, position: Any) -> Iterator[Pack]:
        share = self._most // self._num_ranks
        for step in range((position or {}).get("step", 0), STEPS):
            number = self._numbers(step)
            own = [self._make(step, index) for index in range(self._rank * share, (self._rank + 1) * share) if index < number]
            filler = None if own else self._make(step, 0)
            yield Pack(own, epoch=0, position={"step": step + 1}, num_on_all=min(share, number), filler=filler)

    def num_packs(self) -> int | None:
        return STEPS


def print_meshes(title: str, specs: Sequence[MeshSpec]) -> bool:
    """A table of runs of one dtype; whether every line is within the limits."""
    double = specs[0].double
    print(f"\n{title}, {'fp64' if double else 'fp32'}, {STEPS} steps: relative difference from one process (limit {LIMITS[double]:g})")
    print(f"{'mesh':<{WIDTH}}" + "".join(f"{name:>{width}}" for name, width in KINDS.items()) + "  initial")
    good = True
    for spec, by_rank in measure(specs):
        cells = "".join(f"{max(getattr(each, name) for each in by_rank):>{width}.1e}" for name, width in KINDS.items())
        equal = "equal" if all(each.initial_is_equal for each in by_rank) else "DIFFER"
        fine = is_good(spec, by_rank)
        print(f"{spec!s:<{WIDTH}}{cells}  {equal}{'' if fine else f'   FAILED: {max(each.worst for each in by_rank)}'}", flush=True)
        good &= fine
    return good


def print_resumes(specs: Sequence[MeshSpec]) -> bool:
    """Runs in fp64 that were saved after five steps on one mesh and go on on another; whether all of them are as the whole run."""
    limit, good = LIMITS[True], True
    print(f"\n{STEPS} steps in fp64, saved after {HALF}: largest relative difference from the whole run (limit {limit:g}; 'same': bitwise)")
    print("resumed on, saved on".ljust(WIDTH + 4) + "".join(f"{f'({number})':>9}" for number in range(len(specs))))
    for number, (spec, found) in enumerate(zip(specs, resumed(specs), strict=True)):
        fine = [value <= (0 if other == number else limit) for other, value in enumerate(found)]
        cells = [("same" if value == 0 else f"{value:.1e}") + "!" * (not ok) for value, ok in zip(found, fine, strict=True)]
        print(f"{f'({number}) {spec}':<{WIDTH + 4}}" + "".join(f"{cell:>9}" for cell in cells), flush=True)
        good &= all(fine)
    return good


def is_good(spec: MeshSpec, by_rank: Sequence[Differences]) -> bool:
    """Whether a run is that of one process on every rank."""
    complete = not set.intersection(*(each.missing for each in by_rank)) and all(each.logged == by_rank[0].logged for each in by_rank)
    return max(map(_largest, by_rank)) <= LIMITS[spec.double] and complete and all(each.initial_is_equal for each in by_rank)


def measure(specs: Sequence[MeshSpec]) -> Iterator[tuple[MeshSpec, list[Differences]]]:
    """The differences of each run from that of one process, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        for spec in specs:
            if not Path(folder, spec.reference).exists():
                run_on_ranks(1, refer, replace(spec, mesh="one process"), folder, timeout=TIMEOUT)
            yield spec, run_on_ranks(spec.num_ranks, compare_to_one, spec, folder, timeout=TIMEOUT)


def resumed(specs: Sequence[MeshSpec]) -> Iterator[list[float]]:
    """By mesh that goes on, by mesh that saved: the largest difference."""
    with tempfile.TemporaryDirectory() as folder:
        for spec in specs:
            run_on_ranks(spec.num_ranks, save_half, spec, folder, timeout=TIMEOUT)
        for spec in specs:
            by_rank = run_on_ranks(spec.num_ranks, resume_all, spec, specs, folder, timeout=TIMEOUT)
            yield [max(map(_largest, other)) for other in zip(*by_rank, strict=True)]


def _largest(found: Differences) -> float:
    return max(getattr(found, name) for name in KINDS)


def make_trainer(spec: MeshSpec, found: Found, checkpoints: str | None = None) -> Trainer:
    """The trainer of this rank."""
    saving = [] if checkpoints is None else [Checkpoint(checkpoints, every=HALF, asynchronous=False)]
    seeing = SeeGradients(found, range(STEPS))
    return Trainer(
        spec.model(),
        spec.task(),
        spec.data(),
        MeshStrategy(**spec.options()),
        # Of an element whose gradient is only rounding, the default eps makes a whole step.
        optimizer=AdamW(lr=1e-3, eps=1e-6),
        lr_scheduler=Piecewise().linear(1.0, steps=4).cosine(0.1, rest=True),
        callbacks=[Progress(False), Summary(False), Signals(False), seeing, *spec.callbacks(), *saving],
        total_steps=STEPS,
        log_every=1,
        seed=3,
    )


def carry_out(spec: MeshSpec, *, checkpoints: str | None = None, resume: str | None = None) -> Found:
    """One run in this rank."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if spec.double else torch.float32)
    found = Found()
    trainer = make_trainer(spec, found, checkpoints)
    try:
        trainer.build()
        found.initial = whole_weights(trainer)
        spec.prepare(trainer)
        trainer.fit(resume=resume or "never")
        found.weights = spec.weights(trainer)
        found.losses, found.norms = ([value for _, value in trainer.history.values(name)] for name in ("train/loss", "optim/grad_norm"))
    finally:
        trainer.close()
        torch.set_default_dtype(default)
    return found


def refer(spec: MeshSpec, folder: str) -> None:
    """The job of one process: its run, into a file."""
    torch.save(carry_out(spec), f"{folder}/{spec.reference}")


def compare_to_one(spec: MeshSpec, folder: str) -> Differences:
    """The job of a rank of a mesh."""
    return compare(carry_out(spec), load(f"{folder}/{spec.reference}"))


def save_half(spec: MeshSpec, folder: str) -> None:
    """The job of a rank: a whole run, which saves at its half."""
    torch.save(carry_out(spec, checkpoints=f"{folder}/{spec}"), own_file(spec, folder))


def resume_all(spec: MeshSpec, others: Sequence[MeshSpec], folder: str) -> list[Differences]:
    """The job of a rank: what it gets when it goes on from the half of each of the others."""
    runs = [carry_out(spec, resume=f"{folder}/{other}/step-{HALF:08d}") for other in others]
    return [compare(run, load(own_file(spec, folder))) for run in runs]
