"""Stochastic rounding of float32 to bfloat16, and the noise it uses.

A value moves up with the probability of its distance from the lower neighbour, so it is right on average, where rounding to nearest
loses every update smaller than half a step. The noise of an element depends on (seed, parameter name, step, place in the whole
parameter) alone: not on other parameters, on how the parameter is cut over ranks, or on the global generators. So a resumed run,
tied copies of a parameter and any mesh draw the same.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator

import torch

from trainer_kit.mesh.layout import Layout

_MASK64 = 2**64 - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_PER_DRAW = 4  # numbers of 16 bits in one of 64
KEPT_ELEMENTS = 2**12


@functools.lru_cache(maxsize=2**16)
def noise_key(seed: int, name: str) -> int:
    """64 bits from the seed and a name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def mix(key: int, step: int) -> int:
    """Where the stream of one step begins: the splitmix64 finaliser (Steele, Lea, Flood 2014), as neighbouring keys are related."""
    x = (key + step * _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK64
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK64
    return x ^ (x >> 31)


class NoisePart:
    """A part of a parameter whose noise is drawn at once: some rows and columns of a box that lies in the whole.

    The whole is taken as a matrix with its last dim as columns; each row begins a new 64-bit number, of which every one serves four
    columns, so that a row has the same numbers however the matrix is cut.
    """

    __slots__ = ("_columns", "_draws", "_first", "_kept", "_layout", "_rows", "is_dense", "numel")

    def __init__(self, layout: Layout, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None) -> None:
        num_rows, num_columns = _matrix(layout.sizes)
        self._layout, self._rows, self._columns = layout, rows or (0, num_rows), columns or (0, num_columns)
        width = self._columns[1] - self._columns[0]
        self.numel = (self._rows[1] - self._rows[0]) * width
        start = self._columns[0] + (layout.offsets[-1] if layout.offsets else 0)
        self._draws = start // _PER_DRAW, -(-(start + width) // _PER_DRAW)  # begin and end of the 64-bit numbers that cover a row of it
        self._first = start - self._draws[0] * _PER_DRAW  # where the row begins in them
        self.is_dense = (self._draws[1] - self._draws[0]) * _PER_DRAW == width  # whether it needs all that they hold
        self._kept: torch.Tensor | None = None

    def split(self, num_elements: int) -> Iterator[NoisePart]:
        """Parts of at most this many elements, in row-major order and each without a gap; itself if it is small enough."""
        (first, last), (left, right) = self._rows, self._columns
        if self.numel <= num_elements:
            yield self
        elif right - left <= num_elements:
            step = num_elements // (right - left)
            for row in range(first, last, step):
                yield NoisePart(self._layout, (row, min(row + step, last)), self._columns)
        else:
            for row in range(first, last):
                for column in range(left, right, num_elements):
                    yield NoisePart(self._layout, (row, row + 1), (column, min(column + num_elements, right)))

    def states(self, key: int, device: torch.device) -> torch.Tensor:
        """The states of the splitmix64 generator at the 64-bit numbers of this part: `key` plus each one's number times a constant.

        The products are kept for small parts, where making them costs more than all the rest.
        """
        if self._kept is not None and self._kept.device == device:
            return self._kept + _signed(key)
        products = self._numbers(device).mul_(_signed(_GOLDEN))
        if self.numel > KEPT_ELEMENTS:
            return products.add_(_signed(key))
        self._kept = products
        return products + _signed(key)

    def _numbers(self, device: torch.device) -> torch.Tensor:
        shape, offsets, sizes = self._layout.shape or (1,), self._layout.offsets or (0,), self._layout.sizes or (1,)
        per_row = -(-shape[-1] // _PER_DRAW)
        begin, end = self._draws
        if sizes[1:-1] == shape[1:-1]:  # the rows of the box follow each other in the whole
            start = offsets[0] * math.prod(shape[1:-1]) if len(shape) > 1 else 0
            if end - begin == per_row:
                return torch.arange((start + self._rows[0]) * per_row, (start + self._rows[1]) * per_row, device=device)
            rows = torch.arange(start + self._rows[0], start + self._rows[1], device=device)
        else:
            rest = torch.arange(*self._rows, device=device)
            rows, stride = torch.zeros_like(rest), 1
            for dim in reversed(range(len(shape) - 1)):
                rows += (rest % sizes[dim] + offsets[dim]) * stride
                rest, stride = rest // sizes[dim], stride * shape[dim]
        return (rows[:, None] * per_row + torch.arange(begin, end, device=device)).view(-1)

    def of(self, draws: torch.Tensor) -> torch.Tensor:
        """The noise of the elements, of shape (numel,), from the 64-bit numbers made of `states`."""
        width = self._columns[1] - self._columns[0]
        rows = draws.view(torch.int16).view(self._rows[1] - self._rows[0], (self._draws[1] - self._draws[0]) * _PER_DRAW)
        return rows[:, self._first : self._first + width].reshape(-1)


def draw_noise(parts: list[NoisePart], keys: list[int], device: torch.device) -> torch.Tensor:
    """Integers for the elements of all parts, one after the other, uniform over the 65,536 values of int16.

    keys: where the stream of each part begins, from `mix`.
    """
    states = [part.states(key, device) for part, key in zip(parts, keys, strict=True)]
    draws = _finalise(torch.cat(states) if len(states) > 1 else states[0])
    if all(part.is_dense for part in parts):
        return draws.view(torch.int16)
    noises = [part.of(found) for part, found in zip(parts, draws.split([len(state) for state in states]), strict=True)]
    return torch.cat(noises) if len(noises) > 1 else noises[0]


def _finalise(x: torch.Tensor) -> torch.Tensor:
    """What `mix` does to a sum, in place; torch shifts signs in, which the masks take out."""
    shifted = torch.empty_like(x)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(2 ** (64 - shift) - 1))
        if factor is not None:
            x.mul_(_signed(factor))
    return x


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _matrix(sizes: tuple[int, ...]) -> tuple[int, int]:
    return (math.prod(sizes[:-1]), sizes[-1]) if sizes else (1, 1)


def round_stochastically(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Float32 numbers that bfloat16 holds exactly, each one of the two neighbours of a value; inf and nan stay. Shapes: both (N,).

    bfloat16 is the upper half of float32, and the bits of neighbours differ by one there: a uniform number in [0, 65536) added to the
    lower half carries over with exactly the probability wanted.
    """
    bits = values.view(torch.int32) + noise
    bits.add_(0x8000).bitwise_and_(-0x10000)  # the noise is signed: shift it to start from zero
    return torch.where(values.isnan(), values, bits.view(torch.float32))  # a nan of all ones would carry over into -0
