"""`Reshape`, and the boxes that stay boxes when dims are merged or cut in two."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.weights.mappers.leaf import OneToOne
from trainer_kit.weights.pieces import Piece, Shape

MAX_PIECES = 4096  # beyond that reading the whole tensor is faster


class Reshape(OneToOne):
    """The same elements in another shape, in row-major order, such as the rows of a projection by head.

    Each of the two shapes may have one -1, for a size that follows from the others.
    """

    def __init__(self, input: str, output: str | None = None, *, source_shape: Iterable[int], shape: Iterable[int]) -> None:
        self.source_shape, self.shape = tuple(source_shape), tuple(shape)
        super().__init__(input, output, source_shape=list(self.source_shape), shape=list(self.shape))
        sizes = [math.prod(sizes) for sizes in (self.source_shape, self.shape) if -1 not in sizes]
        if any(min(sizes, default=0) < -1 or sizes.count(-1) > 1 for sizes in (self.source_shape, self.shape)):
            raise ConfigurationError(f"{self!r}: expected sizes that are not negative, and at most one -1 in each shape")
        if len(set(sizes)) > 1:
            raise ConfigurationError(f"{self!r}: the shapes have {sizes[0]} and {sizes[1]} elements; change shape=")

    def inverse(self, *, lossy: bool = False) -> Reshape:
        return Reshape(self.output, self.input, source_shape=self.shape, shape=self.source_shape)

    def _check(self, shapes: Sequence[Shape]) -> None:
        self._resolved(shapes[0])

    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        return [tensors[0].reshape(self._resolved(tuple(tensors[0].shape)))]

    def _mosaic(self, shapes: Sequence[Shape]) -> Iterable[Sequence[Piece]] | None:
        blocks = _blocks(shapes[0], self._resolved(shapes[0]))
        if blocks is None or math.prod(_num_boxes(block) for block in blocks) > MAX_PIECES:
            return None
        return [list(_pieces(self.input, shapes[0], self._resolved(shapes[0]), blocks))]

    def _resolved(self, found: Shape) -> Shape:
        """The shape of the output for an input of shape `found`."""
        if len(found) != len(self.source_shape) or any(want not in (-1, size) for size, want in zip(found, self.source_shape, strict=True)):
            raise self._misfit(0, found, f"{list(self.source_shape)}; change source_shape=")
        known, count = math.prod(size for size in self.shape if size != -1), math.prod(found)
        if -1 not in self.shape:
            fits, shape = known == count, self.shape
        else:
            fits = known > 0 and count % known == 0
            shape = tuple(count // known if size == -1 else size for size in self.shape) if fits else ()
        if not fits:
            raise self._misfit(0, found, f"one whose {count} elements fit shape={list(self.shape)}")
        return shape


Block = tuple[list[tuple[int, int]], list[tuple[int, int]]]  # (dim, size) of the input and of the output, of one product; sizes above 1


def _blocks(source: Shape, target: Shape) -> list[Block] | None:
    """The shortest stretches of dims that have one product in both shapes; None where both sides of one have several dims, or size 0."""
    if 0 in source:
        return None
    left, right = ([(dim, size) for dim, size in enumerate(shape) if size > 1] for shape in (source, target))
    blocks: list[Block] = []
    while left:
        one, other = [left.pop(0)], [right.pop(0)]
        while (a := math.prod(size for _, size in one)) != (b := math.prod(size for _, size in other)):
            if a < b:
                one.append(left.pop(0))
            else:
                other.append(right.pop(0))
        if len(one) > 1 and len(other) > 1:
            return None
        blocks.append((one, other))
    return blocks


def _num_boxes(block: Block) -> int:
    return math.prod(size for side in block for _, size in side[:-1])


def _pieces(name: str, source: Shape, target: Shape, blocks: Sequence[Block]) -> Iterator[Piece]:
    """In each block the last dims of both sides run along; the others stand still in a piece."""
    dims: list[int | None] = [None] * len(target)
    for one, other in blocks:
        dims[other[-1][0]] = one[-1][0]
    for places in product(*(product(*(range(size) for side in block for _, size in side[:-1])) for block in blocks)):
        starts, offsets, sizes = [0] * len(source), [0] * len(target), [1] * len(source)
        for (one, other), place in zip(blocks, places, strict=True):
            length = min(one[-1][1], other[-1][1])
            sizes[one[-1][0]] = length
            at = 0
            for (dim, size), index in zip((*one[:-1], *other[:-1]), place, strict=True):
                at = at * size + index
                (starts if len(one) > 1 else offsets)[dim] = index
            (offsets[other[-1][0]], starts[one[-1][0]]) = (at * length, 0) if len(one) > 1 else (0, at * length)
        yield Piece(name, tuple(starts), tuple(sizes), tuple(offsets), tuple(dims))
