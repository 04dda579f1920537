"""From the tensors of a model to the items that leave it, through an export mapper: shapes only, no value moves here.

An output that is a mosaic of boxes needs no whole input; only what a mapper computes does. Before editing: all ranks that have the mapper
must come to the same items.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.weights.items import GroupCall, StateItem, check_announced
from trainer_kit.weights.mapper import StateGroup, StateMapper, check_groups
from trainer_kit.weights.pieces import Piece
from trainer_kit.weights.plan import apply_group
from trainer_kit.weights.sources import Mosaic, Source, all_of


def mapped_items(
    sources: Mapping[str, Source],
    mapper: StateMapper,
    *,
    ranks: Sequence[int] = (0,),
    copies: Collection[str] = (),
    of: str = "the model",
) -> list[StateItem]:
    """The items of an export of `sources`. Every one of them must belong to a group, so that nothing is left out silently.

    ranks: those that have this mapper. copies: names of weights that another stage writes; a group of such alone is left out. of: whose
    tensors they are, for errors.
    """
    copies = frozenset(copies)
    groups = list(mapper.groups())
    check_groups(groups)
    groups = [group for group in groups if not group.inputs or not group.inputs <= copies]
    used = {name for group in groups for name in group.inputs}
    if missing := sorted(used - sources.keys()):
        raise ModelError(f"the export mapper needs {', '.join(missing[:5])}, which {of} does not have; give the mapper of {of}")
    if unused := sorted(sources.keys() - used - copies):
        raise ModelError(f"the export mapper leaves out {', '.join(unused[:5])} of {of}; map them, or name them as left out")
    return [item for group in groups for item in _items(group, mapper, {name: sources[name] for name in sorted(group.inputs)}, ranks)]


def _items(group: StateGroup, mapper: StateMapper, sources: Mapping[str, Source], ranks: Sequence[int]) -> list[StateItem]:
    meta = {name: torch.empty(source.shape, dtype=source.dtype, device="meta") for name, source in sources.items()}
    outputs = apply_group(mapper, group, meta)
    announced = {name: (tuple(outputs[name].shape), outputs[name].dtype) for name in sorted(group.outputs)}
    pieces = mapper.pieces({name: source.shape for name, source in sources.items()}) if sources else {}
    call = GroupCall({name: all_of(name, source) for name, source in sources.items()}, ranks, partial(_apply, mapper, group, announced))
    items = []
    for name, (shape, dtype) in announced.items():
        is_mosaic = name in pieces and all(sources[piece.source].dtype == dtype for piece in pieces[name])
        items.append(StateItem(name, shape, dtype, _mosaic(pieces[name], sources) if is_mosaic else call))
    return items


def _mosaic(pieces: Sequence[Piece], sources: Mapping[str, Source]) -> Mosaic:
    return Mosaic(tuple(pieces), {piece.source: sources[piece.source] for piece in pieces})


def _apply(
    mapper: StateMapper,
    group: StateGroup,
    announced: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    inputs: Mapping[str, torch.Tensor],
) -> Mapping[str, torch.Tensor]:
    """One group's outputs, held against what meta tensors announced."""
    outputs = apply_group(mapper, group, inputs)
    for name, (shape, dtype) in announced.items():
        check_announced(name, shape, dtype, outputs[name])
    return outputs
