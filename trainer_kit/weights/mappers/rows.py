"""One tensor, of which positions along a dim are chosen, moved or added: `Slice`, `Pad`, `Permute`, `Select`.

Sizes are settings and not taken from the tensor, since a vocabulary that is resized the wrong way is found before the load only if it was
said how large it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.weights.mapper import StateMapper
from trainer_kit.weights.mappers.leaf import OneToOne, box, put
from trainer_kit.weights.mappers.parts import entry
from trainer_kit.weights.pieces import Piece, Shape


class _Rows(OneToOne):
    """Works along a dim whose size it was told by a setting."""

    def __init__(self, input: str, output: str | None, expected: int, setting: str, *, dim: int, **settings: int | float | str) -> None:
        super().__init__(input, output, **settings, dim=dim)
        self.dim, self._expected, self._setting = dim, expected, setting

    def _check(self, shapes: Sequence[Shape]) -> None:
        if shapes[0][self._dim(self.dim, shapes[0])] != self._expected:
            raise self._misfit(0, shapes[0], f"size {self._expected} at dim={self.dim}; change {self._setting}=")


class Slice(_Rows):
    """Keeps `size` of the `source_size` positions of a dim, from `start` on, such as the rows of a vocabulary without its padding.

    Lossy: the inverse is a `Pad` with zeros.
    """

    def __init__(self, input: str, output: str | None = None, *, source_size: int, size: int, start: int = 0, dim: int = 0) -> None:
        super().__init__(input, output, source_size, "source_size", source_size=source_size, size=size, start=start, dim=dim)
        self.source_size, self.size, self.start = source_size, size, start
        if start < 0 or size < 0 or start + size > source_size:
            raise ConfigurationError(f"{self!r}: {size} positions from {start} are not in {source_size}; change size= or start=")

    def inverse(self, *, lossy: bool = False) -> Pad:
        if not lossy:
            raise UnsupportedError(f"{self!r} leaves out {self.source_size - self.size} positions; inverse(lossy=True) fills in zeros")
        return Pad(self.output, self.input, source_size=self.size, size=self.source_size, start=self.start, dim=self.dim)

    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        return [tensors[0].narrow(self.dim, self.start, self.size)]

    def _mosaic(self, shapes: Sequence[Shape]) -> Iterable[Sequence[Piece]]:
        return [[box(self.input, shapes[0], self._dim(self.dim, shapes[0]), self.start, self.size, 0)]]


class Pad(_Rows):
    """Puts the `source_size` positions of a dim into `size` ones, from `start` on. The new ones hold `fill`.

    fill: a number, or "mean" for the mean over the positions that are there, taken in float32 (float64 of float64).
    Lossy, since new rows may have been trained: the inverse is a `Slice`.
    """

    def __init__(
        self, input: str, output: str | None = None, *, source_size: int, size: int, start: int = 0, dim: int = 0, fill: float | str = 0.0
    ) -> None:
        super().__init__(input, output, source_size, "source_size", source_size=source_size, size=size, start=start, fill=fill, dim=dim)
        self.source_size, self.size, self.start, self.fill = source_size, size, start, fill
        if start < 0 or source_size < 0 or start + source_size > size:
            raise ConfigurationError(f"{self!r}: {source_size} positions from {start} do not fit into {size}; change size= or start=")
        if isinstance(fill, str) and (fill != "mean" or not source_size):
            raise ConfigurationError(f'{self!r}: fill={fill!r}, expected a number, or "mean" of one position or more')

    def inverse(self, *, lossy: bool = False) -> Slice:
        if not lossy:
            raise UnsupportedError(f"{self!r} adds {self.size - self.source_size} positions; inverse(lossy=True) takes them away again")
        return Slice(self.output, self.input, source_size=self.size, size=self.source_size, start=self.start, dim=self.dim)

    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        tensor = tensors[0]
        shape = put(tuple(tensor.shape), self.dim % tensor.ndim, self.size)
        padded = tensor.new_full(shape, 0.0 if isinstance(self.fill, str) else self.fill)
        if isinstance(self.fill, str):
            if not tensor.is_floating_point():
                raise ConfigurationError(f'{self!r}: fill="mean" needs floating point, {self.input!r} is {tensor.dtype}; give a number')
            wide = torch.promote_types(tensor.dtype, torch.float32)
            padded.copy_(tensor.mean(self.dim, keepdim=True, dtype=wide))
        padded.narrow(self.dim, self.start, self.source_size).copy_(tensor)
        return [padded]


class Permute(_Rows):
    """Reorders the positions of a dim: position k of the output is position `order[k]` of the input.

    The orders of rotary layouts come from `half_split_order`.
    """

    def __init__(self, input: str, output: str | None = None, *, order: Iterable[int], dim: int = 0) -> None:
        self.order = tuple(order)
        super().__init__(input, output, len(self.order), "order", dim=dim)
        if sorted(self.order) != list(range(len(self.order))):
            raise ConfigurationError(f"{self!r}: order= must hold each of 0..{len(self.order) - 1} once")

    def inverse(self, *, lossy: bool = False) -> Permute:
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return Permute(self.output, self.input, order=back, dim=self.dim)

    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        return [tensors[0].index_select(self.dim, torch.tensor(self.order, dtype=torch.int64, device=tensors[0].device))]

    def _mosaic(self, shapes: Sequence[Shape]) -> Iterable[Sequence[Piece]]:
        dim = self._dim(self.dim, shapes[0])
        return [[box(self.input, shapes[0], dim, start, length, at) for start, length, at in _runs(self.order)]]


class Select(OneToOne):
    """One position of a dim, which goes away: a layer or an expert out of a stacked tensor. The others are lost: no inverse."""

    def __init__(self, input: str, output: str | None = None, *, index: int, dim: int = 0) -> None:
        super().__init__(input, output, index=index, dim=dim)
        self.index, self.dim = index, dim

    def inverse(self, *, lossy: bool = False) -> StateMapper:
        raise UnsupportedError(f"{self!r} has no inverse, not even a lossy one: the rest of {self.input!r} is lost; Unstack keeps it")

    def _check(self, shapes: Sequence[Shape]) -> None:
        size = shapes[0][self._dim(self.dim, shapes[0])]
        if not -size <= self.index < size:
            raise self._misfit(0, shapes[0], f"a shape that has index={self.index} at dim={self.dim}")

    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        return [tensors[0].select(self.dim, self.index)]

    def _mosaic(self, shapes: Sequence[Shape]) -> Iterable[Sequence[Piece]]:
        dim = self._dim(self.dim, shapes[0])
        return [[entry(self.input, shapes[0], dim, self.index % shapes[0][dim])]]


def half_split_order(num_heads: int, head_size: int, rotary_size: int | None = None) -> tuple[int, ...]:
    """The order for `Permute` from interleaved to half-split rotary rows, of a query or key projection with `num_heads` heads.

    Interleaved (Meta's Llama, GPT-J): rows 2i and 2i + 1 of a head are rotated together. Half-split (Hugging Face): rows i and
    i + rotary_size / 2 are. rotary_size: how many rows of each head are rotated, by default all; the rest stays in its place.
    The other direction is the inverse of the `Permute`.
    """
    rotary = head_size if rotary_size is None else rotary_size
    if rotary % 2 or not 0 <= rotary <= head_size:
        raise ConfigurationError(f"half_split_order: {rotary} rotary rows per head, expected an even number up to head_size={head_size}")
    of_head = [*range(0, rotary, 2), *range(1, rotary, 2), *range(rotary, head_size)]
    return tuple(head * head_size + row for head in range(num_heads) for row in of_head)


def _runs(order: Sequence[int]) -> Iterable[tuple[int, int, int]]:
    """Stretches of consecutive positions: where each starts in the input, its length, where it starts in the output."""
    at = 0
    while at < len(order):
        length = 1
        while at + length < len(order) and order[at + length] == order[at] + length:
            length += 1
        yield order[at], length, at
        at += length
