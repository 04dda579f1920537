"""How the names and shapes of a stored model state become those of a model: the interface of all state mappers, and the identity.

A mapper is not a reader: it never opens a file and holds no tensor between calls. It declares its groups before any data moves; the
reader then streams tensors through it, one group at a time, and frees a group's inputs when the group is done.

Before editing: `apply` is also called with meta tensors, which is how wrong shapes are found before the first byte is read. An
implementation must not look at values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer_kit.exceptions import ConfigurationError


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Input tensors that are needed together, and the output tensors that they give. No inputs: the outputs are constants."""

    inputs: frozenset[str]
    outputs: frozenset[str]


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

    def copies(self) -> Mapping[str, str]:
        """For each output that has the very bytes of one input: that input. Such tensors are read into the model's own memory."""
        return {}


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
        if foreign := sorted(tensors.keys() - self._known):
            raise ConfigurationError(f"no group of {self!r} has the inputs {', '.join(map(repr, foreign))}")
        return dict(tensors)

    def inverse(self, *, lossy: bool = False) -> IdentityMapper:
        return self

    def copies(self) -> Mapping[str, str]:
        return {name: name for name in self.names}


def check_groups(groups: Iterable[StateGroup]) -> None:
    """Raise ConfigurationError, with every fault in one message, for groups that contradict each other."""
    groups = list(groups)
    faults = [f"output {name!r} is made by {count} groups" for name, count in _repeated(group.outputs for group in groups)]
    faults += [
        f"input {name!r} is used by {count} groups; one group with several outputs is expected"
        for name, count in _repeated(group.inputs for group in groups)
    ]
    faults += [f"the group of {', '.join(sorted(group.inputs)) or 'nothing'} has no outputs" for group in groups if not group.outputs]
    if sum(not group.inputs for group in groups) > 1:
        faults.append("several groups have no inputs; all constants belong in one")
    if faults:
        raise ConfigurationError("the groups of the state mapper contradict each other: " + "; ".join(faults))


def _repeated(names: Iterable[frozenset[str]]) -> list[tuple[str, int]]:
    counts = Counter(name for group in names for name in group)
    return sorted((name, count) for name, count in counts.items() if count > 1)
