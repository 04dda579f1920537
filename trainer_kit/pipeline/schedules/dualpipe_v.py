"""DualPipeV: two stages per rank in a V, forwards and backwards of the two directions in pairs.

The pairs are there to hide the communication inside one part behind the computation of the other; without that the schedule is still
close to zero bubble. Names of times below: F a forward, B a full backward, W its part for weights, F&B a pair; p ranks.
"""

from __future__ import annotations

from collections import deque

from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import Action, Kind, Pair, Step
from trainer_kit.pipeline.schedules.schedule import Order, actions

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


def dualpipe_v(layout: StageLayout, num_microbatches: int) -> Order:
    """DeepSeek-AI 2024, DeepSeek-V3 Technical Report, arXiv:2412.19437 section 3.2.1, cut in half: github.com/deepseek-ai/DualPipe.

    Bubble (p - 1)(F&B + B - 3W) and 2p + 1 activations of a stage on each rank. It needs 2p microbatches, to fill the V once before the
    first pair.
    """
    return [_one_rank(layout.num_ranks, rank, num_microbatches) for rank in range(layout.num_ranks)]


class _Writer:
    """Writes the order of one rank: each call takes the next microbatch of its direction; weights wait in one queue."""

    def __init__(self, stages: tuple[int, int], num_microbatches: int) -> None:
        self.order: list[Step] = []
        self.forwards, self.backwards = ([iter(actions(kind, stage, range(num_microbatches))) for stage in stages] for kind in (F, B))
        self.weights: deque[Action] = deque()

    def forward(self, way: int) -> None:
        self.order.append(next(self.forwards[way]))

    def backward(self, way: int, kind: Kind = B) -> None:
        action = next(self.backwards[way])._replace(kind=kind)
        self.order.append(action)
        if kind == I:
            self.weights.append(action._replace(kind=W))

    def pair(self, forward: int, backward: int) -> None:
        self.order.append(Pair(next(self.forwards[forward]), next(self.backwards[backward])))

    def oldest_weights(self) -> None:
        if self.weights:
            self.order.append(self.weights.popleft())


def _one_rank(num_ranks: int, rank: int, num_microbatches: int) -> list[Step]:
    down, up, behind = 0, 1, num_ranks - rank - 1
    write = _Writer((rank, 2 * num_ranks - 1 - rank), num_microbatches)
    for _ in range(2 * behind):
        write.forward(down)
    for _ in range(rank + 1):
        write.forward(down)
        write.forward(up)
    for _ in range(behind):
        write.backward(up, I)
        write.oldest_weights()
        write.forward(up)
    for turn in range(num_microbatches - 2 * num_ranks + rank + 1):
        if turn == 0 and not behind:  # the gradient of the last stage down is not there yet: waiting for a pair would cost more
            write.forward(down)
            write.backward(up)
        else:
            write.pair(down, up)
        write.pair(up, down)
    for _ in range(behind):
        write.backward(up)
        write.pair(up, down)
    _cool_down(write, rank, behind)
    return write.order


def _cool_down(write: _Writer, rank: int, behind: int) -> None:
    """The last backwards: from the middle on split, so that weights are left for the waits at the end."""
    down, up = 0, 1
    kinds = [B] * (rank + 1) + [I] * (rank + 1)
    for turn in range(rank + 1):
        write.backward(up, kinds[2 * turn])
        write.backward(down, kinds[2 * turn + 1])
    for _ in range(behind):
        write.oldest_weights()
        write.backward(down, I)
    for _ in range(rank + 1):
        write.oldest_weights()


def dualpipe_v_peak(layout: StageLayout, _num_microbatches: int, _rank: int) -> int:
    return 2 * layout.num_ranks + 1
