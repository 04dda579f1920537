"""`provider_from_hf`: a model provider for the folder of a Hugging Face model, whose weights it reads and writes.

Before editing: mappers are made on every rank, so what the stored names tell is looked up by each for itself, once, and only when weights
are loaded or exported.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, get_args

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.model.provider import StageContext
from trainer_kit.models.config import DecoderConfig
from trainer_kit.models.config_parts import Head
from trainer_kit.models.hugging_face import layout
from trainer_kit.models.hugging_face.layout import HEAD, ExpertLayout, Layout
from trainer_kit.models.hugging_face.read_config import decoder_config, read_settings
from trainer_kit.models.provider import DecoderProvider
from trainer_kit.storage import Folder
from trainer_kit.weights.mapper import StateMapper
from trainer_kit.weights.reader import INDEX, SINGLE, ModelStateReader, read_index


def provider_from_hf(
    path: str | os.PathLike[str],
    *,
    head: Head | None = None,
    source_model: str | os.PathLike[str] | None = None,
    expert_layout: ExpertLayout | None = None,
    **changes: Any,
) -> HuggingFaceProvider:
    """The provider of the model that a Hugging Face `config.json` describes: Llama, Qwen3 or Qwen3-MoE.

        Trainer(provider_from_hf(folder), ..., source_model=folder)

    fine-tunes it, and `trainer.export(out)` writes weights that `from_pretrained` reads. path: the folder, or the file itself, on a local
    disk or behind an fsspec URL. Weights come from the Trainer's `source_model`; without it they are fresh.

    head: another one than that of the file. It begins with fresh values, which is logged, unless the stored head is like it. What belongs
    beside an export is then `hf_config(provider.config)` as its `config.json`.
    source_model: where the weights are that the Trainer will load, if not at `path`; only their names are looked at here.
    expert_layout: how `export` writes experts, see `HuggingFaceProvider`. changes: fields of the DecoderConfig that differ from the file,
    such as `dropout=0.1` or `max_seq_len=2048`.

    Raises UnsupportedError for a type of model, or a setting, that is not supported, and ConfigurationError for a file that is not whole.
    """
    folder, settings, label = read_settings(path)
    stored = decoder_config(settings, label)
    try:
        config = replace(stored, **changes) if head is None else replace(stored, head=head, **changes)
    except TypeError as error:
        raise ConfigurationError(f"provider_from_hf got {', '.join(changes)}; expected fields of DecoderConfig: {error}") from error
    return HuggingFaceProvider(
        config, stored=stored, source_model=folder.url if source_model is None else source_model, expert_layout=expert_layout
    )


class HuggingFaceProvider(DecoderProvider):
    """A `DecoderProvider` that loads and exports the layout of Hugging Face, for a model with any `DecoderConfig`.

    stored: the configuration of the weights to load, where it differs; their head need not be like that of the model. source_model: the
    weights whose names tell the variant of the layout. expert_layout: how experts are exported, as `"list"`, a tensor for each expert, or
    `"fused"`, one for each layer; None: as in the source model, and `"list"` without one, which is what transformers writes.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        stored: DecoderConfig | None = None,
        source_model: str | os.PathLike[str] | None = None,
        expert_layout: ExpertLayout | None = None,
    ) -> None:
        super().__init__(config)
        if expert_layout not in (None, *get_args(ExpertLayout)):
            raise ConfigurationError(f"expert_layout={expert_layout!r}: expected 'list', 'fused', or None for that of the source model")
        self._stored, self._source_model, self._expert_layout = stored or config, source_model, expert_layout

    def load_mapper(self, ctx: StageContext) -> StateMapper:
        return layout.stage_mapper(self.config, ctx.stage, self._source_layout)

    def export_mapper(self, ctx: StageContext) -> StateMapper:
        if layout.balance_biases(self.config, ctx.stage) and ctx.context.is_main:
            ctx.context.logger.warning(
                "the balance biases of the routers are not exported: Hugging Face has none, and chooses some experts otherwise"
            )
        return layout.export_mapper(self.config, ctx.stage, self._expert_layout or self._source_layout.experts)

    def may_be_missing(self, ctx: StageContext) -> Iterable[str]:
        """A head that is unlike the stored one and not tied, and the balance biases, which Hugging Face does not have."""
        fresh = [] if self._is_like_stored or self.config.ties else layout.head_names(self.config.head).values()
        return [*fresh, *layout.balance_biases(self.config, ctx.stage)]

    def may_be_unused(self, ctx: StageContext) -> Iterable[str]:
        """The stored head if ours is unlike it; buffers that follow from the configuration."""
        unused = [] if self._is_like_stored else [HEAD, *layout.head_names(self._stored.head)]
        return [*unused, *layout.NEVER_USED]

    @property
    def _is_like_stored(self) -> bool:
        """Whether the head is of the same kind and size as the stored one."""
        ours, theirs = self.config.head, self._stored.head
        return layout.head_names(ours) == layout.head_names(theirs) and getattr(ours, "num_labels", 0) == getattr(theirs, "num_labels", 0)

    @cached_property
    def _source_layout(self) -> Layout:
        """The variant in which the weights to load are stored."""
        names = _stored_names(self._source_model)
        found = layout.find_layout(names) if names else Layout()
        head = self.config.head if self._is_like_stored or self.config.ties else None
        lacks_head = bool(names) and HEAD not in names
        unties = lacks_head and self._is_like_stored and self._stored.ties and not self.config.ties
        return replace(found, head=head, unties=unties)


def _stored_names(path: str | os.PathLike[str] | None) -> Collection[str]:
    """The names of a model state, from its index where there is one; none if there are no weights."""
    if path is None:
        return ()
    if os.fspath(path).endswith(".safetensors"):
        return ModelStateReader(path).entries.keys()
    folder = Folder(path)
    files = folder.names()
    if SINGLE in files:
        return ModelStateReader(path).entries.keys()
    return read_index(folder).keys() if INDEX in files else ()
