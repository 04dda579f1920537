"""What `step_overhead.py` compares: one job, a hand-written loop over it, and trainer_kit on the same job.

Everybody gets the same model, the same DataLoader settings and the same optimizer (torch's fused AdamW, one group). A round is one
pass over the data; CPU time is taken at the ends of two steps inside it, so what a fit costs at its start and end counts for nobody.
Not here: other libraries (`peers.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainer_kit import AutoDataProvider, Callback, CausalLMTask, ForwardInputs, Task, Trainer
from trainer_kit.callbacks import TensorBoard
from trainer_kit.events import StepEnd
from trainer_kit.models import Decoder, DecoderConfig

LOG_EVERY = 50


class Stopwatch:
    """CPU time of the process, all threads, from the end of step `lead` to the end of step `lead + steps` of a round."""

    def __init__(self, lead: int, steps: int) -> None:
        self.lead, self.last = lead, lead + steps
        self._count = 0
        self._begin = self._end = 0.0

    def start_round(self) -> None:
        """Forget the round before."""
        self._count = 0

    def step_done(self) -> None:
        """Call at the end of every step."""
        self._count += 1
        if self._count == self.lead:
            self._begin = time.process_time()
        elif self._count == self.last:
            self._end = time.process_time()

    def seconds_per_step(self) -> float:
        """Of the round that has ended."""
        if self._count < self.last:
            raise RuntimeError(f"a round made {self._count} steps, expected at least {self.last}")
        return (self._end - self._begin) / (self.last - self.lead)


class Rows(Dataset[Any]):
    """Rows of tensors; a list of indices gives a whole batch at once, so that loading costs little beside the loops."""

    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self._columns.items()}

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        chosen = torch.tensor(indices)
        return {name: column[chosen] for name, column in self._columns.items()}


def as_it_is(batch: Any) -> Any:
    """A collate function for batches that are whole already."""
    return batch


@dataclass
class Job:
    """A model, its data, and its loss, in the forms that the contenders need."""

    make_model: Callable[[], nn.Module]
    rows: Rows
    batch_size: int
    accumulate: int
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
    task: Callable[[], Task]

    def loader(self) -> DataLoader[Any]:
        """The DataLoader of every contender."""
        return DataLoader(self.rows, batch_size=self.batch_size, shuffle=True, collate_fn=as_it_is)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every contender."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Classification(Task):
    """The loss of the tiny job, as a user writes it."""

    def build_forward_inputs(self, batch: dict[str, torch.Tensor]) -> ForwardInputs:
        return ForwardInputs(inputs=batch["x"], state=batch["labels"], weight=len(batch["labels"]))

    def compute_loss(self, pipeline_results: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(pipeline_results, state)


def tiny_job(steps_per_round: int) -> Job:
    """Linear(32, 64), ReLU, Linear(64, 10), batches of 16: nearly nothing but overhead."""
    size = 16 * steps_per_round
    return Job(
        make_model=lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)),
        rows=Rows({"x": torch.randn(size, 32), "labels": torch.randint(10, (size,))}),
        batch_size=16,
        accumulate=1,
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["labels"]),
        task=Classification,
    )


def transformer_job(steps_per_round: int, config: DecoderConfig, sequences: int, length: int) -> Job:
    """Next-token prediction with 4 microbatches of `sequences` sequences."""

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["input_ids"])
        targets = F.pad(batch["input_ids"][:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Job(
        make_model=lambda: Decoder(config),
        rows=Rows({"input_ids": torch.randint(config.vocab_size, (4 * sequences * steps_per_round, length))}),
        batch_size=sequences,
        accumulate=4,
        loss=loss,
        task=CausalLMTask,
    )


class Plain:
    """The loop by hand: forward, loss, backward, update, zero, and every 50th step the loss as a line of text."""

    name = "hand-written loop"

    def __init__(self, job: Job) -> None:
        self._job = job
        self._model = job.make_model()
        self._optimizer = make_optimizer(self._model.parameters())

    def run_round(self, watch: Stopwatch) -> None:
        """One pass over the data."""
        job, model, optimizer = self._job, self._model, self._optimizer
        step = 0
        for index, batch in enumerate(job.loader()):
            loss = job.loss(model, batch)
            (loss if job.accumulate == 1 else loss / job.accumulate).backward()
            if (index + 1) % job.accumulate:
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % LOG_EVERY == 0:
                print(f"step {step} loss {loss.item():.4f}")
            watch.step_done()


class _Ticks(Callback):
    def __init__(self) -> None:
        self.watch: Stopwatch | None = None

    def on_step_end(self, event: StepEnd) -> None:
        assert self.watch is not None
        self.watch.step_done()


class TrainerKit:
    """trainer_kit as it comes, with its progress bar, signals, finite check and TensorBoard; one Trainer for all rounds.

    own_data: read by `AutoDataProvider` in place of the DataLoader of the others.
    """

    def __init__(self, job: Job, folder: Path, *, own_data: bool = False) -> None:
        self.name = "trainer_kit, AutoDataProvider" if own_data else "trainer_kit"
        self._ticks = _Ticks()
        data: Any = job.loader()
        if own_data:
            data = AutoDataProvider(job.rows, job.batch_size * job.accumulate, job.batch_size, as_it_is, shuffle=True)
        self._num_steps = len(job.loader()) // job.accumulate
        self._trainer = Trainer(
            job.make_model(),
            job.task(),
            data,
            optimizer=make_optimizer,
            callbacks=[self._ticks, TensorBoard(folder / self.name)],
            total_steps=self._num_steps,
            log_every=LOG_EVERY,
            **({} if own_data else {"accumulate": job.accumulate}),
        )

    def run_round(self, watch: Stopwatch) -> None:
        """One pass over the data: the run is extended by it."""
        self._ticks.watch = watch
        self._trainer.fit(total_steps=self._trainer.step + self._num_steps)
