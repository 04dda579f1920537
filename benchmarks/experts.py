"""Wall time of a layer of experts on 2 gloo ranks with ep 2, against what nobody could leave out: the exchange and the experts themselves.

    python benchmarks/experts.py [--pairs 30]

By hand: all-to-alls of the same rows, two in the forward and two in the backward, whose sizes are known before, and forward and backward
of the local experts for the rows that arrive. Ours adds the router, the counts, the sorting and the weighted sum. The two take turns, so
whatever else the machine does meets both alike, and a ratio is the median over the pairs of neighbours. One torch thread per rank. Exit
status 1 if the limit of 1.15 is not met. Beside it stands the ratio of CPU time, which says more on a machine that does other things.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from trainer_kit.mesh import MeshStrategy
from trainer_kit.models import DecoderConfig, MoEConfig
from trainer_kit.models.experts import MixtureOfExperts
from trainer_kit.parallel import parallelize_expert
from trainer_kit.testing import run_on_ranks

LIMIT = 1.15
LEAD = 3  # pairs that are not measured
NUM_EXPERTS = 8
SIZES = {  # tokens per rank, hidden size, width of an expert
    "small": (512, 256, 512),
    "large": (1024, 512, 768),
}


class Times(NamedTuple):
    """Seconds of one forward and backward: until both ranks are done, and of the processor in this one."""

    wall: float
    cpu: float


class ByHand:
    """The exchange and the experts. x: the tokens of this rank."""

    def __init__(self, layer: MixtureOfExperts, x: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._experts, self._group = layer.experts, group
        with torch.no_grad():
            chosen = layer.router(x).chosen_NK.flatten()
        counts = torch.bincount(chosen, minlength=NUM_EXPERTS)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        self._ends = arriving.view(2, -1).sum(0).cumsum(0)
        self._there = counts.view(2, -1).sum(1).tolist()
        self._here = arriving.view(2, -1).sum(1).tolist()
        self._rows = torch.randn(len(chosen), x.shape[1])

    def step(self) -> None:
        """One forward and one backward."""
        arrived = self._exchange(self._rows, self._there, self._here).requires_grad_()
        outputs = self._experts(arrived, self._ends)
        gradient = self._exchange(self._exchange(outputs.detach(), self._here, self._there), self._there, self._here)
        outputs.backward(gradient)
        assert arrived.grad is not None
        self._exchange(arrived.grad, self._here, self._there)

    def _exchange(self, x: torch.Tensor, sizes: list[int], arriving: list[int]) -> torch.Tensor:
        received = x.new_empty(sum(arriving), x.shape[1])
        dist.all_to_all_single(received, x, arriving, sizes, group=self._group)
        return received


def compare(sizes: tuple[int, int, int], num_pairs: int) -> list[tuple[Times, Times]]:
    """The job of a rank: (ours, by hand) per forward and backward, by pair."""
    context = MeshStrategy(device="cpu", ep=2).build()
    num_tokens, hidden, width = sizes
    torch.manual_seed(0)
    moe = MoEConfig(num_experts=NUM_EXPERTS, num_experts_per_token=2, intermediate_size=width)
    layer = MixtureOfExperts(DecoderConfig(vocab_size=8, num_layers=1, num_heads=8, hidden_size=hidden, moe=moe), 0.02)
    mesh = context.mesh_for("expert")
    parallelize_expert(layer, mesh)
    x = torch.randn(1, num_tokens, hidden, generator=torch.Generator().manual_seed(context.rank)).requires_grad_()
    gradient = torch.randn_like(x)
    by_hand = ByHand(layer, x[0], mesh.get_group("ep"))
    pairs = []
    for _ in range(LEAD + num_pairs):
        layer.zero_grad()
        ours = _measured(lambda: layer(x).backward(gradient))
        layer.zero_grad()
        pairs.append((ours, _measured(by_hand.step)))
    context.close()
    return pairs[LEAD:]


def _measured(step: Callable[[], None]) -> Times:
    """From when all ranks begin to when all are done."""
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    step()
    cpu = time.process_time() - cpu
    dist.barrier()
    return Times(time.perf_counter() - begin, cpu)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--only", choices=SIZES)
    parser.add_argument("--smoke", action="store_true", help="one tiny layer, to see that it runs")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sizes = {"tiny": (16, 32, 32)} if options.smoke else {size: SIZES[size] for size in SIZES if options.only in (None, size)}
    failed = []
    print(f"{'tokens, hidden, width':<24}{'by hand, ms':>12}{'ratio':>8}  (middle half)   limit  of CPU time")
    for size, numbers in sizes.items():
        pairs = run_on_ranks(2, compare, numbers, options.pairs, timeout=1800.0)[0]
        ratios = sorted(ours.wall / theirs.wall for ours, theirs in pairs)
        ratio = statistics.median(ratios)
        by_hand = 1e3 * statistics.median(theirs.wall for _, theirs in pairs)
        of_cpu = statistics.median(ours.cpu / theirs.cpu for ours, theirs in pairs)
        spread = f"({ratios[len(ratios) // 4]:.3f} .. {ratios[-len(ratios) // 4]:.3f})"
        print(f"{size} {numbers!s:<{23 - len(size)}}{by_hand:>12.1f}{ratio:>8.3f}  {spread}   {LIMIT:g}{of_cpu:>10.3f}", flush=True)
        if ratio > LIMIT:
            failed.append(f"{size} {ratio:.3f}")
    print(f"FAILED: {', '.join(failed)}" if failed else "passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
