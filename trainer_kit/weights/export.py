"""From the tensors of a model to the items that the writer takes, through an export mapper: shapes first, values one group at a time.

On a mesh the inputs of a group are brought together on one rank, which alone applies the mapper: the first rank of a stage, or rank 0 for
inputs that come from several stages. Before editing: on every rank the outputs must be taken in the same order, since the first one of a
group is a collective.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.weights.mapper import StateGroup, StateMapper, check_groups
from trainer_kit.weights.writer import StateItem


def mapped_items(
    items: Iterable[StateItem], mapper: StateMapper, *, copies: Collection[str] = (), of: str = "the model"
) -> Iterator[StateItem]:
    """The items of an export of `items`. Every one of them must belong to a group, so that nothing is left out silently.

    copies: names of weights that another stage writes; a group of such alone is left out. of: whose items they are, for errors.
    """
    sources, copies = {item.name: item for item in items}, frozenset(copies)
    groups = list(mapper.groups())
    check_groups(groups)
    groups = [group for group in groups if not group.inputs or not group.inputs <= copies]
    used = {name for group in groups for name in group.inputs}
    if missing := sorted(used - sources.keys()):
        raise ModelError(f"the export mapper needs {', '.join(missing[:5])}, which {of} does not have; give the mapper of {of}")
    if unused := sorted(sources.keys() - used - copies):
        raise ModelError(f"the export mapper leaves out {', '.join(unused[:5])} of {of}; map them, or name them as left out")
    for group in groups:
        source = _Group(group, mapper, {name: sources[name] for name in sorted(group.inputs)})
        shapes = mapper.apply({name: torch.empty(item.shape, dtype=item.dtype, device="meta") for name, item in source.inputs.items()})
        for name in sorted(group.outputs):
            yield StateItem(name, tuple(shapes[name].shape), shapes[name].dtype, source.getter(name), source.is_collective)


class _Group:
    """Applies the mapper when the first output is asked for, and lets go of each output as it is taken."""

    def __init__(self, group: StateGroup, mapper: StateMapper, inputs: Mapping[str, StateItem]) -> None:
        self._group, self._mapper, self.inputs = group, mapper, inputs
        self.is_collective = any(item.collective for item in inputs.values())
        self._outputs: dict[str, torch.Tensor | None] = {}

    def getter(self, name: str) -> _Getter:
        return _Getter(self, name)

    def take(self, name: str) -> torch.Tensor | None:
        if name not in self._outputs:
            self._outputs = self._make()
        return self._outputs.pop(name)

    def _make(self) -> dict[str, torch.Tensor | None]:
        """The outputs; None for each on the ranks that only give their parts."""
        whole = {name: item.get() for name, item in self.inputs.items()}
        inputs = {name: tensor for name, tensor in whole.items() if tensor is not None}
        if len(inputs) < len(whole):
            return dict.fromkeys(self._group.outputs)
        if self.is_collective:  # those that came together are on the host now
            inputs = {name: tensor.cpu() for name, tensor in inputs.items()}
        return {**self._mapper.apply(inputs)}


class _Getter:
    """`get` of one item."""

    def __init__(self, group: _Group, name: str) -> None:
        self._group, self._name = group, name

    def __call__(self) -> torch.Tensor | None:
        return self._group.take(self._name)
