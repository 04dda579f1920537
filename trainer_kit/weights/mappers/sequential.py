"""`Sequential`: mappers one after another. Its groups are the connected components of the groups of all stages.

Names follow one rule: a tensor that a stage has no use for passes it unchanged. So does a stored tensor that only a later stage takes. A
name that is wanted twice, or that two tensors would have at the same time, is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.weights.mapper import GroupText, StateGroup, StateMapper, refuse_group
from trainer_kit.weights.mappers.parallel import expect_mappers
from trainer_kit.weights.pieces import Piece, Shape, whole

MAX_CLIPS = 100_000  # pairs of pieces that are tried for one output, half a second; with more of them its inputs are read whole


@dataclass(frozen=True, slots=True)
class Step:
    """A group of one of the stages."""

    stage: int
    group: StateGroup


@dataclass(slots=True)
class Component:
    """Steps that hang together, by stage, with the names that come in and go out."""

    steps: list[Step]
    inputs: list[str]
    outputs: list[str]


class Sequential(StateMapper):
    """Mappers one after another: the outputs of each are inputs of the next, by name. Other names pass through unchanged."""

    def __init__(self, mappers: Iterable[StateMapper]) -> None:
        self.mappers = expect_mappers(self, mappers)
        self._components = {frozenset(part.inputs): part for part in _Builder(self.mappers).components()}
        self._groups = [StateGroup(inputs, frozenset(part.outputs)) for inputs, part in self._components.items()]

    def __repr__(self) -> str:
        return f"Sequential({len(self.mappers)} mappers)"

    def groups(self) -> Sequence[StateGroup]:
        return self._groups

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state = dict(tensors)
        for stage, steps in _by_stage(self._component(tensors)):
            made: dict[str, torch.Tensor] = {}
            for step in steps:
                made.update(self.mappers[stage].apply({name: state.pop(name) for name in step.group.inputs}))
            state.update(made)
        return state

    def inverse(self, *, lossy: bool = False) -> Sequential:
        return Sequential([mapper.inverse(lossy=lossy) for mapper in reversed(self.mappers)])

    def pieces(self, shapes: Mapping[str, Shape]) -> Mapping[str, Sequence[Piece]]:
        state: dict[str, _Mosaic] = {name: _Mosaic(tuple(shape), [whole(name, shape)]) for name, shape in shapes.items()}
        for stage, steps in _by_stage(self._component(shapes)):
            made: dict[str, _Mosaic] = {}
            for step in steps:
                inner = {name: state.pop(name) for name in step.group.inputs if name in state}
                if len(inner) == len(step.group.inputs) > 0:
                    outer = self.mappers[stage].pieces({name: mosaic.shape for name, mosaic in inner.items()})
                    made.update({name: mosaic for name, pieces in outer.items() if (mosaic := _through(pieces, inner))})
            state.update(made)
        return {name: mosaic.pieces for name, mosaic in state.items()}

    def describe(self, group: StateGroup) -> GroupText:
        component = self._component(dict.fromkeys(group.inputs))
        operations, inputs, outputs = [], [], []
        for stage, steps in _by_stage(component):
            texts = [self.mappers[stage].describe(step.group) for step in steps]
            operations.append(", ".join(dict.fromkeys(text.operation for text in texts)))
            inputs += [name for text in texts for name in text.inputs if name in group.inputs]
            outputs += [name for text in texts for name in text.outputs if name in group.outputs]
        last = tuple(reversed(dict.fromkeys(reversed(outputs))))  # a name may have been in use before
        told = [text for text in dict.fromkeys(operations) if text not in ("Rename", "as it is")] or operations[:1]
        return GroupText(tuple(dict.fromkeys(inputs)), " → ".join(told), last)

    def _component(self, names: Mapping[str, object]) -> Component:
        component = self._components.get(frozenset(names))
        return refuse_group(self, names) if component is None else component


@dataclass(frozen=True, slots=True)
class _Mosaic:
    """An intermediate tensor as pieces of the inputs."""

    shape: Shape
    pieces: Sequence[Piece]


def _through(outer: Sequence[Piece], inner: Mapping[str, _Mosaic]) -> _Mosaic | None:
    """An output of a stage by the inputs of the whole; None where that takes too many pieces."""
    if sum(len(inner[piece.source].pieces) for piece in outer) > MAX_CLIPS or not outer:
        return None
    ends = zip(*([o + s for o, s in zip(piece.offsets, piece.output_sizes, strict=True)] for piece in outer), strict=True)
    return _Mosaic(tuple(map(max, ends)), [found for piece in outer for found in piece.through(inner[piece.source].pieces)])


def _by_stage(component: Component) -> Iterable[tuple[int, list[Step]]]:
    stages: dict[int, list[Step]] = {}
    for step in component.steps:
        stages.setdefault(step.stage, []).append(step)
    return stages.items()


class _Builder:
    """Follows each name through the stages, and joins the groups that it ties together."""

    def __init__(self, mappers: Sequence[StateMapper]) -> None:
        self._steps: list[Step] = []
        self._parent: list[int] = []
        self._live: dict[str, int] = {}  # name that is there after the stages so far: the step that makes it
        self._first: dict[str, int] = {}  # name that comes from outside: the step that takes it
        self._seen: set[str] = set()  # names that earlier stages take or make
        self._faults: list[str] = []
        for stage, mapper in enumerate(mappers):
            self._add(stage, mapper.groups())
        if self._faults:
            raise ConfigurationError(f"the mappers of Sequential({len(mappers)} mappers) overlap: {'; '.join(dict.fromkeys(self._faults))}")

    def components(self) -> list[Component]:
        parts: dict[int, Component] = {}
        for index, step in enumerate(self._steps):
            parts.setdefault(self._root(index), Component([], [], [])).steps.append(step)
        for name, index in self._first.items():
            parts[self._root(index)].inputs.append(name)
        for name, index in self._live.items():
            parts[self._root(index)].outputs.append(name)
        constants = [part for part in parts.values() if not part.inputs]
        found = [part for part in parts.values() if part.inputs]
        steps = sorted((step for part in constants for step in part.steps), key=lambda step: step.stage)
        outputs = [name for part in constants for name in part.outputs]
        return [*found, Component(steps, [], outputs)] if outputs else found

    def _add(self, stage: int, groups: Sequence[StateGroup]) -> None:
        first = len(self._steps)
        for group in groups:
            self._parent.append(len(self._steps))
            self._steps.append(Step(stage, group))
        for index in range(first, len(self._steps)):
            for name in self._steps[index].group.inputs:
                self._take(name, index)
        for index in range(first, len(self._steps)):
            for name in self._steps[index].group.outputs:
                if name in self._live:
                    self._faults.append(f"stage {stage} makes {name!r}, which an earlier stage made and stage {stage} does not take")
                self._live[name] = index
        self._seen.update(name for group in groups for name in (*group.inputs, *group.outputs))

    def _take(self, name: str, index: int) -> None:
        maker = self._live.pop(name, None)
        if maker is not None:
            self._parent[self._root(index)] = self._root(maker)
        elif name in self._first or name in self._seen:
            stage = self._steps[index].stage
            self._faults.append(f"stage {stage} takes {name!r}, which an earlier stage used up; Copy makes two of one")
        else:
            self._first[name] = index

    def _root(self, index: int) -> int:
        while self._parent[index] != index:
            self._parent[index] = self._parent[self._parent[index]]
            index = self._parent[index]
        return index
