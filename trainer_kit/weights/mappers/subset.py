"""Some of the groups of a mapper: `Only` by the names that they make, `Part` by rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.weights.mapper import GroupText, StateGroup, StateMapper, refuse_group
from trainer_kit.weights.mappers.leaf import one_or_several
from trainer_kit.weights.pieces import Piece, Shape


class Subset(StateMapper):
    """Those of the groups of `inner` that are in `kept`, each with the outputs that are wanted of it. None: its inputs are dropped."""

    def __init__(self, inner: StateMapper, kept: Mapping[StateGroup, Iterable[str]]) -> None:
        self.inner = inner
        self._kept = {group.inputs: (group, frozenset(outputs)) for group, outputs in kept.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, {len(self._kept)} groups)"

    def groups(self) -> Sequence[StateGroup]:
        return [StateGroup(inputs, outputs) for inputs, (_, outputs) in self._kept.items()]

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        _, outputs = self._of(tensors)
        return {name: tensor for name, tensor in self.inner.apply(tensors).items() if name in outputs} if outputs else {}

    def pieces(self, shapes: Mapping[str, Shape]) -> Mapping[str, Sequence[Piece]]:
        _, outputs = self._of(shapes)
        return {name: pieces for name, pieces in self.inner.pieces(shapes).items() if name in outputs} if outputs else {}

    def inverse(self, *, lossy: bool = False) -> StateMapper:
        for group, outputs in self._kept.values():
            if outputs and outputs != group.outputs:
                raise UnsupportedError(f"{self!r} has no inverse: it makes {sorted(outputs)} alone of {sorted(group.outputs)}, one group")
        if not lossy and (dropped := [name for group, outputs in self._kept.values() if not outputs for name in sorted(group.inputs)]):
            raise UnsupportedError(f"{self!r} drops {', '.join(dropped[:5])}; inverse(lossy=True) does without")
        made = frozenset().union(*(outputs for _, outputs in self._kept.values()))
        back = self.inner.inverse(lossy=lossy)
        constants = any(not group.outputs for group, _ in self._kept.values())
        return Subset(back, {group: group.outputs for group in back.groups() if (group.inputs <= made if group.inputs else constants)})

    def describe(self, group: StateGroup) -> GroupText:
        whole, outputs = self._of(dict.fromkeys(group.inputs))
        text = self.inner.describe(whole)
        return GroupText(text.inputs, text.operation if outputs else "Drop", tuple(name for name in text.outputs if name in outputs))

    def _of(self, names: Mapping[str, object]) -> tuple[StateGroup, frozenset[str]]:
        return self._kept.get(frozenset(names)) or refuse_group(self, names)


class Only(Subset):
    """What makes the named outputs, such as the backbone of a stored model. outputs: names or patterns (`*`, `?`, `[...]`).

    drop_others: the stored tensors of the other groups are left out on purpose; False, to leave them to another mapper. A group may make
    wanted and unwanted tensors; then it has no inverse. Raises ConfigurationError for a pattern that no output matches.
    """

    def __init__(self, inner: StateMapper, outputs: str | Iterable[str], *, drop_others: bool = True) -> None:
        self.outputs, self.drop_others = one_or_several(outputs), drop_others
        kept = {}
        idle = set(self.outputs)
        for group in inner.groups():
            matched = {name: [pattern for pattern in self.outputs if fnmatchcase(name, pattern)] for name in group.outputs}
            idle.difference_update(*matched.values())
            wanted = {name for name, patterns in matched.items() if patterns}
            if wanted or (drop_others and group.inputs) or not group.outputs:
                kept[group] = wanted
        if idle:
            raise ConfigurationError(f"Only(outputs=...): {inner!r} makes nothing that matches {sorted(idle)}; change the pattern")
        super().__init__(inner, kept)


class Part(Subset):
    """See `StateMapper.part`."""

    def __init__(self, inner: StateMapper, rank: int, num_ranks: int) -> None:
        if not 0 <= rank < num_ranks:
            raise ConfigurationError(f"part(rank={rank}, num_ranks={num_ranks}): expected a rank from 0 to {num_ranks - 1}")
        groups = list(inner.groups())
        mine = groups[rank * len(groups) // num_ranks : (rank + 1) * len(groups) // num_ranks]  # neighbours are often in one file
        super().__init__(inner, {group: group.outputs for group in mine})
