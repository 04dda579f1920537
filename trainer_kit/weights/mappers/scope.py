"""A mapper under other names: `Prefix` puts text before them, `for_each` fills the placeholders of a template, once per index.

Before editing: a template is a mapper like any other, whose names happen to hold `{i}`. Nothing but names is changed, so every mapper can
be one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

import torch

from trainer_kit.exceptions import ConfigurationError, nearest
from trainer_kit.weights.mapper import PLACEHOLDER, GroupText, StateGroup, StateMapper, refuse_group
from trainer_kit.weights.mappers.parallel import Parallel
from trainer_kit.weights.pieces import Piece, Shape


class RenamedMapper(StateMapper):
    """A mapper whose names are translated at both ends. A class of its own adds how."""

    def __init__(self, inner: StateMapper) -> None:
        if not isinstance(inner, StateMapper):
            raise ConfigurationError(f"{type(self).__name__} takes a state mapper, found {inner!r}")
        self.inner = inner
        self._inner_groups = {self._outer(group): group for group in inner.groups()}
        self._outside = {name: self._input(name) for group in inner.groups() for name in group.inputs}
        self._inside = {outer: name for name, outer in self._outside.items()}

    @abstractmethod
    def _input(self, name: str) -> str:
        """An input name of the inner mapper, as it is called outside. Different names stay different."""

    @abstractmethod
    def _output(self, name: str) -> str:
        """The same for an output name."""

    def groups(self) -> Sequence[StateGroup]:
        return list(self._inner_groups)

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self._expect_names(tensors)
        made = self.inner.apply({self._inside[name]: tensor for name, tensor in tensors.items()})
        return {self._output(name): tensor for name, tensor in made.items()}

    def pieces(self, shapes: Mapping[str, Shape]) -> Mapping[str, Sequence[Piece]]:
        self._expect_names(shapes)
        found = self.inner.pieces({self._inside[name]: shape for name, shape in shapes.items()})
        return {
            self._output(name): [Piece(self._outside[p.source], p.source_offsets, p.sizes, p.offsets, p.dims) for p in pieces]
            for name, pieces in found.items()
        }

    def describe(self, group: StateGroup) -> GroupText:
        text = self.inner.describe(self._inner_groups[group])
        return GroupText(tuple(map(self._input, text.inputs)), text.operation, tuple(map(self._output, text.outputs)))

    def _expect_names(self, names: Iterable[str]) -> None:
        if any(name not in self._inside for name in names):
            refuse_group(self, names)

    def _outer(self, group: StateGroup) -> StateGroup:
        return StateGroup(frozenset(map(self._input, group.inputs)), frozenset(map(self._output, group.outputs)))


class Prefix(RenamedMapper):
    """`inner` for the tensors below a prefix: `Prefix(inner, inputs="model.")` takes `model.x` where `inner` says `x`."""

    def __init__(self, inner: StateMapper, *, inputs: str = "", outputs: str = "") -> None:
        self.inputs, self.outputs = inputs, outputs
        super().__init__(inner)

    def __repr__(self) -> str:
        return f"Prefix({self.inner!r}, inputs={self.inputs!r}, outputs={self.outputs!r})"

    def inverse(self, *, lossy: bool = False) -> Prefix:
        return Prefix(self.inner.inverse(lossy=lossy), inputs=self.outputs, outputs=self.inputs)

    def _input(self, name: str) -> str:
        return self.inputs + name

    def _output(self, name: str) -> str:
        return self.outputs + name


class Filled(RenamedMapper):
    """A template with values in its placeholders; see `for_each`."""

    def __init__(self, inner: StateMapper, values: Mapping[str, object]) -> None:
        self.values = dict(values)
        super().__init__(inner)

    def __repr__(self) -> str:
        return f"Filled({self.inner!r}, {self.values})"

    def inverse(self, *, lossy: bool = False) -> Filled:
        return Filled(self.inner.inverse(lossy=lossy), self.values)

    def _input(self, name: str) -> str:
        return fill(name, self.values)

    _output = _input


def for_each(indices: Mapping[str, Iterable[object]], mapper: StateMapper | Callable[..., StateMapper]) -> Parallel:
    """A mapper for every index, side by side: `for_each({"i": range(32)}, Rename("model.layers.{i}.norm", "layers.{i}.norm"))`.

    indices: placeholder to its values; of several every combination is taken. mapper: a template, or a function that is called with the
    indices as keyword arguments, `lambda i: ...`, where layers differ. Templates nest: one over `{e}` may be part of one over `{i}`.

    Raises ConfigurationError for a placeholder that is not in every name, since the same tensor would be taken or made several times.
    """
    if not isinstance(indices, Mapping):
        raise ConfigurationError(f'for_each(indices={indices!r}): expected a mapping from placeholder to values, such as {{"i": range(4)}}')
    found = {key: list(values) for key, values in indices.items()}
    rows = [dict(zip(found, values, strict=True)) for values in product(*found.values())]
    if not isinstance(mapper, StateMapper):
        return Parallel([mapper(**row) for row in rows])
    _expect_placeholders(mapper, {key: len(values) for key, values in found.items()})
    return Parallel([Filled(mapper, row) for row in rows])


def expand(name: str, **indices: Iterable[object]) -> list[str]:
    """All names of a template: `expand("experts.{e}.weight", e=range(2))`. Placeholders without values stay for a `for_each` around."""
    present = PLACEHOLDER.findall(name)
    if absent := [key for key in indices if key not in present]:
        raise ConfigurationError(f"expand({name!r}) has no placeholder {{{absent[0]}}}; {nearest(absent[0], present)}")
    return [fill(name, dict(zip(indices, values, strict=True))) for values in product(*map(list, indices.values()))]


def fill(name: str, values: Mapping[str, object]) -> str:
    """`name` with values in its placeholders; those without one stay."""
    return PLACEHOLDER.sub(lambda found: str(values.get(found[1], found[0])), name)


def _expect_placeholders(mapper: StateMapper, counts: Mapping[str, int]) -> None:
    names = sorted({name for group in mapper.groups() for name in (*group.inputs, *group.outputs)})
    for placeholder, count in counts.items():
        lacking = [name for name in names if placeholder not in PLACEHOLDER.findall(name)]
        if lacking and (count > 1 or len(lacking) == len(names)):
            raise ConfigurationError(
                f"for_each over {placeholder!r}: the name {lacking[0]!r} of {mapper!r} does not hold {{{placeholder}}}, so the same tensor "
                "would be in several groups; put the placeholder into the name, or this mapper beside the for_each"
            )
