"""Several tensors along a dim of one: `Concatenate` and its inverses `Split` and `Chunk`, `Stack` and its inverse `Unstack`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.weights.mappers.leaf import Leaf, box, one_or_several, put
from trainer_kit.weights.pieces import Piece, Shape


class _OneToMany(Leaf):
    def __init__(self, input: str, outputs: Iterable[str], *, dim: int) -> None:
        super().__init__(input, outputs, dim=dim)
        self.dim = dim
        _expect_several(self, "outputs", outputs, self.outputs)


class _ManyToOne(Leaf):
    def __init__(self, inputs: Iterable[str], output: str, *, dim: int) -> None:
        super().__init__(inputs, output, dim=dim)
        self.dim = dim
        _expect_several(self, "inputs", inputs, self.inputs)

    def _expect_dtype(self, tensors: Sequence[torch.Tensor]) -> None:
        """torch would convert in silence."""
        for name, tensor in zip(self.inputs, tensors, strict=True):
            if tensor.dtype != tensors[0].dtype:
                expected = f"{tensors[0].dtype} as {self.inputs[0]!r}"
                raise ConfigurationError(f"{self!r}: {name!r} is {tensor.dtype}, expected {expected}; put a Cast before")


class _Cut(_OneToMany):
    @abstractmethod
    def _lengths(self, shape: Shape) -> Sequence[int]:
        """The sizes of the outputs along the dim; raises if the shape does not fit."""

    def _check(self, shapes: Sequence[Shape]) -> None:
        self._lengths(shapes[0])

    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        return tensors[0].split(list(self._lengths(tuple(tensors[0].shape))), self.dim)

    def _mosaic(self, shapes: Sequence[Shape]) -> Iterable[Sequence[Piece]]:
        shape, lengths = shapes[0], self._lengths(shapes[0])
        dim = self._dim(self.dim, shape)
        return ([box(self.inputs[0], shape, dim, start, length, 0)] for start, length in zip(_starts(lengths), lengths, strict=True))


class Split(_Cut):
    """Cuts a tensor along `dim` into parts of the given sizes, such as the query, key and value rows of a fused projection."""

    def __init__(self, input: str, outputs: Iterable[str], *, sizes: Iterable[int], dim: int = 0) -> None:
        outputs = one_or_several(outputs)
        super().__init__(input, outputs, dim=dim)
        self.sizes = _sizes(self, sizes, len(outputs))

    def inverse(self, *, lossy: bool = False) -> Concatenate:
        return Concatenate(self.outputs, self.inputs[0], sizes=self.sizes, dim=self.dim)

    def _lengths(self, shape: Shape) -> Sequence[int]:
        if shape[self._dim(self.dim, shape)] != sum(self.sizes):
            raise self._misfit(0, shape, f"size {sum(self.sizes)} at dim={self.dim}, the sum of sizes={list(self.sizes)}")
        return self.sizes


class Chunk(_Cut):
    """Cuts a tensor along `dim` into parts of one size."""

    def __init__(self, input: str, outputs: Iterable[str], *, dim: int = 0) -> None:
        super().__init__(input, outputs, dim=dim)

    def inverse(self, *, lossy: bool = False) -> Concatenate:
        return Concatenate(self.outputs, self.inputs[0], dim=self.dim)

    def _lengths(self, shape: Shape) -> Sequence[int]:
        size, count = shape[self._dim(self.dim, shape)], len(self.outputs)
        if size % count:
            raise self._misfit(0, shape, f"a multiple of {count} at dim={self.dim}; Split takes uneven sizes")
        return [size // count] * count


class Concatenate(_ManyToOne):
    """Puts tensors one behind the other along `dim`: of equal size there, or of the given `sizes`, which its inverse needs."""

    def __init__(self, inputs: Iterable[str], output: str, *, sizes: Iterable[int] | None = None, dim: int = 0) -> None:
        super().__init__(inputs, output, dim=dim)
        self.sizes = None if sizes is None else _sizes(self, sizes, len(self.inputs))

    def inverse(self, *, lossy: bool = False) -> Split | Chunk:
        if self.sizes is None:
            return Chunk(self.outputs[0], self.inputs, dim=self.dim)
        return Split(self.outputs[0], self.inputs, sizes=self.sizes, dim=self.dim)

    def _check(self, shapes: Sequence[Shape]) -> None:
        dim = self._dim(self.dim, shapes[0])
        for index, shape in enumerate(shapes):
            length = shapes[0][dim] if self.sizes is None else self.sizes[index]
            if shape != put(shapes[0], dim, length):
                why = "; uneven tensors need sizes=" if self.sizes is None else f" for sizes={list(self.sizes)}"
                raise self._misfit(index, shape, f"{list(put(shapes[0], dim, length))} beside {self.inputs[0]!r}{why}")

    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        self._expect_dtype(tensors)
        return [torch.cat(list(tensors), self.dim)]

    def _mosaic(self, shapes: Sequence[Shape]) -> Iterable[Sequence[Piece]]:
        dim = self._dim(self.dim, shapes[0])
        lengths = [shape[dim] for shape in shapes]
        places = zip(self.inputs, shapes, lengths, _starts(lengths), strict=True)
        return [[box(name, shape, dim, 0, length, start) for name, shape, length, start in places]]


class Stack(_ManyToOne):
    """Puts tensors of one shape side by side along a new dim, such as the weights of experts. dim: counted as in the output."""

    def __init__(self, inputs: Iterable[str], output: str, *, dim: int = 0) -> None:
        super().__init__(inputs, output, dim=dim)

    def inverse(self, *, lossy: bool = False) -> Unstack:
        return Unstack(self.outputs[0], self.inputs, dim=self.dim)

    def _check(self, shapes: Sequence[Shape]) -> None:
        self._dim(self.dim, shapes[0], of_output=True)
        for index, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise self._misfit(index, shape, f"{list(shapes[0])} as {self.inputs[0]!r}")

    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        self._expect_dtype(tensors)
        return [torch.stack(list(tensors), self.dim)]

    def _mosaic(self, shapes: Sequence[Shape]) -> Iterable[Sequence[Piece]]:
        shape = shapes[0]
        dim, zeros = self._dim(self.dim, shape, of_output=True), (0,) * len(shape)
        dims = (*range(dim), None, *range(dim, len(shape)))
        return [[Piece(name, zeros, shape, (*zeros[:dim], at, *zeros[dim:]), dims) for at, name in enumerate(self.inputs)]]


class Unstack(_OneToMany):
    """Takes a tensor apart along `dim`, whose size is the number of outputs."""

    def __init__(self, input: str, outputs: Iterable[str], *, dim: int = 0) -> None:
        super().__init__(input, outputs, dim=dim)

    def inverse(self, *, lossy: bool = False) -> Stack:
        return Stack(self.outputs, self.inputs[0], dim=self.dim)

    def _check(self, shapes: Sequence[Shape]) -> None:
        if shapes[0][self._dim(self.dim, shapes[0])] != len(self.outputs):
            raise self._misfit(0, shapes[0], f"size {len(self.outputs)} at dim={self.dim}, the number of outputs")

    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        return tensors[0].unbind(self.dim)

    def _mosaic(self, shapes: Sequence[Shape]) -> Iterable[Sequence[Piece]]:
        dim = self._dim(self.dim, shapes[0])
        return ([entry(self.inputs[0], shapes[0], dim, index)] for index in range(len(self.outputs)))


def entry(name: str, shape: Shape, dim: int, index: int) -> Piece:
    """One position of a dim of an input, as an output that lacks this dim."""
    zeros = (0,) * len(shape)
    dims = (*range(dim), *range(dim + 1, len(shape)))
    return Piece(name, put(zeros, dim, index), put(shape, dim, 1), zeros[1:], dims)


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]


def _sizes(mapper: Leaf, sizes: Iterable[int], count: int) -> tuple[int, ...]:
    found = tuple(sizes)
    if len(found) != count or any(size < 0 for size in found):
        raise ConfigurationError(f"{mapper!r}: sizes={list(found)}, expected {count} sizes, one per part and none negative")
    return found


def _expect_several(mapper: Leaf, argument: str, given: object, names: Sequence[str]) -> None:
    if isinstance(given, str) or not names:
        raise ConfigurationError(f"{mapper!r}: {argument}={given!r}, expected a list with one name or more")
