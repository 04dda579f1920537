"""The model state of a pipeline: what each stage has of it, and the items of the whole model, the same on all ranks.

A provider has an export mapper for each stage, on the ranks of that stage. Each stage tells the others what it makes of which of its
tensors; where a mapper must compute, its own ranks do. A tied weight belongs to the first stage that holds it; the others have a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.team import Team
from trainer_kit.weights.export import mapped_items
from trainer_kit.weights.items import GroupCall, StateItem
from trainer_kit.weights.mapper import StateMapper
from trainer_kit.weights.pieces import Piece
from trainer_kit.weights.sources import Mosaic, Source, all_of, find_sources

if TYPE_CHECKING:
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


def stage_state(table: ParameterTable, stage: int) -> StageState:
    """That of a stage of this rank."""
    rows = [row for row in table if row.stage == stage]
    tensors = {row.name: row.parameter.detach() for row in rows}
    aliases = {alias: row.name for row in rows for alias in row.aliases}
    buffers = [entry.name for entry in table.entries if stage in entry.stages and not entry.is_parameter]
    tensors |= {name: table.buffers[name] for name in buffers}
    aliases |= {alias: name for alias, name in table.aliases.items() if name in set(buffers)}
    return StageState(stage, tensors, aliases, frozenset(row.name for row in rows if row.stages[0] != stage))


def sources_by_stage(states: Sequence[StageState], context: DistributedContext) -> dict[int, dict[str, Source]]:
    """The tensors of all stages, in the order of the model. A collective."""
    of_rank = {(state.stage, name): tensor for state in states for name, tensor in state.tensors.items()}
    found = find_sources(of_rank, Team.of(context))
    by_stage: dict[int, dict[str, Source]] = {stage: {} for stage in sorted({stage for stage, _ in found})}
    for (stage, name), source in found.items():
        by_stage[stage][name] = source
    return by_stage


def items_of_model(by_stage: Mapping[int, Mapping[str, Source]], mapper: StateMapper, context: DistributedContext) -> list[StateItem]:
    """What a mapper of the whole model, which all ranks have, makes of it. A collective."""
    sources: dict[str, Source] = {}
    for of_stage in by_stage.values():
        for name, source in of_stage.items():
            sources.setdefault(name, source)
    return Team.of(context).everywhere(lambda: mapped_items(sources, mapper, ranks=range(context.world_size)))


def items_of_stages(
    by_stage: Mapping[int, Mapping[str, Source]],
    states: Sequence[StageState],
    mapper_of: Callable[[int], StateMapper],
    context: DistributedContext,
) -> list[StateItem]:
    """What the mappers of the stages make of them. A collective; `mapper_of` gives that of a stage of this rank.

    Raises ModelError, on every rank, for a name that two stages make, and whatever `mapper_of` raises on one of them.
    """
    team = Team.of(context)
    mine = team.everywhere(lambda: {s.stage: _mapped(s, by_stage[s.stage], mapper_of(s.stage), context) for s in states})
    if context.num_pipeline_ranks == 1:
        return [item for items in mine.values() for item in items]
    told = {state.stage: _tell(mine[state.stage], state) for state in states}
    of_model = {stage: said for of_rank in team.exchange(told if _is_first(context) else {}) for stage, said in of_rank.items()}
    _check_names(of_model)
    return [
        item
        for stage in sorted(of_model)
        for item in mine.get(stage) or _rebuilt(of_model[stage], by_stage[stage], _ranks_of(stage, context))
    ]


def _mapped(state: StageState, sources: Mapping[str, Source], mapper: StateMapper, context: DistributedContext) -> list[StateItem]:
    """Of one stage; copies may be named as the stage does."""
    second = {alias: name for alias, name in state.aliases.items() if name in state.copies}
    known = {**sources, **{alias: sources[name] for alias, name in second.items()}}
    of = "the model" if context.stage_layout.num_stages == 1 else f"stage {state.stage}"
    return mapped_items(known, mapper, ranks=_ranks_of(state.stage, context), copies=state.copies | second.keys(), of=of)


class _Told(NamedTuple):
    """An item as the ranks of other stages know it, by the canonical names of the stage: its pieces, or the number and inputs of its
    group."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece]
    group: int
    inputs: Sequence[str]


def _tell(items: Sequence[StateItem], state: StageState) -> list[_Told]:
    groups: dict[GroupCall, int] = {}
    told = []
    for item in items:
        pieces: list[Piece] = []
        inputs: list[str] = []
        number = -1
        if isinstance(item.source, Mosaic):
            pieces = [replace(piece, source=state.aliases.get(piece.source, piece.source)) for piece in item.source.pieces]
        elif isinstance(item.source, GroupCall):
            number = groups.setdefault(item.source, len(groups))
            inputs = [state.aliases.get(name, name) for name in item.source.inputs]
        told.append(_Told(item.name, item.shape, item.dtype, pieces, number, inputs))
    return told


def _rebuilt(told: Sequence[_Told], sources: Mapping[str, Source], ranks: Sequence[int]) -> list[StateItem]:
    """The items of a stage of other ranks. Inputs are in the same order as there, so the names that a mapper has for them do not matter."""
    groups: dict[int, GroupCall] = {}
    items = []
    for item in told:
        source: Mosaic | GroupCall
        if item.group < 0:
            source = Mosaic(item.pieces, {piece.source: sources[piece.source] for piece in item.pieces})
        elif item.group in groups:
            source = groups[item.group]
        else:
            inputs = {f"{index} {name}": all_of(name, sources[name]) for index, name in enumerate(item.inputs)}
            source = groups[item.group] = GroupCall(inputs, ranks, None)
        items.append(StateItem(item.name, item.shape, item.dtype, source))
    return items


def _check_names(of_model: Mapping[int, Sequence[_Told]]) -> None:
    known: dict[str, int] = {}
    for stage in sorted(of_model):
        for item in of_model[stage]:
            if (other := known.setdefault(item.name, stage)) != stage:
                raise ModelError(
                    f"the export mappers of the stages {other} and {stage} both make {item.name!r}; export_mapper(ctx) is for the tensors "
                    "of ctx.stage alone, and constants are for one stage"
                )


def _is_first(context: DistributedContext) -> bool:
    return context.rank == context.first_rank_of_stage


def _ranks_of(stage: int, context: DistributedContext) -> range:
    """The ranks that host a stage."""
    place, size = context.stage_layout.rank_of(stage), context.world_size // context.num_pipeline_ranks
    return range(place * size, (place + 1) * size)
