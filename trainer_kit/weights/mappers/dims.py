"""One tensor with the same elements whose dims move, come or go: `Rename`, `Transpose`, `Squeeze`, `Unsqueeze`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.weights.mappers.leaf import OneToOne
from trainer_kit.weights.pieces import Piece, Shape


class DimsMapper(OneToOne):
    """What these are made of: a table from the dims of the output to those of the input."""

    @abstractmethod
    def _dims(self, shape: Shape) -> tuple[int | None, ...]:
        """For each dim of the output that of the input; None is a new one of size 1. Those of the input that are absent have size 1."""

    def _check(self, shapes: Sequence[Shape]) -> None:
        self._dims(shapes[0])

    def _make(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        tensor = tensors[0]
        dims = self._dims(tuple(tensor.shape))
        kept = [dim for dim in dims if dim is not None]
        gone = [dim for dim in range(tensor.ndim) if dim not in kept]
        view = tensor.permute(kept + gone)
        for _ in gone:
            view = view.squeeze(-1)
        for index, dim in enumerate(dims):
            if dim is None:
                view = view.unsqueeze(index)
        return [view]

    def _mosaic(self, shapes: Sequence[Shape]) -> Sequence[Sequence[Piece]]:
        shape = shapes[0]
        dims = self._dims(shape)
        return [[Piece(self.input, (0,) * len(shape), shape, (0,) * len(dims), dims)]]


class Rename(DimsMapper):
    """Another name for a tensor."""

    def __init__(self, input: str, output: str) -> None:
        super().__init__(input, output)

    def inverse(self, *, lossy: bool = False) -> Rename:
        return Rename(self.output, self.input)

    def _dims(self, shape: Shape) -> tuple[int | None, ...]:
        return tuple(range(len(shape)))


class Transpose(DimsMapper):
    """Swaps two dims, such as those of a linear layer that is stored as (in, out). Undoes itself."""

    def __init__(self, input: str, output: str | None = None, *, dims: tuple[int, int] = (0, 1)) -> None:
        super().__init__(input, output, dims=tuple(dims))
        self.dims = dims
        if len(dims) != 2:
            raise ConfigurationError(f"{self!r}: dims= takes the two dims that change places")

    def inverse(self, *, lossy: bool = False) -> Transpose:
        return Transpose(self.output, self.input, dims=self.dims)

    def _dims(self, shape: Shape) -> tuple[int | None, ...]:
        one, other = (self._dim(dim, shape) for dim in self.dims)
        order = list(range(len(shape)))
        order[one], order[other] = other, one
        return tuple(order)


class Unsqueeze(DimsMapper):
    """Puts in a dim of size 1 at `dim`, counted as in the output."""

    def __init__(self, input: str, output: str | None = None, *, dim: int) -> None:
        super().__init__(input, output, dim=dim)
        self.dim = dim

    def inverse(self, *, lossy: bool = False) -> Squeeze:
        return Squeeze(self.output, self.input, dim=self.dim)

    def _dims(self, shape: Shape) -> tuple[int | None, ...]:
        dim = self._dim(self.dim, shape, of_output=True)
        return (*range(dim), None, *range(dim, len(shape)))


class Squeeze(DimsMapper):
    """Takes out a dim of size 1."""

    def __init__(self, input: str, output: str | None = None, *, dim: int) -> None:
        super().__init__(input, output, dim=dim)
        self.dim = dim

    def inverse(self, *, lossy: bool = False) -> Unsqueeze:
        return Unsqueeze(self.output, self.input, dim=self.dim)

    def _dims(self, shape: Shape) -> tuple[int | None, ...]:
        dim = self._dim(self.dim, shape)
        if shape[dim] != 1:
            raise self._misfit(0, shape, f"size 1 at dim={self.dim}")
        return (*range(dim), *range(dim + 1, len(shape)))
