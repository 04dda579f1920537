"""Interleaved 1F1B and interleaved zero bubble (ZB1P): several stages per rank, in a loop, microbatches in rounds.

Both go through the stages of a rank round by round and differ in how far forwards run ahead and in the split of the backward. Names of
times below: F a forward, B a full backward, I and W its parts for inputs and weights, of one microbatch on one stage; p ranks, v stages
per rank, m microbatches.
"""

from __future__ import annotations

from itertools import chain, zip_longest

from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import Kind, Step
from trainer_kit.pipeline.schedules.rounds import rounds
from trainer_kit.pipeline.schedules.schedule import Order, actions


def _passes(kind: Kind, layout: StageLayout, num_microbatches: int, rank: int) -> list[Step]:
    """All of a kind in the order in which a rank does them: per round those of its first stage, then of its next one, ..., or back."""
    stages = layout.stages_of(rank)[:: 1 if kind == Kind.FORWARD else -1]
    passes = [actions(kind, stage, indices) for indices in rounds(layout.num_ranks, num_microbatches) for stage in stages]
    return list(chain.from_iterable(passes))


def _warmup(layout: StageLayout, num_microbatches: int, rank: int, *, per_rank_behind: int) -> int:
    """How many forwards a rank runs before its first backward: the last stage must be reached, and the gradient come back."""
    first_round = len(rounds(layout.num_ranks, num_microbatches)[0])
    ahead = (layout.stages_per_rank - 1) * first_round + per_rank_behind * (layout.num_ranks - 1 - rank)
    return min(ahead, num_microbatches * layout.stages_per_rank)


def interleaved(layout: StageLayout, num_microbatches: int) -> Order:
    """Interleaved 1F1B.

    Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, arXiv:2104.04473 section 2.2.2.
    Bubble (p - 1)(F + B) for times of one stage, so v times less than 1F1B of the same model. The paper needs m to be a multiple of p, and
    torch a multiple of the number of rounds, max(1, m // p). Here any m goes: the first rounds are one microbatch longer than the others
    where it does not divide; otherwise the order is torch's.
    """
    return [_interleaved_rank(layout, num_microbatches, rank) for rank in range(layout.num_ranks)]


def _interleaved_rank(layout: StageLayout, num_microbatches: int, rank: int) -> list[Step]:
    forwards, backwards = (_passes(kind, layout, num_microbatches, rank) for kind in (Kind.FORWARD, Kind.BACKWARD))
    warmup = _warmup(layout, num_microbatches, rank, per_rank_behind=2)
    steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def interleaved_peak(layout: StageLayout, num_microbatches: int, rank: int) -> int:
    ahead = _warmup(layout, num_microbatches, rank, per_rank_behind=2) + 1
    return min(ahead, num_microbatches * layout.stages_per_rank)


def zero_bubble(layout: StageLayout, num_microbatches: int) -> Order:
    """Interleaved zero bubble, ZB1P: backwards of inputs at once, those of weights as many later as there are ranks before, to fill waits.

    Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241 section 3.1 (there ZB-H1, for one stage per rank). Bubble
    (p - 1)(F + I - W) at the memory of 1F1B's first rank. Rounds as in interleaved 1F1B; where torch has an order, it is torch's.
    """
    return [_zero_bubble_rank(layout, num_microbatches, rank) for rank in range(layout.num_ranks)]


def _zero_bubble_rank(layout: StageLayout, num_microbatches: int, rank: int) -> list[Step]:
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    forwards, inputs, weights = (_passes(kind, layout, num_microbatches, rank) for kind in kinds)
    warmup = _warmup(layout, num_microbatches, rank, per_rank_behind=1)
    later: list[Step | None] = [*[None] * rank, *weights]  # None is what a turn does not have
    turns = zip_longest(forwards[warmup:], inputs, later)
    return [*forwards[:warmup], *filter(None, chain.from_iterable(turns))]


def zero_bubble_peak(layout: StageLayout, num_microbatches: int, rank: int) -> int:
    ahead = _warmup(layout, num_microbatches, rank, per_rank_behind=1) + 1 + rank
    return min(ahead, num_microbatches * layout.stages_per_rank)
