"""GPipe and 1F1B: one stage per rank.

Neither fills the bubble; they differ in how many activations they keep. Names of times below: F a forward, B a full backward of one
microbatch on one stage, p ranks, m microbatches.
"""

from __future__ import annotations

from itertools import chain

from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import Kind, Step
from trainer_kit.pipeline.schedules.schedule import Order, actions


def gpipe(layout: StageLayout, num_microbatches: int) -> Order:
    """All forwards, then all backwards.

    Huang et al. 2019, GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, arXiv:1811.06965. Bubble
    (p - 1)(F + B). Backwards run from the first microbatch to the last, as in torch; the paper's figure draws them the other way round,
    with the same bubble and memory.
    """
    every = range(num_microbatches)
    return [[*actions(Kind.FORWARD, rank, every), *actions(Kind.BACKWARD, rank, every)] for rank in range(layout.num_ranks)]


def gpipe_peak(_layout: StageLayout, num_microbatches: int, _rank: int) -> int:
    return num_microbatches


def one_forward_one_backward(layout: StageLayout, num_microbatches: int) -> Order:
    """1F1B: as many forwards as there are ranks behind, then a forward and a backward in turn, then the backwards that are left.

    Narayanan et al. 2019, PipeDream, arXiv:1806.03377; with one update per step: Fan et al. 2021, DAPPLE, arXiv:2007.01045, and Narayanan
    et al. 2021, arXiv:2104.04473 section 2.2.1. Bubble (p - 1)(F + B) as GPipe, but rank r keeps at most p - r activations. With fewer
    microbatches than ranks, which torch refuses, the forwards at the start are all of them; otherwise the order is that which torch runs
    (its table `pipeline_order` counts the forwards of the last rank from 1 instead of 0). No transfer is hidden: where they count,
    interleaved 1F1B with one stage per rank runs twice as many forwards ahead.
    """
    return [_one_rank(rank, _warmup(layout, num_microbatches, rank), num_microbatches) for rank in range(layout.num_ranks)]


def _warmup(layout: StageLayout, num_microbatches: int, rank: int) -> int:
    return min(layout.num_ranks - 1 - rank, num_microbatches)


def _one_rank(rank: int, warmup: int, num_microbatches: int) -> list[Step]:
    forwards = actions(Kind.FORWARD, rank, range(num_microbatches))
    backwards = actions(Kind.BACKWARD, rank, range(num_microbatches))
    steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return [*forwards[:warmup], *steady, *backwards[num_microbatches - warmup :]]


def one_forward_one_backward_peak(layout: StageLayout, num_microbatches: int, rank: int) -> int:
    return min(layout.num_ranks - rank, num_microbatches)
