"""Wall time per step of pipelines on 2 and 4 gloo ranks, a decoder of 10M parameters, against torch.distributed.pipelining.

    python benchmarks/pipeline.py [--pairs 18] [--ranks 4] [--only 1f1b] [--smoke]

The two take turns step by step: torch makes one step between two of ours, and a ratio is the median over the pairs of neighbours. A step
lasts until all ranks have ended it. Same stages, microbatches, schedule, loss and fused AdamW, one torch thread per rank; the first step
must bring both to the same weights. Exit status 1 if a ratio is above 1.02.

All of torch's schedules in the table run on gloo. Not here: looped_bfs and dualpipe_v, which add no other kind of action, and FSDP. About
10 minutes on two idle cores, where 4 ranks share them: the times are then those of all work together, hardly those of the bubbles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import product
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
LAYERS = 8  # one for each stage of 4 ranks with 2 stages
CONFIG = DecoderConfig(vocab_size=256, num_layers=LAYERS, num_heads=5, hidden_size=320, max_seq_len=SEQ_LEN)  # 10.3M parameters
SMALL = DecoderConfig(vocab_size=256, num_layers=LAYERS, num_heads=2, hidden_size=16, max_seq_len=SEQ_LEN)
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

    def __init__(self, schedule: str, config: DecoderConfig) -> None:
        self._schedule, self._config, self._begin = schedule, config, 0.0
        self.pairs: list[tuple[float, float]] = []

    def on_fit_start(self, event: Any) -> None:
        context, ours = event.trainer.context, event.trainer.stages
        num_stages = context.stage_layout.num_stages
        modules = {index: Decoder(self._config, StageInfo(index, num_stages)) for index in context.stages}
        for module, stage in zip(modules.values(), ours, strict=True):
            module.load_state_dict(stage.state_dict())
        self._theirs = ByTorch(self._schedule, modules, num_stages)
        self._ours = [parameter for stage in ours for parameter in stage.parameters()]
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
            if (mine - theirs).abs().mean() > 0.01 * LR:  # a step of Adam moves each by LR
                raise RuntimeError("after one step the weights are not those that torch has")


def _now() -> float:
    dist.barrier()
    return time.perf_counter()


def compare(schedule: str, num_ranks: int, num_pairs: int, config: DecoderConfig) -> list[tuple[float, float]]:
    """The job of a rank: (ours, by torch) in seconds per step, by pair."""
    turns = TakingTurns(schedule, config)
    stages_per_rank = SCHEDULES[schedule][1]
    trainer = Trainer(
        lambda stage: Decoder(config, stage),
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
    parser.add_argument("--pairs", type=int, default=18)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", choices=SCHEDULES, nargs="+", default=list(SCHEDULES), help="some of the schedules")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it runs")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    slow = []
    print(f"{'schedule':<18}{'ranks':>5}{'by torch, ms':>14}{'ratio':>8}  (middle half)   limit")
    for num_ranks, schedule in product(options.ranks, options.only):
        config = SMALL if options.smoke else CONFIG
        pairs = run_on_ranks(num_ranks, compare, schedule, num_ranks, options.pairs, config, timeout=3600.0)[0]
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        ratio = statistics.median(ratios)
        slow += [f"{schedule} on {num_ranks} ranks"] if ratio > LIMIT else []
        by_torch = 1e3 * statistics.median(theirs for _, theirs in pairs)
        spread = f"({ratios[len(ratios) // 4]:.3f} .. {ratios[-1 - len(ratios) // 4]:.3f})"
        verdict = "  FAILED" if ratio > LIMIT else ""
        print(f"{schedule:<18}{num_ranks:>5}{by_torch:>14.1f}{ratio:>8.3f}  {spread}   {LIMIT:g}{verdict}", flush=True)
    print(f"FAILED: {', '.join(slow)}" if slow else "passed")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
