"""Zero bubble V (ZBV): two stages per rank in a V, backwards of weights where a rank would wait.

Rank r hosts stage r of the way down and stage 2p - 1 - r of the way up, so the last stage, with the loss, is on rank 0 and its backward
starts where memory is needed most. Names of times below: F, I, W a forward, backward of inputs, backward of weights of one microbatch on
one stage; p ranks.
"""

from __future__ import annotations

from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import Action, Kind
from trainer_kit.pipeline.schedules.schedule import Order

F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


def zbv(layout: StageLayout, num_microbatches: int) -> Order:
    """ZB-V of Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241 section 6.

    For F = I = W and 2p - 1 microbatches or more no rank waits between its first and its last computation, at the memory of 1F1B's first
    rank (2p activations of half the size). As in torch, the order for fewer microbatches is that for 2p - 1 with the missing ones left
    out.
    """
    enough = max(2 * layout.num_ranks - 1, num_microbatches)
    orders = [_one_rank(layout.num_ranks, rank, enough) for rank in range(layout.num_ranks)]
    return [[step for step in order if step.microbatch < num_microbatches] for order in orders]


class _Writer:
    """Writes the order of one rank: each call takes the next microbatch of its kind and direction."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.order: list[Action] = []
        self.stages = stages
        self.count = {(kind, way): 0 for kind in (F, I, W) for way in (0, 1)}

    def add(self, way: int, *kinds: Kind) -> None:
        for kind in kinds:
            self.order.append(Action(kind, self.stages[way], self.count[kind, way]))
            self.count[kind, way] += 1

    def add_weights_left(self, way: int) -> None:
        while self.count[W, way] < self.count[I, way]:
            self.add(way, W)


def _one_rank(num_ranks: int, rank: int, num_microbatches: int) -> list[Action]:
    down, up = 0, 1
    write = _Writer((rank, 2 * num_ranks - 1 - rank))
    count = write.count
    for _ in range(2 * (num_ranks - rank) - 1):  # until the first microbatch comes back up
        write.add(down, F)
    for _ in range(rank):
        write.add(up, F)
        write.add(down, F)
    for _ in range(num_ranks - rank):  # until the first gradient comes back down
        write.add(up, F, I, W)
    while count[F, up] < count[F, down] or count[F, down] < num_microbatches:
        if count[F, down] < num_microbatches:
            write.add(down, F)
        write.add(down, I, W)
        write.add(up, F, I, W)
    for _ in range(rank):  # gradients that others wait for come first, weights fill the waits
        write.add(down, I)
        write.add(up, I)
    for _ in range(num_ranks - rank):
        write.add(down, I, W)
    write.add_weights_left(up)
    write.add_weights_left(down)
    return write.order


def zbv_peak(layout: StageLayout, num_microbatches: int, rank: int) -> int:
    """2p, when there are enough microbatches: those of the way down and of the way up before the first backward."""
    return min(num_microbatches, 2 * layout.num_ranks - 1 - rank) + min(num_microbatches, rank + 1)
