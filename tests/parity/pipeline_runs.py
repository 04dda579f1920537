"""What the ranks of `pipelines.py` do: runs of a decoder in stages, and their comparison with those of one process, parameter by parameter.

Two runs. "gradients": nothing is updated, and the packs have 1, 2, ... 9 microbatches of several sizes, where two data ranks have unequal
numbers, one of them none at all. "training": ten steps of AdamW over two epochs, whose last packs are short. Labels that do not count make
the weights of all microbatches unequal, one of them 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from tests.parity.any_mesh import relative
from tests.parity.meshes import Language
from trainer_kit import AutoDataProvider, Callback, MeshStrategy, Trainer
from trainer_kit.callbacks import Checkpoint, Progress, Signals, Summary
from trainer_kit.data import DataProvider, Pack
from trainer_kit.model import StageInfo
from trainer_kit.models import Decoder, DecoderConfig
from trainer_kit.optim import AdamW, Piecewise
from trainer_kit.pipeline.schedules import SCHEDULES
from trainer_kit.torch_private import whole_tensor

MESHES: dict[str, dict[str, int]] = {
    "pp 2": {"pp": 2},
    "pp 4": {"pp": 4},
    "pp 2 x dp_shard 2": {"pp": 2, "dp_shard": 2},
    "pp 2 x tp 2": {"pp": 2, "tp": 2},
}
NUMBERS = tuple(range(1, 10))  # of microbatches
STEPS, HALF = 10, 5
SEQ_LEN, VOCAB = 8, 37
NUM_SAMPLES, PACK = 4 * 12 + 9, 12
Run = Literal["gradients", "training"]


@dataclass(frozen=True)
class Layout:
    """Where the stages are; without a mesh all in one process. sync: of FSDP, with schedules that leave the choice."""

    mesh: str | None = None
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    sync: str = "microbatch"

    def __str__(self) -> str:
        return "one process" if self.mesh is None else f"{self.mesh} {self.schedule} {self.stages_per_rank}"

    @property
    def num_stages(self) -> int:
        return self.stages_per_rank * self._degree("pp")

    @property
    def num_ranks(self) -> int:
        return self._degree("pp") * self._degree("dp_shard") * self._degree("tp")

    @property
    def num_data_ranks(self) -> int:
        return self._degree("dp_shard")

    @property
    def num_layers(self) -> int:
        """Of the model: enough for all stages."""
        return max(3, self.num_stages)

    @property
    def microbatch_size(self) -> int:
        """Three microbatches in every pack, 3 and 2 in the last one on two data ranks; more if the schedule needs them."""
        return PACK // 3 // self.num_data_ranks // (self._degree("pp") if SCHEDULES[self.schedule].microbatches_per_rank else 1)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of microbatches that the schedule takes."""
        least = SCHEDULES[self.schedule].microbatches_per_rank * self._degree("pp")
        return tuple(number for number in NUMBERS if number >= least)

    def strategy(self) -> MeshStrategy:
        """The settings of a user for it."""
        if self.mesh is None:
            return MeshStrategy(device="cpu")
        sync = "pack" if SCHEDULES[self.schedule].splits_backward else self.sync
        options = {"pipeline": self.schedule, "stages_per_rank": self.stages_per_rank, **MESHES[self.mesh]}
        return MeshStrategy(device="cpu", dp_replicate=1, **options, **({"fsdp_sync": sync} if self.num_data_ranks > 1 else {}))

    def _degree(self, name: str) -> int:
        return MESHES[self.mesh].get(name, 1) if self.mesh is not None else 1


@dataclass(frozen=True)
class Variant:
    """The model: its layers, whether the head is the embedding, and how many layers are frozen, with the embedding; 0: single weights."""

    num_layers: int
    is_tied: bool
    frozen_layers: int = 0

    def build(self, stage: StageInfo) -> Decoder:
        config = DecoderConfig(
            vocab_size=VOCAB, num_layers=self.num_layers, num_heads=4, num_kv_heads=2, hidden_size=16, intermediate_size=24,
            max_seq_len=SEQ_LEN, tie_embeddings=self.is_tied, init_std=0.1,
        )  # fmt: skip
        model = Decoder(config, stage)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not self._freezes(name))
        return model

    def _freezes(self, name: str) -> bool:
        if self.frozen_layers == 0:
            return name in ("layers.1.feed_forward.up_proj.weight", "layers.2.attention_norm.weight")
        first = ["embedding.", *(f"layers.{number}." for number in range(self.frozen_layers))]
        return name.startswith(tuple(first)) or (name == "head.weight" and self.is_tied)


@dataclass(frozen=True)
class Case:
    """One run to compare."""

    layout: Layout
    variant: Variant
    run: Run

    @property
    def reference(self) -> str:
        """The file of the run of one process with the same samples."""
        data_ranks = f"-{self.layout.num_data_ranks}" if self.run == "gradients" else ""
        variant = f"{self.variant.num_layers}-{'tied' if self.variant.is_tied else 'apart'}-{self.variant.frozen_layers}"
        return f"{self.run}-{variant}{data_ranks}.pt"


@dataclass
class Found:
    """What one rank saw of a run; tensors are whole, by (stage, name)."""

    initial: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, dict[tuple[int, str], torch.Tensor]] = field(default_factory=dict)  # by number of microbatches
    weights: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def names(self) -> set[str]:
        """Of all that is compared by name."""
        of_gradients = {f"{number} microbatches, {name}" for number, found in self.gradients.items() for _, name in found}
        return {name for _, name in self.initial} | of_gradients


@dataclass
class Differences:
    """Of the run of a rank from that of one process: the largest relative ones, and which tensors they are from."""

    gradients: float
    losses: float
    norms: float
    weights: float
    initial_is_equal: bool
    missing: set[str]  # what this rank does not have
    logged: list[float]  # losses and norms, which all ranks know
    worst: tuple[float, str]  # of gradients and weights


class Lengths(DataProvider):
    """One pack for each of several numbers of microbatches. Of two data ranks the second has two less. rank: None has all of them."""

    draws_random, knows_all_ranks = False, True

    def __init__(self, numbers: Sequence[int], num_data_ranks: int) -> None:
        self._numbers, self._num_data_ranks = numbers, num_data_ranks

    def setup(self, context: Any, seed: int) -> None:
        self._parts = [context.data_rank] if context.num_data_ranks > 1 else range(self._num_data_ranks)

    def packs(self, position: Any) -> Iterator[Pack]:
        for number in self._numbers:
            own = [microbatch for part in self._parts for microbatch in self._microbatches(number, part)]
            several = len(self._parts) < self._num_data_ranks
            yield Pack(own, num_on_all=number if several else len(own), filler=None if own else self._microbatches(1, 0)[0])

    @staticmethod
    def _microbatches(number: int, part: int) -> list[dict[str, torch.Tensor]]:
        made = []
        for index in range(number if part == 0 else max(number - 2, 0)):
            generator = torch.Generator().manual_seed(100 * number + 10 * part + index)
            tokens = torch.randint(0, VOCAB, (4 + index % 3, SEQ_LEN), generator=generator)
            labels = tokens.clone()
            labels[:, 4 + (index + number) % 5 :] = -100
            if index == 2:  # nothing of it counts
                labels[:] = -100
            made.append({"input_ids": tokens, "labels": labels})
        return made


class Samples(torch.utils.data.Dataset):
    """Sequences of tokens with 1 to 7 labels that count."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCAB, (NUM_SAMPLES, SEQ_LEN), generator=generator)
        self.counted = torch.randint(2, SEQ_LEN + 1, (NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = self.tokens[index].clone()
        labels[self.counted[index] :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


class SeeGradients(Callback):
    """Keeps the gradients of each step."""

    def __init__(self, found: Found, numbers: Sequence[int]) -> None:
        self._found, self._numbers = found, numbers

    def on_gradients_ready(self, event: Any) -> None:
        seen = {(row.stage, row.name): whole(row.parameter.grad) for row in event.trainer.parameters.trainable()}
        self._found.gradients[self._numbers[event.step]] = seen


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole of it. A collective of those that have parts."""
    return whole_tensor(tensor.detach()).clone()


def whole_weights(trainer: Trainer) -> dict[tuple[int, str], torch.Tensor]:
    """By (stage, name)."""
    return {(row.stage, row.name): whole(row.parameter) for row in trainer.parameters}


def make_trainer(case: Case, found: Found, checkpoints: str | None, data_ranks: int, numbers: Sequence[int]) -> Trainer:
    """The trainer of this rank. data_ranks: that the samples are for, if this is one process."""
    if case.run == "gradients":
        data: DataProvider = Lengths(numbers, data_ranks)
        optimizer, seeing = partial(torch.optim.SGD, lr=0.0), [SeeGradients(found, numbers)]
    else:
        data = AutoDataProvider(Samples(), global_batch_size=PACK, microbatch_size=case.layout.microbatch_size, shuffle=True)
        # Of an element whose gradient is only rounding, the default eps makes a whole step.
        optimizer, seeing = AdamW(lr=1e-3, eps=1e-6), []
    saving = [] if checkpoints is None else [Checkpoint(checkpoints, every=HALF, asynchronous=False)]
    return Trainer(
        case.variant.build,
        Language(),
        data,
        case.layout.strategy(),
        optimizer=optimizer,
        lr_scheduler=Piecewise().linear(1.0, steps=4).cosine(0.1, rest=True) if case.run == "training" else None,
        callbacks=[Progress(False), Summary(False), Signals(False), *seeing, *saving],
        total_steps=STEPS if case.run == "training" else len(numbers),
        log_every=1,
        seed=3,
    )


def carry_out(
    case: Case,
    *,
    checkpoints: str | None = None,
    resume: str | None = None,
    data_ranks: int | None = None,
    numbers: Sequence[int] | None = None,
) -> Found:
    """One run in this rank. checkpoints: a folder to save into; resume: a checkpoint to go on from."""
    found = Found()
    numbers = case.layout.numbers if numbers is None else numbers
    trainer = make_trainer(case, found, checkpoints, data_ranks or case.layout.num_data_ranks, numbers)
    try:
        trainer.build()
        found.initial = whole_weights(trainer)
        trainer.fit(resume=resume or "never")
        found.weights = whole_weights(trainer)
        found.losses, found.norms = ([value for _, value in trainer.history.values(name)] for name in ("train/loss", "optim/grad_norm"))
    finally:
        trainer.close()
    return found


def refer(cases: Sequence[Case], folder: str, numbers: Sequence[int] = NUMBERS) -> None:
    """The job of one process: the references of cases on a mesh, into files."""
    for case in cases:
        found = carry_out(Case(Layout(), case.variant, case.run), data_ranks=case.layout.num_data_ranks, numbers=numbers)
        torch.save(found, f"{folder}/{case.reference}")


def compare_all(cases: Sequence[Case], folder: str, numbers: Sequence[int] | None = None) -> list[Differences]:
    """The job of a rank of a mesh: the differences of each case from its reference."""
    return [compare(carry_out(case, numbers=numbers), load(f"{folder}/{case.reference}")) for case in cases]


def save_halves(layouts: Sequence[Layout], variant: Variant, folder: str) -> None:
    """The job of a rank: whole runs, which save at their half, into folders of the layouts."""
    for layout in layouts:
        found = carry_out(Case(layout, variant, "training"), checkpoints=f"{folder}/{layout}")
        torch.save(found, own_file(layout, folder))


def resume_all(layouts: Sequence[Layout], saved: Sequence[Layout], variant: Variant, folder: str) -> list[list[Differences]]:
    """The job of a rank: each layout goes on from what each of the others saved; by layout the differences from its own whole run."""
    found = []
    for layout in layouts:
        case = Case(layout, variant, "training")
        runs = [carry_out(case, resume=f"{folder}/{other}/step-{HALF:08d}") for other in saved]
        whole_run = load(own_file(layout, folder))
        whole_run.losses, whole_run.norms = whole_run.losses[HALF:], whole_run.norms[HALF:]
        found.append([compare(run, whole_run) for run in runs])
    return found


def own_file(layout: Layout, folder: str) -> str:
    """Where this rank keeps its own part of a whole run."""
    return f"{folder}/{layout}/rank-{torch.distributed.get_rank()}.pt"


def load(path: str) -> Found:
    """A run that was kept."""
    return torch.load(path, weights_only=False)


def compare(found: Found, reference: Found) -> Differences:
    """A run whose reference may have gradients for more numbers of microbatches."""
    steps = [step for step, number in enumerate(reference.gradients) if number in found.gradients] or range(len(reference.losses))
    reference.gradients = {number: reference.gradients[number] for number in found.gradients}
    of_weights = list(distances(found.weights, reference.weights, "weights"))
    of_gradients = [(0.0, "")]
    for number, gradients in found.gradients.items():
        of_gradients += distances(gradients, reference.gradients[number], f"{number} microbatches, gradients")
    expected = by_name(reference.initial)
    return Differences(
        gradients=max(of_gradients)[0],
        losses=relative(found.losses, [reference.losses[step] for step in steps]),
        norms=relative(found.norms, [reference.norms[step] for step in steps]),
        weights=max(of_weights)[0],
        initial_is_equal=all(torch.equal(tensor, expected[name]) for (_, name), tensor in found.initial.items()),
        missing=reference.names() - found.names(),
        logged=found.losses + found.norms,
        worst=max(of_weights + of_gradients),
    )


def by_name(tensors: dict[tuple[int, str], torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for (_, name), tensor in tensors.items()}


def distances(
    found: dict[tuple[int, str], torch.Tensor], expected: dict[tuple[int, str], torch.Tensor], what: str
) -> Iterator[tuple[float, str]]:
    """The distance of each tensor from the one of its name, relative to that one's norm; inf if there is none there but here."""
    of_name = by_name(expected)
    for (stage, name), tensor in found.items():
        distance, norm = float((tensor - of_name[name]).double().norm()), float(of_name[name].double().norm())
        value = distance / norm if norm else (torch.inf if distance else 0.0)
        yield (torch.inf if value != value else value), f"{what} of {name} in stage {stage}"
