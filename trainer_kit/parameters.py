"""The parameter table: one row per parameter, read by everything that deals with parameters one by one.

A row tells where its parameter lies (`layout`), what its gradient still needs along each mesh dimension (`contracts`), and gives the
local tensor that optimizers, norms and finite checks work on (`local`).

A tied parameter has one row, under its first name in the order of the model; the other names are aliases. Names are global: a
stage numbers its layers as the whole model does. A weight that is tied between stages has a row in each of them, under the same name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.contracts import Contracts, contracts_of, missing_dimensions
from trainer_kit.mesh.layout import Layout, is_distributed, layout_of, like, local_of
from trainer_kit.names import state_tensors
from trainer_kit.ties import tied_parameters

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter: its canonical name, its other names, the tensor, and the stage that holds it.

    local: the part of this rank, a parameter of its own that shares the storage; `parameter` itself if that is plain.
    """

    name: str
    aliases: tuple[str, ...]
    parameter: nn.Parameter
    stage: int
    local: nn.Parameter
    layout: Layout
    contracts: Contracts
    stages: tuple[int, ...] = ()  # all that hold it; several if it is tied

    @property
    def trainable(self) -> bool:
        """Whether it gets gradients."""
        return self.parameter.requires_grad

    def laid_out(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape of `self.local` as the whole that it is a part of: a DTensor around its memory if the parameter is one."""
        return like(self.parameter, local)

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of this rank, sharing memory, of a tensor that is whole or laid out as the parameter is."""
        return local_of(tensor) if is_distributed(tensor) else tensor.detach()[self.layout.box]


class StateEntry(NamedTuple):
    """What every rank knows of a tensor of the model state, be it here or on other stages.

    stages: those that hold it. is_tie: whether the stage says that it is the weight of an earlier one. cut: along which mesh dimensions,
    and the sizes of the first part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stages: tuple[int, ...]
    is_parameter: bool
    is_trainable: bool
    is_tie: bool
    cut: tuple[tuple[str, ...], tuple[int, ...]]


class ParameterTable:
    """Rows of all parameters and the persistent buffers of the stages of this rank.

    stages: the modules; indices: their places in the model, which has `num_stages`.
    """

    def __init__(self, stages: Sequence[nn.Module], *, indices: Sequence[int] = (0,), num_stages: int = 1) -> None:
        self._stages = list(stages)
        self.rows: list[ParameterRow] = []
        self.buffers: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}  # every second name -> canonical name
        self._of_stages: list[tuple[int, str, torch.Tensor]] = []  # all buffers, with their stage
        self._ties: set[tuple[int, str]] = set()  # (stage, canonical name) of weights of earlier stages
        for index, stage in zip(indices, stages, strict=True):
            self._add(index, stage, tied_parameters(stage) if num_stages > 1 else {})
        self._of_model: list[StateEntry] | None = None

    def _add(self, index: int, stage: nn.Module, ties: Mapping[str, str]) -> None:
        names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in state_tensors(stage):
            known = names.setdefault(tensor, [])
            if name in ties and not known:
                known.append(ties[name])
                self._ties.add((index, ties[name]))
            known.append(name)
        for tensor, (name, *aliases) in names.items():
            self.aliases |= dict.fromkeys(aliases, name)
            if isinstance(tensor, nn.Parameter):
                local, layout = _local_parameter(tensor), layout_of(tensor)
                self.rows.append(ParameterRow(name, tuple(aliases), tensor, index, local, layout, contracts_of(tensor), (index,)))
            else:
                self.buffers.setdefault(name, tensor)
                self._of_stages.append((index, name, tensor))
        self._check_complete(stage, names)

    def _check_complete(self, stage: nn.Module, known: Collection[torch.Tensor]) -> None:
        if lost := [name for name, parameter in stage.named_parameters() if parameter not in known]:
            raise ModelError(
                f"state_dict() of the model leaves out {', '.join(map(repr, lost[:5]))}: these parameters could not be saved or exported. "
                "Usual cause: a state-dict hook that drops or renames entries; register it after training, or export through a mapper"
            )

    def _own_entries(self) -> list[StateEntry]:
        found = [
            StateEntry(
                row.name,
                row.layout.shape,
                row.parameter.dtype,
                (row.stage,),
                True,
                row.trainable,
                (row.stage, row.name) in self._ties,
                _cut(row.layout),
            )
            for row in self.rows
        ]
        for stage, name, buffer in self._of_stages:
            found.append(StateEntry(name, tuple(buffer.shape), buffer.dtype, (stage,), False, False, False, _cut(layout_of(buffer))))
        return found

    def join(self, context: DistributedContext) -> None:
        """Learn what the other stages hold. A collective. Raises ModelError, on every rank, for names that do not fit together."""
        if context.num_pipeline_ranks == 1:
            return
        mine = self._own_entries() if context.rank == context.first_rank_of_stage else []
        self._of_model = merged_entries(entry for entries in context.host.exchange(mine) for entry in entries)
        stages = {entry.name: entry.stages for entry in self._of_model}
        self.rows = [dataclasses.replace(row, stages=stages[row.name]) for row in self.rows]

    @property
    def entries(self) -> list[StateEntry]:
        """What the whole model holds, as it was at the last `join`, in its order; without pipeline ranks as it is now."""
        return self._own_entries() if self._of_model is None else self._of_model

    @property
    def has_trainable(self) -> bool:
        """Whether anything of the whole model gets gradients."""
        return any(entry.is_trainable for entry in self.entries)

    @property
    def elsewhere(self) -> frozenset[str]:
        """The names of the tensors of the model that only other ranks' stages hold."""
        return frozenset(entry.name for entry in self.entries) - {row.name for row in self.rows} - self.buffers.keys()

    def check_contracts(self, sizes: Mapping[str, int]) -> None:
        """Raise ModelError for a trainable parameter whose gradient nobody would bring together along a mesh dimension.

        sizes: the ranks along each dimension of the dense domain that training data or tensors are cut over.
        """
        lost = {row.name: dims for row in self.trainable() if (dims := missing_dimensions(row.contracts, sizes))}
        if lost:
            name, dims = next(iter(lost.items()))
            raise ModelError(
                f"{len(lost)} trainable parameters, such as {name!r}, are plain tensors along the mesh dimensions {', '.join(dims)}: "
                "nothing would bring their gradients together. In parallelize_model_stage, give the modules that own them to "
                "parallelize_replicate, parallelize_fsdp, parallelize_hsdp or parallelize_tensor, or freeze them with requires_grad_(False)"
            )

    def extra_states(self) -> list[tuple[str, nn.Module]]:
        """Names and modules with `get_extra_state`, which a checkpoint keeps too. Two stages on this rank may have one of one name."""
        own = nn.Module.get_extra_state
        return [item for stage in self._stages for item in stage.named_modules() if type(item[1]).get_extra_state is not own]

    def check_settled(self) -> None:
        """Raise StateError if a module holds other weights than its own for now, such as those with adapters merged in."""
        for stage in self._stages:
            for module in stage.modules():
                if check := getattr(module, "check_settled", None):
                    check()

    def __iter__(self) -> Iterator[ParameterRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def trainable(self) -> list[ParameterRow]:
        """The rows that get gradients."""
        return [row for row in self.rows if row.trainable]

    def tensors(self, *, trainable_only: bool = False) -> dict[str, torch.Tensor]:
        """Canonical name -> tensor, of parameters and persistent buffers, in the order of the model."""
        rows = self.trainable() if trainable_only else self.rows
        found: dict[str, torch.Tensor] = {}
        for row in rows:
            found.setdefault(row.name, row.parameter.detach())
        return found | self.buffers

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of the state of the whole model, which tell one model from another."""
        return [(entry.name, entry.shape) for entry in self.entries]

    def counts(self) -> tuple[int, int]:
        """Numbers of elements of the parameters of the whole model: all, trainable."""
        sizes = [(math.prod(entry.shape), entry.is_trainable) for entry in self.entries if entry.is_parameter]
        return sum(size for size, _ in sizes), sum(size for size, trainable in sizes if trainable)


def _cut(layout: Layout) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return tuple(layout.sharded_over), tuple(layout.sizes)


def merged_entries(found: Iterable[StateEntry]) -> list[StateEntry]:
    """One entry per tensor of the model, parameters first, in the order of the stages. Raises ModelError for names used twice and ties that
    do not fit."""
    entries: dict[str, StateEntry] = {}
    for entry in sorted(found, key=lambda entry: (not entry.is_parameter, entry.stages)):
        first = entries.get(entry.name)
        if first is None:
            if entry.is_tie:
                raise ModelError(
                    f"tied_parameters() of stage {entry.stages[0]} says that it holds {entry.name!r} of an earlier stage, but no earlier "
                    "one has a parameter of that name"
                )
            entries[entry.name] = entry
            continue
        if not entry.is_tie:
            raise ModelError(
                f"the stages {first.stages[-1]} and {entry.stages[0]} both have a tensor {entry.name!r}. Give layers their number in the "
                "whole model, as nn.ModuleDict keys; register buffers that every stage computes with persistent=False; and if it is one "
                "tied weight, return it from tied_parameters() of the later stage"
            )
        for what in ("shape", "dtype", "is_trainable", "cut"):
            if getattr(first, what) != getattr(entry, what):
                raise ModelError(
                    f"the tied weight {entry.name!r} has {what} {getattr(first, what)} in stage {first.stages[0]} and "
                    f"{getattr(entry, what)} in stage {entry.stages[0]}; build, freeze and distribute both alike"
                )
        entries[entry.name] = first._replace(stages=first.stages + entry.stages)
    return list(entries.values())


def _local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    if not is_distributed(parameter):
        return parameter
    return nn.Parameter(local_of(parameter), requires_grad=parameter.requires_grad)
