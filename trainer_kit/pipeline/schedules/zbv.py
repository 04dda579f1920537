"""Zero bubble V (ZBV): two stages per rank in a V, backwards of weights where a rank would wait.

Rank r hosts stage r of the way down and stage 2p - 1 - r of the way up, so the last stage, with the loss, is on rank 0 and its backward
starts where memory is needed most. Names of times below: F, I, W a forward, backward of inputs, backward of weights of one microbatch on
one stage; p ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import Kind, Step
from trainer_kit.pipeline.schedules.schedule import Order, actions

F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


def zbv(layout: StageLayout, num_microbatches: int) -> Order:
    """ZB-V of Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241 section 6.

    For F = I = W and 2p - 1 microbatches or more no rank waits between its first and its last computation, at the memory of 1F1B's first
    rank (2p activations of half the size). As in torch, the order for fewer microbatches is that for 2p - 1 with the missing ones left
    out.
    """
    num_ranks, enough = layout.num_ranks, max(2 * layout.num_ranks - 1, num_microbatches)
    orders = [_one_rank(num_ranks, rank, enough) for rank in range(num_ranks)]
    if enough > num_microbatches:
        orders = [[step for step in order if step.parts[0].microbatch < num_microbatches] for order in orders]
    return orders


def _one_rank(num_ranks: int, rank: int, num_microbatches: int) -> list[Step]:
    order: list[Step] = []

    def write(times: int, *kinds: Iterator[Step]) -> None:
        """So many times the next one of each."""
        order.extend(chain.from_iterable(zip(*(islice(kind, times) for kind in kinds), strict=True)))

    f_down, i_down, w_down = (iter(actions(kind, rank, range(num_microbatches))) for kind in (F, I, W))
    f_up, i_up, w_up = (iter(actions(kind, 2 * num_ranks - 1 - rank, range(num_microbatches))) for kind in (F, I, W))
    behind = num_ranks - 1 - rank
    write(2 * behind + 1, f_down)  # until the first microbatch comes back up
    write(rank, f_up, f_down)
    write(behind + 1, f_up, i_up, w_up)  # until the first gradient comes back down
    write(num_microbatches - behind - num_ranks, f_down, i_down, w_down, f_up, i_up, w_up)
    write(behind, i_down, w_down, f_up, i_up, w_up)
    write(rank, i_down, i_up)  # gradients that others wait for come first, weights fill the waits
    write(behind + 1, i_down, w_down)
    write(rank, w_up)
    write(rank, w_down)
    return order


def zbv_peak(layout: StageLayout, num_microbatches: int, rank: int) -> int:
    """2p, when there are enough microbatches: those of the way down and of the way up before the first backward."""
    return min(num_microbatches, 2 * layout.num_ranks - 1 - rank) + min(num_microbatches, rank + 1)
