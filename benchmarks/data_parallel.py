"""Wall time per step on 2 gloo ranks, a decoder of 10M parameters: replicate against torch DDP, FSDP against a hand-written FSDP2 loop.

    python benchmarks/data_parallel.py [--rounds 12] [--steps 3]

In each round every contender makes `--steps` measured steps after one that is not measured, right after or before the hand-written
loop makes as many (who goes first alternates); a ratio is the median over the rounds. Same data, same fused AdamW, one torch thread per
rank. Exit status 1 if a limit is not met: 1.02, and below 1 for 4 microbatches with `fsdp_sync="pack"`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainer_kit import Callback, CausalLMTask, MeshStrategy, Trainer
from trainer_kit.callbacks import Progress, Signals, Summary
from trainer_kit.data import DataProvider, Pack
from trainer_kit.models import Decoder, DecoderConfig
from trainer_kit.optim import AdamW
from trainer_kit.testing import run_on_ranks

ROWS, SEQ_LEN = 8, 64
LEAD = 1
CASES = (  # name, number of microbatches, hand-written loop, our mesh, limit
    ("replicate, 1 microbatch", 1, "ddp", {"dp_replicate": 2}, 1.02),
    ("replicate, 4 microbatches", 4, "ddp", {"dp_replicate": 2}, 1.02),
    ("FSDP, 1 microbatch", 1, "fsdp2", {"dp_replicate": 1, "dp_shard": 2}, 1.02),
    ("FSDP, 4 microbatches", 4, "fsdp2", {"dp_replicate": 1, "dp_shard": 2}, 1.02),
    ("FSDP, 4 microbatches, sync per pack", 4, "fsdp2", {"dp_replicate": 1, "dp_shard": 2, "fsdp_sync": "pack"}, 1.0),
)


def microbatches(count: int) -> list[dict[str, torch.Tensor]]:
    """The same few token rows for everybody."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = [torch.randint(0, 256, (ROWS, SEQ_LEN), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


class HandWritten:
    """The loop that one would write: DDP with `no_sync`, or `fully_shard` per block and on the whole."""

    def __init__(self, kind: str, batches: list[dict[str, torch.Tensor]]) -> None:
        self._batches = batches
        torch.manual_seed(0)
        model: Any = Decoder(DecoderConfig.small())
        if kind == "ddp":
            model = DistributedDataParallel(model)
        else:
            for layer in model.layers.values():
                fully_shard(layer)
            fully_shard(model)
        self._model, self._is_ddp = model, kind == "ddp"
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def steps(self, count: int) -> list[float]:
        """The moments at which steps ended."""
        ends = []
        for _ in range(count):
            for index, batch in enumerate(self._batches):
                if self._is_ddp and index + 1 < len(self._batches):
                    with self._model.no_sync():
                        self._backward(batch)
                else:
                    self._backward(batch)
            self._optimizer.step()
            self._optimizer.zero_grad()
            ends.append(time.perf_counter())
        return ends

    def _backward(self, batch: dict[str, torch.Tensor]) -> None:
        logits = self._model(batch["input_ids"])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        (loss / len(self._batches)).backward()


class Packs(DataProvider):
    """The same pack again and again."""

    draws_random = False
    knows_all_ranks = True

    def __init__(self, batches: list[dict[str, torch.Tensor]]) -> None:
        self._batches = batches

    def packs(self, position: dict[str, Any] | None) -> Iterator[Pack | list[Any]]:
        while True:
            yield Pack(list(self._batches), num_on_all=len(self._batches))


class Ends(Callback):
    """The moments at which steps ended."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def on_step_end(self, event: Any) -> None:
        self.moments.append(time.perf_counter())


class Ours:
    """trainer_kit on the same data."""

    def __init__(self, mesh: dict[str, Any], batches: list[dict[str, torch.Tensor]]) -> None:
        self._ends = Ends()
        self._trainer = Trainer(
            lambda: Decoder(DecoderConfig.small()),
            CausalLMTask(),
            Packs(batches),
            MeshStrategy(device="cpu", **mesh),
            optimizer=AdamW(lr=1e-4),
            callbacks=[Progress(False), Summary(False), Signals(False), self._ends],
            total_steps=1,
            log_every=50,
        )
        self._trainer.fit()

    def steps(self, count: int) -> list[float]:
        """The moments at which steps ended."""
        self._ends.moments = []
        self._trainer.fit(self._trainer.step + count)
        return self._ends.moments

    def close(self) -> None:
        """Leave nothing behind."""
        self._trainer.close()


def seconds_per_step(contender: HandWritten | Ours, steps: int) -> float:
    """Of the steps after the first one."""
    dist.barrier()
    ends = contender.steps(LEAD + steps)
    return (ends[-1] - ends[LEAD - 1]) / steps


def compare(count: int, kind: str, mesh: dict[str, Any], rounds: int, steps: int) -> list[tuple[float, float]]:
    """The job of a rank: (ours, by hand) in seconds per step, by round."""
    batches = microbatches(count)
    theirs, ours = HandWritten(kind, batches), Ours(mesh, batches)
    pairs = []
    for number in range(rounds + 1):
        first, second = (ours, theirs) if number % 2 else (theirs, ours)
        times = {id(contender): seconds_per_step(contender, steps) for contender in (first, second)}
        pairs.append((times[id(ours)], times[id(theirs)]))
    ours.close()
    return pairs[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", type=int, choices=range(len(CASES)), help="number of one case")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    good = True
    print(f"{'case':<38}{'by hand, ms':>12}{'ratio':>8}  (lowest .. highest)   limit")
    for name, count, kind, mesh, limit in CASES if options.only is None else [CASES[options.only]]:
        pairs = run_on_ranks(2, compare, count, kind, mesh, options.rounds, options.steps, timeout=1800.0)[0]
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        ratio = statistics.median(ratios)
        fine = ratio < limit if limit == 1.0 else ratio <= limit
        good &= fine
        by_hand = 1e3 * statistics.median(theirs for _, theirs in pairs)
        spread = f"({ratios[0]:.3f} .. {ratios[-1]:.3f})"
        print(f"{name:<38}{by_hand:>12.1f}{ratio:>8.3f}  {spread}   {limit:g}{'' if fine else '  FAILED'}", flush=True)
    print("passed" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
