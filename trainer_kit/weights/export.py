"""From the tensors of a model to the items that the writer takes, through an export mapper: shapes first, values one group at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.weights.mapper import StateGroup, StateMapper, check_groups
from trainer_kit.weights.writer import StateItem


def mapped_items(tensors: Mapping[str, torch.Tensor], mapper: StateMapper) -> Iterator[StateItem]:
    """The items of an export. Every tensor of the model must belong to a group, so that nothing is left out silently."""
    groups = list(mapper.groups())
    check_groups(groups)
    used = {name for group in groups for name in group.inputs}
    if missing := sorted(used - tensors.keys()):
        raise ModelError(f"the export mapper needs {', '.join(missing[:5])}, which the model does not have; give the mapper of this model")
    if unused := sorted(tensors.keys() - used):
        raise ModelError(f"the export mapper leaves out {', '.join(unused[:5])} of the model; map them, or name them as left out")
    for group in groups:
        source = _Group(group, mapper, {name: tensors[name] for name in group.inputs})
        shapes = mapper.apply({name: torch.empty_like(tensor, device="meta") for name, tensor in source.inputs.items()})
        for name in sorted(group.outputs):
            yield StateItem(name, tuple(shapes[name].shape), shapes[name].dtype, source.getter(name))


class _Group:
    """Applies the mapper when the first output is asked for, and lets go of each output as it is taken."""

    def __init__(self, group: StateGroup, mapper: StateMapper, inputs: dict[str, torch.Tensor]) -> None:
        self._group, self._mapper, self.inputs = group, mapper, inputs
        self._outputs: dict[str, torch.Tensor] = {}

    def getter(self, name: str) -> _Getter:
        return _Getter(self, name)

    def take(self, name: str) -> torch.Tensor:
        if name not in self._outputs:
            self._outputs = self._mapper.apply(self.inputs)
        return self._outputs.pop(name)


class _Getter:
    """`get` of one item."""

    def __init__(self, group: _Group, name: str) -> None:
        self._group, self._name = group, name

    def __call__(self) -> torch.Tensor:
        return self._group.take(self._name)
