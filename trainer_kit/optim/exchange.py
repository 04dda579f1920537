"""Moves parameters between the boxes in which they lie on the ranks of a group and the one rank that owns each whole; and back.

Not here: which rank owns what, and what it does with it (`whole.py`). One uneven all-to-all moves many parameters at once, which takes
far fewer messages than a gather for each; what travels together is limited, so that the buffers stay small beside the parameters.
Before editing: every method is a collective of the group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer_kit.mesh.layout import box_index
from trainer_kit.optim.portions import portions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ROUND_ELEMENTS = 2**24  # of the wholes, per rank of the group, that travel together


@dataclass(frozen=True, slots=True)
class Box:
    """The part of a whole that lies on one rank; sizes has a 0 where that is nothing."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of the box in the whole."""
        return whole[box_index(self.offsets, self.sizes)]


@dataclass(frozen=True, slots=True)
class _Round:
    """What travels together. The sizes count elements, by rank."""

    by_owner: list[int]  # all its parameters, those of one owner together
    owned: list[int]  # those that this rank owns
    part_sizes: list[int]  # of the parts here, for each owner
    owned_sizes: list[int]  # of the owned wholes, on each rank


class Exchange:
    """boxes: of each parameter, by rank of the group. owners: the rank that owns each."""

    def __init__(self, group: ProcessGroup, boxes: Sequence[Sequence[Box]], owners: Sequence[int]) -> None:
        self._group, self._boxes = group, boxes
        rank, ranks = group.rank(), range(group.size())
        self._rounds = []
        sizes = [sum(box.numel for box in of_ranks) for of_ranks in boxes]
        for indices in portions(range(len(boxes)), sizes.__getitem__, ROUND_ELEMENTS * group.size()):
            by_owner = [[index for index in indices if owners[index] == owner] for owner in ranks]
            part_sizes = [sum(boxes[index][rank].numel for index in of_owner) for of_owner in by_owner]
            owned_sizes = [sum(boxes[index][other].numel for index in by_owner[rank]) for other in ranks]
            self._rounds.append(_Round([index for of_owner in by_owner for index in of_owner], by_owner[rank], part_sizes, owned_sizes))

    @torch.no_grad()
    def to_owners(self, parts: Sequence[torch.Tensor], wholes: Mapping[int, torch.Tensor]) -> None:
        """Fill the wholes that this rank owns, by index, from the parts of all ranks. All tensors have one dtype and device."""
        for now in self._rounds:
            send = _packed([parts[index] for index in now.by_owner], parts[0])
            received = self._exchange(send, now.part_sizes, now.owned_sizes)
            _unpack(received, self._boxes_of_wholes(now, wholes))

    @torch.no_grad()
    def from_owners(self, wholes: Mapping[int, torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """Fill the parts here, in place, from the wholes on their owners."""
        for now in self._rounds:
            send = _packed(self._boxes_of_wholes(now, wholes), parts[0])
            received = self._exchange(send, now.owned_sizes, now.part_sizes)
            _unpack(received, [parts[index] for index in now.by_owner])

    def _boxes_of_wholes(self, now: _Round, wholes: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Views of what lies on each rank, rank by rank."""
        return [self._boxes[index][rank].of(wholes[index]) for rank in range(self._group.size()) for index in now.owned]

    def _exchange(self, send: torch.Tensor, sent: list[int], expected: list[int]) -> torch.Tensor:
        import torch.distributed as dist

        received = send.new_empty(sum(expected))
        dist.all_to_all_single(received, send, expected, sent, group=self._group)
        return received


def _packed(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """All elements in one flat tensor; an empty one of the same kind if there are none."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def _unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))
