"""From the tensors of a model to the items that the writer takes, through an export mapper: shapes first, values one group at a time.

On a mesh the inputs of a group are brought together on rank 0, which alone applies the mapper. Before editing: on every rank the outputs
must be taken in the same order, since the first one of a group is a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.layout import is_distributed
from trainer_kit.weights.mapper import StateGroup, StateMapper, check_groups
from trainer_kit.weights.whole import is_cut, whole_on_main
from trainer_kit.weights.writer import StateItem

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext


def mapped_items(
    tensors: Mapping[str, torch.Tensor], mapper: StateMapper, context: DistributedContext | None = None
) -> Iterator[StateItem]:
    """The items of an export. Every tensor of the model must belong to a group, so that nothing is left out silently.

    context: where some of the tensors are distributed.
    """
    groups = list(mapper.groups())
    check_groups(groups)
    used = {name for group in groups for name in group.inputs}
    if missing := sorted(used - tensors.keys()):
        raise ModelError(f"the export mapper needs {', '.join(missing[:5])}, which the model does not have; give the mapper of this model")
    if unused := sorted(tensors.keys() - used):
        raise ModelError(f"the export mapper leaves out {', '.join(unused[:5])} of the model; map them, or name them as left out")
    for group in groups:
        source = _Group(group, mapper, {name: tensors[name] for name in sorted(group.inputs)}, context)
        shapes = mapper.apply({name: _shape_of(tensor) for name, tensor in source.inputs.items()})
        collective = any(is_cut(tensor) for tensor in source.inputs.values())
        for name in sorted(group.outputs):
            yield StateItem(name, tuple(shapes[name].shape), shapes[name].dtype, source.getter(name), collective)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor without data."""
    if is_distributed(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.empty_like(tensor, device="meta")


class _Group:
    """Applies the mapper when the first output is asked for, and lets go of each output as it is taken."""

    def __init__(
        self, group: StateGroup, mapper: StateMapper, inputs: dict[str, torch.Tensor], context: DistributedContext | None
    ) -> None:
        self._group, self._mapper, self._context, self.inputs = group, mapper, context, inputs
        self._outputs: dict[str, torch.Tensor | None] = {}

    def getter(self, name: str) -> _Getter:
        return _Getter(self, name)

    def take(self, name: str) -> torch.Tensor | None:
        if name not in self._outputs:
            self._outputs = self._make()
        return self._outputs.pop(name)

    def _make(self) -> dict[str, torch.Tensor | None]:
        """The outputs; None for each on the ranks that only give their parts."""
        whole = {name: whole_on_main(tensor, self._context) for name, tensor in self.inputs.items()}
        if self._context is not None and not self._context.is_main:
            return dict.fromkeys(self._group.outputs)
        inputs = {name: tensor for name, tensor in whole.items() if tensor is not None}
        if any(is_cut(tensor) for tensor in self.inputs.values()):  # those are on the host now
            inputs = {name: tensor.cpu() for name, tensor in inputs.items()}
        return {**self._mapper.apply(inputs)}


class _Getter:
    """`get` of one item."""

    def __init__(self, group: _Group, name: str) -> None:
        self._group, self._name = group, name

    def __call__(self) -> torch.Tensor | None:
        return self._group.take(self._name)
