"""The export of a built model: which mapper, which tensors, on all ranks. How files are written is in `weights/`."""

from __future__ import annotations

import os

import torch

from trainer_kit.assembly import BuiltModel
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh import DistributedContext
from trainer_kit.model import ModelProvider
from trainer_kit.weights import StateMapper, write_model_state
from trainer_kit.weights.buffers import share_buffers
from trainer_kit.weights.export import mapped_items


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
    mapper = mapper or provider.export_mapper(model.contexts[0])
    share_buffers(model.table.buffers, context)
    items = mapped_items(model.table.tensors(), mapper, context)
    with context.long_timeout():
        return write_model_state(path, items, max_shard_size=max_shard_size, dtype=dtype, context=context)
