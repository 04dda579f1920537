"""How the names and shapes of a stored model state become those of a model: the interface of all state mappers, and the identity.
The others are in `mappers/`.

A mapper is not a reader: it never opens a file and holds no tensor between calls. It declares its groups before any data moves; the
reader then streams tensors through it, one group at a time, and frees a group's inputs when the group is done.

Before editing: `apply` is also called with meta tensors, which is how wrong shapes are found before the first byte is read. An
implementation must not look at values there.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.weights.pieces import Piece, Shape, whole

if TYPE_CHECKING:
    import os

    from torch import nn

    from trainer_kit.weights.mappers.fit import FitReport
    from trainer_kit.weights.reader import ModelStateReader

PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Input tensors that are needed together, and the output tensors that they give.

    No inputs: the outputs are constants. No outputs: the inputs are left out on purpose.
    """

    inputs: frozenset[str]
    outputs: frozenset[str]


@dataclass(frozen=True, slots=True)
class GroupText:
    """What `explain` shows of a group: its names in an order that tells something, and what is done."""

    inputs: tuple[str, ...]
    operation: str
    outputs: tuple[str, ...]


class StateMapper(ABC):
    """Translates one layout of a model state into another; the inputs of a group tell it which group is meant.

    An input belongs to one group only: a tensor that is wanted twice is one group with two outputs.
    """

    @abstractmethod
    def groups(self) -> Sequence[StateGroup]:
        """All groups, known without any tensor."""

    @abstractmethod
    def apply(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs of the group that has exactly these inputs. Works on meta tensors; leaves the inputs as they are."""

    @abstractmethod
    def inverse(self, *, lossy: bool = False) -> StateMapper:
        """The mapper that undoes this one exactly; with `lossy`, as well as it can. UnsupportedError where there is none."""

    def pieces(self, shapes: Mapping[str, Shape]) -> Mapping[str, Sequence[Piece]]:
        """Of the group that has exactly these inputs: the outputs that are put together of boxes of inputs, and of which ones.

        Those are read straight into the model's own memory, each rank its part. If one of the outputs is not in here, all are made by
        `apply` from whole inputs. Raises for shapes that do not fit, as `apply` does.
        """
        return {}

    def describe(self, group: StateGroup) -> GroupText:
        """One of `groups`, for `explain`."""
        return GroupText(tuple(sorted(group.inputs)), type(self).__name__, tuple(sorted(group.outputs)))

    def apply_all(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs of all groups at once, for a state that fits into memory. ConfigurationError unless the names are all inputs."""
        groups = list(self.groups())
        check_groups(groups)
        used = {name for group in groups for name in group.inputs}
        if tensors.keys() != used:
            absent, unused = sorted(used - tensors.keys()), sorted(tensors.keys() - used)
            raise ConfigurationError(f"{self!r} lacks the tensors {absent} and has no use for {unused}")
        made: dict[str, torch.Tensor] = {}
        for group in groups:
            made.update(self.apply({name: tensors[name] for name in group.inputs}))
        return made

    def part(self, rank: int, num_ranks: int) -> StateMapper:
        """The share of a rank: a run of the groups. The parts of all ranks make up this mapper."""
        from trainer_kit.weights.mappers.subset import Part

        return Part(self, rank, num_ranks)

    def explain(self) -> str:
        """A table of what becomes of what, one row for all layers that are alike."""
        from trainer_kit.weights.mappers.explain import table

        return table(self)

    def check(
        self,
        checkpoint: str | os.PathLike[str] | ModelStateReader,
        model: nn.Module | Mapping[str, torch.Tensor],
        *,
        allow_missing: Iterable[str] = (),
        allow_unexpected: Iterable[str] = (),
    ) -> FitReport:
        """A dry run of loading into `model`, which may be on the meta device: what is missing, unused or of another shape.

        Only headers are read, and nothing is raised for what does not fit: print the report, or ask it for its truth. The patterns are
        those of `load_model_state`. Raises CheckpointError if the model state cannot be read, ConfigurationError for a mapper that
        contradicts itself.
        """
        from trainer_kit.weights.mappers.fit import check_fit_of

        return check_fit_of(self, checkpoint, model, allow_missing=allow_missing, allow_unexpected=allow_unexpected)


class IdentityMapper(StateMapper):
    """Every tensor keeps its name, shape and bytes."""

    def __init__(self, names: Iterable[str]) -> None:
        if isinstance(names, str):
            raise ConfigurationError(f"IdentityMapper(names=...) takes several names, found the text {names!r}; put it in a list")
        self.names = tuple(names)
        self._known = frozenset(self.names)

    def __repr__(self) -> str:
        return f"IdentityMapper({len(self.names)} names)"

    def groups(self) -> Sequence[StateGroup]:
        return [StateGroup(frozenset((name,)), frozenset((name,))) for name in self.names]

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if foreign := tensors.keys() - self._known:
            refuse_group(self, foreign)
        return dict(tensors)

    def inverse(self, *, lossy: bool = False) -> IdentityMapper:
        return self

    def pieces(self, shapes: Mapping[str, Shape]) -> Mapping[str, Sequence[Piece]]:
        return {name: [whole(name, shape)] for name, shape in shapes.items()}

    def describe(self, group: StateGroup) -> GroupText:
        return GroupText(tuple(group.inputs), "as it is", tuple(group.outputs))


def check_groups(groups: Iterable[StateGroup]) -> None:
    """Raise ConfigurationError, with every fault in one message, for groups that contradict each other or have an unfilled placeholder."""
    groups = list(groups)
    faults = overlaps(groups)
    faults += ["a group has neither inputs nor outputs" for group in groups if not group.inputs and not group.outputs]
    if sum(not group.inputs for group in groups) > 1:
        faults.append("several groups have no inputs; all constants belong in one (Parallel does that)")
    faults += [
        f"{name!r} has a placeholder that nothing fills; put the mapper into for_each({{{found[1]!r}: ...}}, mapper)"
        for name in sorted({name for group in groups for name in (*group.inputs, *group.outputs)})
        if (found := PLACEHOLDER.search(name))
    ]
    if faults:
        raise ConfigurationError("the groups of the state mapper contradict each other: " + "; ".join(faults))


def overlaps(groups: Sequence[StateGroup]) -> list[str]:
    """A text for each name that is in several groups."""
    faults = [f"output {name!r} is made by {count} groups" for name, count in _repeated(group.outputs for group in groups)]
    return faults + [
        f"input {name!r} is used by {count} groups; one group with several outputs is expected (Copy, or Sequential of Copy and the others)"
        for name, count in _repeated(group.inputs for group in groups)
    ]


def refuse_group(mapper: StateMapper, names: Iterable[str]) -> NoReturn:
    """For `apply` and `pieces` with inputs that are no group."""
    raise ConfigurationError(f"no group of {mapper!r} has the inputs {', '.join(map(repr, sorted(names))) or 'none'}")


def _repeated(names: Iterable[frozenset[str]]) -> list[tuple[str, int]]:
    counts = Counter(name for group in names for name in group)
    return sorted((name, count) for name, count in counts.items() if count > 1)
