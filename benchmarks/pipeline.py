"""Wall time per step of pipelines on 2 and 4 gloo ranks, a decoder of 10M parameters, against torch.distributed.pipelining.

    python benchmarks/pipeline.py [--pairs 12] [--only 1f1b]

The two take turns step by step, as in data_parallel.py: torch makes one step between two of ours, and a ratio is the median over the pairs
of neighbours. A step lasts until all ranks have ended it. Same stages, microbatches, schedule, loss and fused AdamW, one torch thread per
rank; before the times, the weights after the first step must be the same. Exit status 1 if a ratio is above 1.02.
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
from torch.distributed import pipelining

from trainer_kit import Callback, CausalLMTask, MeshStrategy, StageInfo, Trainer
from trainer_kit.callbacks import Progress, Signals, Summary
from trainer_kit.data import DataProvider, Pack
from trainer_kit.models import Decoder, DecoderConfig
from trainer_kit.optim import AdamW
from trainer_kit.testing import run_on_ranks

MICROBATCHES, ROWS, SEQ_LEN = 8, 2, 64
LEAD = 2  # pairs that are not measured
LIMIT, LR = 1.02, 1e-4
CONFIG = DecoderConfig(vocab_size=256, num_layers=8, num_heads=5, hidden_size=320, max_seq_len=SEQ_LEN)  # 10.3M parameters
SCHEDULES: dict[str, tuple[Any, int]] = {  # by our name: that of torch, stages per rank
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved_1f1b": (pipelining.ScheduleInterleaved1F1B, 2),
    "zb1p": (pipelining.ScheduleInterleavedZeroBubble, 2),
    "zbv": (pipelining.ScheduleZBVZeroBubble, 2),
}


def tokens() -> torch.Tensor:
    """The rows of all microbatches, the same on every rank."""
    return torch.randint(0, 256, (MICROBATCHES * ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(0))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class ByTorch:
    """A step with torch's stages and schedule."""

    def __init__(self, schedule: str, modules: dict[int, torch.nn.Module], num_stages: int) -> None:
        kind, stages_per_rank = SCHEDULES[schedule]
        device = torch.device("cpu")
        stages = [pipelining.PipelineStage(module, index, num_stages, device) for index, module in modules.items()]
        self._schedule = kind(stages if stages_per_rank > 1 else stages[0], MICROBATCHES, loss_fn=loss_of)
        self.parameters = [parameter for module in modules.values() for parameter in module.parameters()]
        self._optimizer = torch.optim.AdamW(self.parameters, lr=LR, weight_decay=0.0, fused=True)
        self._inputs = [tokens()] if 0 in modules else []
        self._targets = {"target": tokens()} if num_stages - 1 in modules else {}

    def step(self) -> None:
        """One optimizer step."""
        self._schedule.step(*self._inputs, **self._targets, return_outputs=False)
        self._optimizer.step()
        self._optimizer.zero_grad()


class Packs(DataProvider):
    """The same pack again and again."""

    draws_random = False
    knows_all_ranks = True

    def packs(self, position: dict[str, Any] | None) -> Iterator[Pack | list[Any]]:
        microbatches = [{"input_ids": rows, "labels": rows} for rows in tokens().split(ROWS)]
        while True:
            yield Pack(list(microbatches), num_on_all=MICROBATCHES)


class TakingTurns(Callback):
    """After each step of ours one of torch. pairs: the seconds of both; ranks begin together, and the last one ends a step."""

    def __init__(self, schedule: str) -> None:
        self._schedule, self._begin = schedule, 0.0
        self.pairs: list[tuple[float, float]] = []

    def on_fit_start(self, event: Any) -> None:
        num_stages, indices = event.trainer.context.stage_layout.num_stages, event.trainer.context.stages
        modules = [Decoder(CONFIG, StageInfo(index, num_stages)) for index in indices]
        for module, ours in zip(modules, event.trainer.stages, strict=True):
            module.load_state_dict(ours.state_dict())
        self._theirs = ByTorch(self._schedule, dict(zip(indices, modules, strict=True)), num_stages)
        self._ours = [parameter for module in event.trainer.stages for parameter in module.parameters()]
        self._begin = _now()

    def on_step_end(self, event: Any) -> None:
        middle = _now()
        self._theirs.step()
        end = _now()
        if not self.pairs:
            self._check_same()
        self.pairs.append((middle - self._begin, end - middle))
        self._begin = _now()

    def _check_same(self) -> None:
        for mine, theirs in zip(self._ours, self._theirs.parameters, strict=True):
            assert (mine - theirs).abs().mean() < 0.01 * LR, "the weights after one step are not those of torch"


def _now() -> float:
    dist.barrier()
    return time.perf_counter()


def compare(schedule: str, num_ranks: int, num_pairs: int) -> list[tuple[float, float]]:
    """The job of a rank: (ours, by torch) in seconds per step, by pair."""
    turns = TakingTurns(schedule)
    stages_per_rank = SCHEDULES[schedule][1]
    trainer = Trainer(
        lambda stage: Decoder(CONFIG, stage),
        CausalLMTask(),
        Packs(),
        MeshStrategy(device="cpu", pp=num_ranks, dp_replicate=1, pipeline=schedule, stages_per_rank=stages_per_rank),
        optimizer=AdamW(lr=LR, weight_decay=0.0),
        callbacks=[Progress(False), Summary(False), Signals(False), turns],
        total_steps=LEAD + num_pairs,
        log_every=50,
    )
    trainer.fit()
    trainer.close()
    return turns.pairs[LEAD:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--only", choices=SCHEDULES, help="one schedule")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    good = True
    print(f"{'schedule':<18}{'ranks':>5}{'by torch, ms':>14}{'ratio':>8}  (middle half)   limit")
    for num_ranks in options.ranks:
        for schedule in SCHEDULES if options.only is None else [options.only]:
            pairs = run_on_ranks(num_ranks, compare, schedule, num_ranks, options.pairs, timeout=1800.0)[0]
            ratios = sorted(ours / theirs for ours, theirs in pairs)
            ratio = statistics.median(ratios)
            good &= ratio <= LIMIT
            by_torch = 1e3 * statistics.median(theirs for _, theirs in pairs)
            spread = f"({ratios[len(ratios) // 4]:.3f} .. {ratios[-len(ratios) // 4]:.3f})"
            verdict = "" if ratio <= LIMIT else "  FAILED"
            print(f"{schedule:<18}{num_ranks:>5}{by_torch:>14.1f}{ratio:>8.3f}  {spread}   {LIMIT:g}{verdict}", flush=True)
    print("passed" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
