"""Interleaved 1F1B and interleaved zero bubble (ZB1P): several stages per rank, in a loop, microbatches in rounds.

Both go through the stages of a rank round by round and differ in how far forwards run ahead and in the split of the backward. Names of
times below: F a forward, B a full backward, I and W its parts for inputs and weights, of one microbatch on one stage; p ranks, v stages
per rank, m microbatches.
"""

from __future__ import annotations

from itertools import chain

from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import Action, Kind, Step
from trainer_kit.pipeline.schedules.rounds import rounds
from trainer_kit.pipeline.schedules.schedule import Order


def passes(layout: StageLayout, num_microbatches: int, rank: int, *, backward: bool) -> list[tuple[int, int]]:
    """(stage, microbatch) in the order in which a rank goes through them: per round its first stage, then its next one, ..., or back."""
    stages = layout.stages_of(rank)[:: -1 if backward else 1]
    return [(stage, index) for indices in rounds(layout.num_ranks, num_microbatches) for stage in stages for index in indices]


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
    forwards = [Action(Kind.FORWARD, *at) for at in passes(layout, num_microbatches, rank, backward=False)]
    backwards = [Action(Kind.BACKWARD, *at) for at in passes(layout, num_microbatches, rank, backward=True)]
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
    forwards = [Action(Kind.FORWARD, *at) for at in passes(layout, num_microbatches, rank, backward=False)]
    back = passes(layout, num_microbatches, rank, backward=True)
    warmup = _warmup(layout, num_microbatches, rank, per_rank_behind=1)
    order: list[Step] = [*forwards[:warmup]]
    for turn, at in enumerate(back):
        order += forwards[warmup + turn : warmup + turn + 1]
        order.append(Action(Kind.BACKWARD_INPUT, *at))
        if turn >= rank:
            order.append(Action(Kind.BACKWARD_WEIGHT, *back[turn - rank]))
    order += [Action(Kind.BACKWARD_WEIGHT, *at) for at in back[max(0, len(back) - rank) :]]
    return order


def zero_bubble_peak(layout: StageLayout, num_microbatches: int, rank: int) -> int:
    ahead = _warmup(layout, num_microbatches, rank, per_rank_behind=1) + 1 + rank
    return min(ahead, num_microbatches * layout.stages_per_rank)
