"""Looped breadth-first: several stages per rank, each goes through all microbatches before the next one starts.

It keeps the activations of everything, which is its price for touching the parameters of a stage in one stretch per direction.
"""

from __future__ import annotations

from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import Kind, Step
from trainer_kit.pipeline.schedules.schedule import Order, actions


def breadth_first(layout: StageLayout, num_microbatches: int) -> Order:
    """All microbatches through the first stage of a rank, then through the next; then everything backwards, in reverse.

    Lamy-Poirier 2022, Breadth-First Pipeline Parallelism, arXiv:2211.05953. Bubble (p - 1)(F + B) for times of one stage and at least as
    many microbatches as the p ranks.
    """
    return [_one_rank(layout, num_microbatches, rank) for rank in range(layout.num_ranks)]


def _one_rank(layout: StageLayout, num_microbatches: int, rank: int) -> list[Step]:
    order: list[Step] = []
    for stage in layout.stages_of(rank):
        order += actions(Kind.FORWARD, stage, range(num_microbatches))
    for stage in reversed(layout.stages_of(rank)):
        order += actions(Kind.BACKWARD, stage, reversed(range(num_microbatches)))
    return order


def breadth_first_peak(layout: StageLayout, num_microbatches: int, _rank: int) -> int:
    return num_microbatches * layout.stages_per_rank
