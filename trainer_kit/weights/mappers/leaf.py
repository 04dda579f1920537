"""What all leaf mappers share: one group, whose tensors have an order, and errors that name tensor, shape and argument.

Before editing: a leaf says how it works twice, as torch operations (`_make`) and, where it only moves elements, as boxes (`_mosaic`). The
property tests hold the two against each other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.weights.mapper import GroupText, StateGroup, StateMapper, refuse_group
from trainer_kit.weights.pieces import Piece, Shape


class Leaf(StateMapper):
    """One group. Names come first, settings are keywords."""

    def __init__(self, inputs: str | Iterable[str], outputs: str | Iterable[str], **settings: Any) -> None:
        self.inputs, self.outputs = one_or_several(inputs), one_or_several(outputs)
        self.settings = settings
        for names in (self.inputs, self.outputs):
            if len(set(names)) < len(names):
                raise ConfigurationError(f"{self!r} has a name twice; each input and each output once was expected")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_show(self.inputs)} -> {_show(self.outputs)}{''.join(f', {text}' for text in self._texts())})"

    def groups(self) -> Sequence[StateGroup]:
        return [StateGroup(frozenset(self.inputs), frozenset(self.outputs))]

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self._expect_names(tensors)
        given = [tensors[name] for name in self.inputs]
        self._check([tuple(tensor.shape) for tensor in given])
        return dict(zip(self.outputs, self._make(given), strict=True))

    def pieces(self, shapes: Mapping[str, Shape]) -> Mapping[str, Sequence[Piece]]:
        self._expect_names(shapes)
        given = [tuple(shapes[name]) for name in self.inputs]
        self._check(given)
        mosaic = self._mosaic(given)
        return {} if mosaic is None else dict(zip(self.outputs, mosaic, strict=True))

    def describe(self, group: StateGroup) -> GroupText:
        return GroupText(self.inputs, " ".join([type(self).__name__, *self._texts()]), self.outputs)

    def _check(self, shapes: Sequence[Shape]) -> None:
        """Raise ConfigurationError for shapes that do not fit, with `_misfit`."""

    @abstractmethod
    def _make(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        """The outputs in order, from tensors that have been checked."""

    def _mosaic(self, shapes: Sequence[Shape]) -> Iterable[Sequence[Piece]] | None:
        """The pieces of each output in order; None where `_make` is needed."""
        return None

    def _misfit(self, index: int, shape: Shape, expected: str) -> ConfigurationError:
        return ConfigurationError(f"{self!r}: {self.inputs[index]!r} has shape {list(shape)}, expected {expected}")

    def _dim(self, dim: int, shape: Shape, *, of_output: bool = False) -> int:
        """`dim`, counted from the front. of_output: of a tensor with one dim more than `shape`."""
        num_dims = len(shape) + of_output
        if not -num_dims <= dim < num_dims:
            raise self._misfit(0, shape, f"a shape that has dim={dim}")
        return dim % num_dims

    def _expect_names(self, names: Mapping[str, Any]) -> None:
        if len(names) != len(self.inputs) or any(name not in names for name in self.inputs):
            refuse_group(self, names)

    def _texts(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.settings.items()]


class OneToOne(Leaf):
    """One tensor to one; it keeps its name where no other is given."""

    def __init__(self, input: str, output: str | None = None, **settings: Any) -> None:
        super().__init__(input, input if output is None else output, **settings)
        self.input, self.output = self.inputs[0], self.outputs[0]
        if len(self.inputs) != 1 or len(self.outputs) != 1:
            raise ConfigurationError(f"{self!r} takes one name and gives one")


def one_or_several(names: str | Iterable[str]) -> tuple[str, ...]:
    """The names as a tuple."""
    found = (names,) if isinstance(names, str) else tuple(names)
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise ConfigurationError(f"names of tensors are texts, found {wrong[0]!r}")
    return found


def box(name: str, shape: Shape, dim: int, start: int, length: int, at: int) -> Piece:
    """`length` positions of a dim of an input from `start`, which are in the output from `at`. The other dims are whole."""
    zeros = (0,) * len(shape)
    return Piece(name, put(zeros, dim, start), put(shape, dim, length), put(zeros, dim, at), tuple(range(len(shape))))


def put(values: Shape, dim: int, value: int) -> Shape:
    """`values` with another one at `dim`."""
    return (*values[:dim], value, *values[dim + 1 :])


def _show(names: Sequence[str]) -> str:
    shown = [repr(name) for name in names]
    if len(shown) > 4:
        shown[2:-1] = ["..."]
    return ", ".join(shown) if len(names) == 1 else f"[{', '.join(shown)}]"
