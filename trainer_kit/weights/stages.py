"""The model state of a pipeline: what each stage has of it, and how rank 0 gets at the tensors of all stages.

The first rank of a stage brings its tensors together and applies the stage's own mapper; from there they go to rank 0, one at a time and
through the memory of the hosts where there is a way. A tied weight belongs to the first stage that holds it; the others have a copy.

Before editing: the first rank of a stage may fail where only it works, such as in a mapper; it says so in place of the tensor, and rank 0
raises for all.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.team import Team, portable
from trainer_kit.weights.export import mapped_items
from trainer_kit.weights.mapper import StateMapper
from trainer_kit.weights.writer import StateItem, items_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trainer_kit.mesh.context import DistributedContext
    from trainer_kit.parameters import ParameterTable


@dataclass(frozen=True, slots=True)
class StageState:
    """The part of the model state that a stage of this rank holds.

    tensors: by canonical name. aliases: other names that the stage has for them. copies: those that belong to an earlier stage.
    """

    stage: int
    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    copies: frozenset[str]

    def items(self, context: DistributedContext) -> list[StateItem]:
        """Its own tensors, under their canonical names."""
        return items_of({name: tensor for name, tensor in self.tensors.items() if name not in self.copies}, context)

    def mapped_items(self, mapper: StateMapper, context: DistributedContext) -> list[StateItem]:
        """What its export mapper makes of its tensors; copies may be named as the stage does."""
        names = {alias: name for alias, name in self.aliases.items() if name in self.copies}
        tensors = {**self.tensors, **{alias: self.tensors[name] for alias, name in names.items()}}
        of = "the model" if context.stage_layout.num_stages == 1 else f"stage {self.stage}"
        return list(mapped_items(items_of(tensors, context), mapper, copies=self.copies | names.keys(), of=of))


def stage_state(table: ParameterTable, stage: int) -> StageState:
    """That of a stage of this rank."""
    rows = [row for row in table if row.stage == stage]
    tensors = {row.name: row.parameter.detach() for row in rows}
    aliases = {alias: row.name for row in rows for alias in row.aliases}
    buffers = [entry.name for entry in table.entries if stage in entry.stages and not entry.is_parameter]
    tensors |= {name: table.buffers[name] for name in buffers}
    aliases |= {alias: name for alias, name in table.aliases.items() if name in set(buffers)}
    return StageState(stage, tensors, aliases, frozenset(row.name for row in rows if row.stages[0] != stage))


class _Told(NamedTuple):
    """An item as other ranks know it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    collective: bool


def items_of_stages(own: Callable[[], Mapping[int, Sequence[StateItem]]], context: DistributedContext) -> list[StateItem]:
    """The items of all stages in their order; `own` makes those of the stages of this rank. A collective.

    An error of `own` is raised on every rank; so is ModelError for a name that two stages have.
    """
    team = Team.of(context)
    mine = team.everywhere(own)
    if context.num_pipeline_ranks == 1:
        return [item for items in mine.values() for item in items]
    group = context.pipeline_group
    assert group is not None
    is_first = context.rank == context.first_rank_of_stage
    told = {stage: [_Told(item.name, item.shape, item.dtype, item.collective) for item in items] for stage, items in mine.items()}
    of_model = {stage: items for of_rank in team.exchange(told if is_first else {}) for stage, items in of_rank.items()}
    found = []
    for stage in sorted(of_model):
        place = context.stage_layout.rank_of(stage)
        for index, item in enumerate(of_model[stage]):
            here = mine[stage][index] if stage in mine else None
            if place == 0:
                found.append(here or StateItem(item.name, item.shape, item.dtype, _nothing, item.collective))
            else:
                found.append(StateItem(item.name, item.shape, item.dtype, _Relay(here, place, group, context), True))
    _check_names(of_model)
    return found


def _check_names(of_model: Mapping[int, Sequence[_Told]]) -> None:
    known: dict[str, int] = {}
    for stage in sorted(of_model):
        for item in of_model[stage]:
            if (other := known.setdefault(item.name, stage)) != stage:
                raise ModelError(
                    f"the export mappers of the stages {other} and {stage} both make {item.name!r}; export_mapper(ctx) is for the tensors "
                    "of ctx.stage alone, and constants are for one stage"
                )


def _nothing() -> None:
    """`get` of an item of the first pipeline rank on the others."""


class _Relay:
    """`get` of an item of a stage of another pipeline rank than the first: from there to rank 0. place: of that rank in the group."""

    def __init__(self, item: StateItem | None, place: int, group: ProcessGroup, context: DistributedContext) -> None:
        self._item, self._place, self._group, self._context = item, place, group, context

    def __call__(self) -> torch.Tensor | None:
        if self._context.is_main:
            return _receive(self._place, self._group, self._device())
        if self._item is None:
            return None
        if self._context.rank == self._context.first_rank_of_stage:
            _send(self._item, self._group, self._device())
        elif self._item.collective:
            self._item.get()
        return None

    def _device(self) -> torch.device:
        """Where what is sent lies: on the host, unless the process group was made for devices alone."""
        import torch.distributed as dist

        return torch.device("cpu") if "cpu" in dist.get_backend_config(self._group) else self._context.device


def _send(item: StateItem, group: ProcessGroup, device: torch.device) -> None:
    import torch.distributed as dist

    tensor: torch.Tensor | None = None
    try:
        tensor = item.get()
        assert tensor is not None, "the first rank of a stage gets its tensors"
        tensor = tensor.detach().to(device).contiguous()
        head: list[Any] = [None, tuple(tensor.shape), tensor.dtype]
    except Exception as error:  # raised on rank 0, which waits for the tensor
        error.add_note(f"on rank {dist.get_rank()}:\n{traceback.format_exc()}")
        head = [portable(error), (), None]
    dist.send_object_list(head, group=group, group_dst=0, device=device)
    if head[0] is None and tensor is not None and tensor.numel():
        dist.send(tensor.view(-1).view(torch.uint8), group=group, group_dst=0)


def _receive(place: int, group: ProcessGroup, device: torch.device) -> torch.Tensor:
    import torch.distributed as dist

    head: list[Any] = [None, None, None]
    dist.recv_object_list(head, group=group, group_src=place, device=device)
    error, shape, dtype = head
    if error is not None:
        raise error
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if tensor.numel():
        dist.recv(tensor.view(-1).view(torch.uint8), group=group, group_src=place)
    return tensor.cpu()
