"""Forward only: evaluation and prediction on the layout that trains.

Nothing is kept for a backward, so the only question is the bubble. An order follows from a time slot per (stage, microbatch) that grows
along every dependency: sorted by slots, the ranks can never wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Callable

from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import Action, Kind
from trainer_kit.pipeline.schedules.rounds import rounds
from trainer_kit.pipeline.schedules.schedule import Order


def forward_loop(layout: StageLayout, num_microbatches: int) -> Order:
    """The forwards of interleaved 1F1B (arXiv:2104.04473), round by round. Bubble (p - 1) F on p ranks for times F of one stage."""
    slots = [
        indices.start * layout.stages_per_rank + turn * len(indices) + offset
        for turn in range(layout.stages_per_rank)
        for indices in rounds(layout.num_ranks, num_microbatches)
        for offset in range(len(indices))
    ]
    return _by_slot(layout, num_microbatches, lambda stage, index: slots[stage // layout.num_ranks * num_microbatches + index])


def forward_v(layout: StageLayout, num_microbatches: int) -> Order:
    """A microbatch enters every second slot and then moves one stage per slot; the two stages of a rank never meet in one slot.

    The layout is that of ZB-V (arXiv:2401.10241 section 6). Bubble 2 (p - 1) F, which is the least: the last rank gets its first input
    after p - 1 forwards, and its last output goes through p - 1 more stages.
    """
    return _by_slot(layout, num_microbatches, lambda stage, index: stage + 2 * index)


def _by_slot(layout: StageLayout, num_microbatches: int, slot: Callable[[int, int], int]) -> Order:
    """Each rank's forwards by time."""
    order: Order = []
    for rank in range(layout.num_ranks):
        passes = [(slot(stage, index), stage, index) for stage in layout.stages_of(rank) for index in range(num_microbatches)]
        order.append([Action(Kind.FORWARD, stage, index) for _, stage, index in sorted(passes)])
    return order


def no_activations(_layout: StageLayout, _num_microbatches: int, _rank: int) -> int:
    """Without a backward nothing is kept."""
    return 0
