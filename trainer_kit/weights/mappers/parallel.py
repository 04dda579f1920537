"""`Parallel`: mappers side by side, each with its own tensors. The constants of all are one group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.weights.mapper import GroupText, StateGroup, StateMapper, overlaps, refuse_group
from trainer_kit.weights.pieces import Piece, Shape


class Parallel(StateMapper):
    """Mappers side by side. Raises ConfigurationError naming each input that two of them use and each output that two make."""

    def __init__(self, mappers: Iterable[StateMapper]) -> None:
        self.mappers = expect_mappers(self, mappers)
        found = [(mapper, group) for mapper in self.mappers for group in mapper.groups()]
        if faults := overlaps([group for _, group in found]):
            raise ConfigurationError(f"the mappers of {self!r} overlap: {'; '.join(faults)}")
        self._of = {name: mapper for mapper, group in found for name in group.inputs}
        self._constants = [(mapper, group) for mapper, group in found if not group.inputs]
        self._groups = [group for _, group in found if group.inputs]
        if self._constants:
            self._groups.append(StateGroup(frozenset(), frozenset().union(*(group.outputs for _, group in self._constants))))

    def __repr__(self) -> str:
        return f"Parallel({len(self.mappers)} mappers)"

    def groups(self) -> Sequence[StateGroup]:
        return self._groups

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not tensors and self._constants:
            return {name: tensor for mapper, _ in self._constants for name, tensor in mapper.apply({}).items()}
        return self._child(tensors).apply(tensors)

    def inverse(self, *, lossy: bool = False) -> Parallel:
        return Parallel([mapper.inverse(lossy=lossy) for mapper in self.mappers])

    def pieces(self, shapes: Mapping[str, Shape]) -> Mapping[str, Sequence[Piece]]:
        return self._child(shapes).pieces(shapes) if shapes else {}

    def describe(self, group: StateGroup) -> GroupText:
        if group.inputs:
            return self._child(dict.fromkeys(group.inputs)).describe(group)
        texts = [mapper.describe(constants) for mapper, constants in self._constants]
        operations = dict.fromkeys(text.operation for text in texts)
        return GroupText((), ", ".join(operations), tuple(name for text in texts for name in text.outputs))

    def _child(self, names: Mapping[str, object]) -> StateMapper:
        child = self._of.get(next(iter(names), ""))
        return refuse_group(self, names) if child is None else child


def expect_mappers(owner: StateMapper, mappers: Iterable[StateMapper]) -> tuple[StateMapper, ...]:
    """The children of a composition."""
    kind = type(owner).__name__
    if isinstance(mappers, StateMapper):
        raise ConfigurationError(f"{kind}(mappers=...) takes a list of mappers, found {mappers!r}; put it in a list")
    found = tuple(mappers)
    if wrong := [mapper for mapper in found if not isinstance(mapper, StateMapper)]:
        raise ConfigurationError(f"{kind}(mappers=...) takes state mappers, found {wrong[0]!r}")
    return found
