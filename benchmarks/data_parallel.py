"""Wall time per step on 2 gloo ranks, a decoder of 10M parameters: replicate against torch DDP, FSDP against a hand-written FSDP2 loop.

    python benchmarks/data_parallel.py [--pairs 40]

The two take turns step by step: the hand-written loop makes one step between two of ours. So whatever else the machine does meets both
alike, and a ratio is the median over the pairs of neighbours. Same data, same fused AdamW, one torch thread per rank. Exit status 1 if a
limit is not met: 1.02, and below 1 for 4 microbatches with `fsdp_sync="pack"`.
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
LEAD = 3  # pairs that are not measured
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

    def step(self) -> None:
        """One optimizer step."""
        for index, batch in enumerate(self._batches):
            if self._is_ddp and index + 1 < len(self._batches):
                with self._model.no_sync():
                    self._backward(batch)
            else:
                self._backward(batch)
        self._optimizer.step()
        self._optimizer.zero_grad()

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


class TakingTurns(Callback):
    """After each step of ours one of the hand-written loop. pairs: the seconds of both; ranks begin together."""

    def __init__(self, theirs: HandWritten) -> None:
        self._theirs, self._begin = theirs, 0.0
        self.pairs: list[tuple[float, float]] = []

    def on_fit_start(self, event: Any) -> None:
        self._begin = _now()

    def on_step_end(self, event: Any) -> None:
        ours = time.perf_counter() - self._begin
        begin = _now()
        self._theirs.step()
        self.pairs.append((ours, time.perf_counter() - begin))
        self._begin = _now()


def _now() -> float:
    dist.barrier()
    return time.perf_counter()


def compare(count: int, kind: str, mesh: dict[str, Any], num_pairs: int) -> list[tuple[float, float]]:
    """The job of a rank: (ours, by hand) in seconds per step, by pair."""
    batches = microbatches(count)
    turns = TakingTurns(HandWritten(kind, batches))
    trainer = Trainer(
        lambda: Decoder(DecoderConfig.small()),
        CausalLMTask(),
        Packs(batches),
        MeshStrategy(device="cpu", **mesh),
        optimizer=AdamW(lr=1e-4),
        callbacks=[Progress(False), Summary(False), Signals(False), turns],
        total_steps=LEAD + num_pairs,
        log_every=50,
    )
    trainer.fit()
    trainer.close()
    return turns.pairs[LEAD:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--only", type=int, choices=range(len(CASES)), help="number of one case")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    good = True
    print(f"{'case':<38}{'by hand, ms':>12}{'ratio':>8}  (middle half)   limit")
    for name, count, kind, mesh, limit in CASES if options.only is None else [CASES[options.only]]:
        pairs = run_on_ranks(2, compare, count, kind, mesh, options.pairs, timeout=1800.0)[0]
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        ratio = statistics.median(ratios)
        fine = ratio < limit if limit == 1.0 else ratio <= limit
        good &= fine
        by_hand = 1e3 * statistics.median(theirs for _, theirs in pairs)
        spread = f"({ratios[len(ratios) // 4]:.3f} .. {ratios[-len(ratios) // 4]:.3f})"
        print(f"{name:<38}{by_hand:>12.1f}{ratio:>8.3f}  {spread}   {limit:g}{'' if fine else '  FAILED'}", flush=True)
    print("passed" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
