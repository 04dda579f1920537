"""Where the tensors of a model are: which rank holds which box of each, and how an output is put together from such boxes.

Every rank of a run knows the same of all tensors, those of other pipeline stages too, so that each can tell who sends what to whom. Only
`memory` differs: it is that of this rank. Nothing is sent here but shapes; values travel in `transfer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from trainer_kit.mesh.layout import box_index, layout_of, local_of
from trainer_kit.mesh.team import Team
from trainer_kit.weights.pieces import Piece, Shape, whole

Box = tuple[Shape, Shape]  # offsets and sizes
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the model. boxes: those it is cut into, and the ranks that hold each. memory: the box of this rank, if it has one."""

    shape: Shape
    dtype: torch.dtype
    boxes: Mapping[Box, Sequence[int]]
    memory: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor that is wanted. piece: where it is in the memory of the ranks that have it, and in the tensor."""

    piece: Piece
    ranks: Sequence[int]
    memory: torch.Tensor | None

    def taken(self) -> torch.Tensor:
        """The elements, on a rank that has them."""
        assert self.memory is not None, "this rank is one of `ranks`"
        return self.memory[box_index(self.piece.source_offsets, self.piece.sizes)]

    def place_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where they belong in the tensor that is wanted: a view in the dims of `taken`."""
        return self.piece.in_source_dims(tensor[box_index(self.piece.offsets, self.piece.output_sizes)])


@dataclass(frozen=True, slots=True)
class Mosaic:
    """A tensor that has the very elements of boxes of sources."""

    pieces: Sequence[Piece]
    sources: Mapping[str, Source]

    def parts(self) -> Iterator[Part]:
        """Cut further, by where the boxes of its sources are."""
        for piece in self.pieces:
            source = self.sources[piece.source]
            for (offsets, sizes), ranks in source.boxes.items():
                held = Piece(piece.source, (0,) * len(sizes), sizes, offsets, tuple(range(len(sizes))))
                for part in piece.through([held]):
                    yield Part(part, ranks, source.memory)

    @property
    def first(self) -> Source:
        """Its first source; the only one of a mosaic that is a source as it is."""
        return self.sources[self.pieces[0].source]

    def is_whole_on(self, rank: int) -> bool:
        """Whether it is a tensor that the rank holds, as it is."""
        if len(self.pieces) != 1 or self.pieces[0] != whole(self.pieces[0].source, self.first.shape):
            return False
        return any(sizes == self.first.shape and rank in ranks for (_, sizes), ranks in self.first.boxes.items())

    def memory(self) -> torch.Tensor:
        """That tensor, on such a rank."""
        assert self.first.memory is not None, "it is whole on this rank"
        return self.first.memory


def find_sources(tensors: Mapping[K, torch.Tensor], team: Team) -> dict[K, Source]:
    """The tensors of all ranks, each in the place of the first rank that has it. A collective. tensors: of this rank."""
    mine = team.everywhere(lambda: {key: _told(tensor) for key, tensor in tensors.items()})
    found: dict[K, tuple[Shape, torch.dtype, dict[Box, list[int]]]] = {}
    for rank, of_rank in enumerate(team.exchange(mine)):
        for key, (shape, dtype, cut) in of_rank.items():
            _, _, boxes = found.setdefault(key, (shape, dtype, {}))
            box = ((0,) * len(shape), shape) if cut is None else cut
            if math.prod(box[1]):
                boxes.setdefault(box, []).append(rank)
    return {
        key: Source(shape, dtype, boxes, local_of(tensors[key]) if key in tensors else None)
        for key, (shape, dtype, boxes) in found.items()
    }


def all_of(name: str, source: Source) -> Mosaic:
    """The whole of a source."""
    return Mosaic([whole(name, source.shape)], {name: source})


def nearest(ranks: Sequence[int], rank: int) -> int:
    """The rank itself if it is one of them; else one of them, so that others share the work."""
    return rank if rank in ranks else ranks[rank % len(ranks)]


def _told(tensor: torch.Tensor) -> tuple[Shape, torch.dtype, Box | None]:
    """Shape and dtype of the whole, and the box of this rank; None: all of it."""
    layout = layout_of(tensor)
    return layout.shape, tensor.dtype, None if layout.is_whole else (layout.offsets, layout.sizes)
