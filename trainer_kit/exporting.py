"""The export of a built model: which mapper, which tensors, on all ranks. How files are written is in `weights/`."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from trainer_kit.assembly import BuiltModel
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh import DistributedContext
from trainer_kit.model import ModelProvider
from trainer_kit.weights import StateMapper, write_model_state
from trainer_kit.weights.buffers import share_buffers
from trainer_kit.weights.export import mapped_items
from trainer_kit.weights.stages import items_of_stages, stage_state
from trainer_kit.weights.whole import make_groups
from trainer_kit.weights.writer import StateItem


def export_model(
    model: BuiltModel,
    provider: ModelProvider,
    context: DistributedContext,
    path: str | os.PathLike[str],
    *,
    mapper: StateMapper | None,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
) -> list[str]:
    """Write the weights of all ranks and return the file names, the same on every rank. See `Trainer.export`."""
    if mapper is not None and not isinstance(mapper, StateMapper):
        raise ConfigurationError(f"export(mapper={mapper!r}): expected a StateMapper, or None for that of the provider")
    with context.long_timeout():
        share_buffers(model.table.buffers, context)
        items = _items(model, provider, mapper, context)
        return write_model_state(path, items, max_shard_size=max_shard_size, dtype=dtype, context=context)


def _items(model: BuiltModel, provider: ModelProvider, mapper: StateMapper | None, context: DistributedContext) -> Iterable[StateItem]:
    """Those of the whole model, in its order. A given mapper sees the whole model, on rank 0; a provider has one for each stage."""
    states = [stage_state(model.table, ctx.stage.index) for ctx in model.contexts]
    make_groups([tensor for state in states for tensor in state.tensors.values()], context)
    if mapper is not None:
        return mapped_items(items_of_stages(lambda: {state.stage: state.items(context) for state in states}, context), mapper)

    def of_this_rank() -> dict[int, list[StateItem]]:
        parts = zip(model.contexts, states, strict=True)
        return {state.stage: state.mapped_items(provider.export_mapper(ctx), context) for ctx, state in parts}

    return items_of_stages(of_this_rank, context)
