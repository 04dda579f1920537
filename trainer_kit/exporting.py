"""What leaves a built model: an export to files, and a stream of the same tensors. Which mapper, which tensors, on all ranks.

How files are written and how tensors travel is in `weights/`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from trainer_kit.assembly import BuiltModel
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh import DistributedContext
from trainer_kit.model import ModelProvider
from trainer_kit.weights import StateItem, StateMapper, write_model_state
from trainer_kit.weights.buffers import share_buffers
from trainer_kit.weights.companions import StrPath
from trainer_kit.weights.stages import items_of_model, items_of_stages, sources_by_stage, stage_state
from trainer_kit.weights.stream import Receivers, StateStream


@dataclass
class ModelWeights:
    """The weights of a model, on their way out. Every method is a collective of all ranks."""

    model: BuiltModel
    provider: ModelProvider
    context: DistributedContext

    def export(
        self,
        mapper: StateMapper | None,
        *,
        path: str | os.PathLike[str],
        dtype: torch.dtype | None,
        max_shard_size: int | str,
        companions: StrPath | Sequence[StrPath] | None,
    ) -> list[str]:
        """See `Trainer.export`."""
        with self.context.long_timeout():
            items = self._items("export", mapper)
            return write_model_state(
                path, items, max_shard_size=max_shard_size, dtype=dtype, companions=companions, context=self.context
            )

    @contextmanager
    def stream(
        self, mapper: StateMapper | None, *, bucket_bytes: int | str, dtype: torch.dtype | None, to: Receivers
    ) -> Iterator[StateStream]:
        """See `Trainer.model_state`. An error in the block is told to the other ranks by the section around it."""
        with self.context.long_timeout():
            items = self._items("model_state", mapper)
            stream = StateStream(items, self.context, bucket_bytes=bucket_bytes, dtype=dtype, to=to)
            yield stream
            stream.leave()

    def _items(self, call: str, mapper: StateMapper | None) -> list[StateItem]:
        """Those of the whole model, in its order. A given mapper sees the whole model; a provider has one for each stage."""
        if mapper is not None and not isinstance(mapper, StateMapper):
            raise ConfigurationError(f"{call}(mapper={mapper!r}): expected a StateMapper, or None for that of the provider")
        model, context = self.model, self.context
        share_buffers(model.table.buffers, context)
        states = [stage_state(model.table, ctx.stage.index) for ctx in model.contexts]
        by_stage = sources_by_stage(states, context)
        if mapper is not None:
            return items_of_model(by_stage, mapper, context)
        of_stage = {ctx.stage.index: ctx for ctx in model.contexts}
        return items_of_stages(by_stage, states, lambda stage: self.provider.export_mapper(of_stage[stage]), context)
