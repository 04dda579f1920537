"""Moves boxes of tensors from the ranks that hold them to those that want them, point to point.

Making a `Transfer` allocates and does what one rank can do by itself, so it may fail; `run` takes the other ranks, and every rank must
come to it. Before editing: all ranks cut the moves into the same batches, so that nobody waits for what another one sends later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainer_kit.mesh.layout import as_bytes
from trainer_kit.weights.format import num_bytes
from trainer_kit.weights.pieces import Shape
from trainer_kit.weights.regions import is_plain
from trainer_kit.weights.sources import Part, nearest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BATCH_BYTES = 64 * 2**20  # on their way to one rank at a time, or one part


@dataclass(frozen=True, slots=True)
class Road:
    """How tensors come to this rank. device: where they go; wire: where what is sent lies; group: all ranks, None in one process."""

    rank: int
    device: torch.device
    wire: torch.device
    group: ProcessGroup | None


class Want(NamedTuple):
    """A tensor that a rank wants, of its parts; or `at_hand`, which gives it there without any other rank."""

    rank: int
    shape: Shape
    dtype: torch.dtype
    parts: Iterable[Part] = ()
    at_hand: Callable[[], torch.Tensor] | None = None


class _Move(NamedTuple):
    source: int
    target: int
    part: Part
    dtype: torch.dtype
    tensor: torch.Tensor | None  # on the target

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.part.piece.sizes)


class Transfer:
    """`results`, after `run`: for each want the tensor, on the rank that wants it, and None elsewhere."""

    @torch.no_grad()
    def __init__(self, wants: Iterable[Want], road: Road) -> None:
        self._road = road
        self._moves: list[_Move] = []
        self.results = [self._take(want) for want in wants]

    def _take(self, want: Want) -> torch.Tensor | None:
        is_mine = want.rank == self._road.rank
        if want.at_hand is not None:
            return want.at_hand() if is_mine else None
        tensor = torch.empty(want.shape, dtype=want.dtype, device=self._road.device) if is_mine else None
        for part in want.parts:
            source = nearest(part.ranks, want.rank)
            move = _Move(source, want.rank, part, want.dtype, tensor)
            if source != want.rank and move.num_bytes:
                self._moves.append(move)
            elif source == want.rank and tensor is not None:
                part.place_in(tensor).copy_(part.taken())
        return tensor

    @torch.no_grad()
    def run(self) -> None:
        """Send and receive. A collective of all ranks."""
        moves, self._moves = self._moves, []
        for batch in _batches(moves):
            self._carry(batch)

    def _carry(self, moves: Sequence[_Move]) -> None:
        import torch.distributed as dist

        road, operations, arriving = self._road, [], []
        for tag, move in enumerate(moves):
            if move.source == road.rank:
                sent = plain(move.part.taken(), move.dtype, road.wire)
                operations.append(dist.P2POp(dist.isend, as_bytes(sent), move.target, road.group, tag))
            elif move.tensor is not None:
                place = move.part.place_in(move.tensor)
                is_direct = is_plain(place, road.wire.type)
                memory = place if is_direct else torch.empty(place.shape, dtype=place.dtype, device=road.wire)
                operations.append(dist.P2POp(dist.irecv, as_bytes(memory), move.source, road.group, tag))
                if not is_direct:
                    arriving.append((place, memory))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for place, memory in arriving:
            place.copy_(memory)


def _batches(moves: Iterable[_Move]) -> list[list[_Move]]:
    """Moves that are under way at the same time: for every rank that receives, so many bytes of its own."""
    batches: dict[int, list[_Move]] = {}
    before: Counter[int] = Counter()
    for move in moves:
        batches.setdefault(before[move.target] // BATCH_BYTES, []).append(move)
        before[move.target] += move.num_bytes
    return [batches[number] for number in sorted(batches)]


def plain(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device, *, copy: bool = False) -> torch.Tensor:
    """It row by row in that dtype on that device: the tensor itself if it is so already, unless a copy is asked for."""
    if not copy and tensor.dtype == dtype and is_plain(tensor, device.type):
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)
