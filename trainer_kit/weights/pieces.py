"""`Piece`: a box of an output of a state mapper that has the very elements of a box of one input, its dims perhaps in another order.

An output that is a mosaic of pieces needs no whole input: the reader fills the part of a rank from those bytes of the files that belong to
it, straight into the memory of the parameter. Renames, transposes, concatenations, stacks, chunks and permutations are such; a cast or a
sum is not. A piece knows shapes and no values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of an output, and the box of an input that it equals.

    source: name of the input. source_offsets, sizes: where its box begins, and how large it is, per dim of the input.
    offsets: where the box of the output begins. dims: for each dim of the output the dim of the input that it is, or None for a dim of
    size 1 which the input does not have. Dims of the input that are in no place of `dims` have size 1 in the box.
    """

    source: str
    source_offsets: Shape
    sizes: Shape
    offsets: Shape
    dims: tuple[int | None, ...]

    @property
    def output_sizes(self) -> Shape:
        """The size of the box per dim of the output."""
        return tuple(1 if dim is None else self.sizes[dim] for dim in self.dims)

    def clip(self, offsets: Sequence[int], sizes: Sequence[int]) -> Piece | None:
        """The part of it inside of a box of the output, or None. It keeps its place in the output."""
        starts, lengths = list(self.source_offsets), list(self.sizes)
        place = []
        for dim, mine, length, offset, size in zip(self.dims, self.offsets, self.output_sizes, offsets, sizes, strict=True):
            first, last = max(mine, offset), min(mine + length, offset + size)
            if first >= last:
                return None
            place.append(first)
            if dim is not None:
                starts[dim] += first - mine
                lengths[dim] = last - first
        return replace(self, source_offsets=tuple(starts), sizes=tuple(lengths), offsets=tuple(place))

    def through(self, inner: Iterable[Piece]) -> Iterator[Piece]:
        """This piece of an output of a second mapper, where `inner` are the pieces of its source, which a first mapper makes."""
        for found in inner:
            part = found.clip(self.source_offsets, self.sizes)
            if part is None:
                continue
            offsets = (
                offset if dim is None else offset + part.offsets[dim] - self.source_offsets[dim]
                for offset, dim in zip(self.offsets, self.dims, strict=True)
            )
            dims = tuple(None if dim is None else part.dims[dim] for dim in self.dims)
            yield Piece(part.source, part.source_offsets, part.sizes, tuple(offsets), dims)

    def in_source_dims(self, box: torch.Tensor) -> torch.Tensor:
        """A view of `box`, a tensor of `output_sizes`, with the dims of the input: of shape `sizes`."""
        kept = [(dim, index) for index, dim in enumerate(self.dims) if dim is not None]
        for index in reversed([index for index, dim in enumerate(self.dims) if dim is None]):
            box = box.select(index, 0)
        order = [place for place, _ in sorted(enumerate(dim for dim, _ in kept), key=lambda pair: pair[1])]
        box = box.permute(order) if order else box
        for dim in sorted(set(range(len(self.sizes))) - {dim for dim, _ in kept}):
            box = box.unsqueeze(dim)
        return box


def whole(name: str, shape: Sequence[int]) -> Piece:
    """All of an input as all of an output."""
    zeros = (0,) * len(shape)
    return Piece(name, zeros, tuple(shape), zeros, tuple(range(len(shape))))
