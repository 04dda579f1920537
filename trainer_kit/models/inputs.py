"""`DecoderInputs`: what a stage of a `Decoder` is given, checked, and what it gives to the next one.

The first stage gets token ids, alone or in a mapping with masks and positions. Later ones get hidden states in place of the ids, and again
alone if there is nothing else. Not here: what masks mean (`TokenInfo`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.models.config import DecoderConfig
from trainer_kit.models.config_parts import LanguageModeling, TokenClassification
from trainer_kit.parallel.sequence_parts import document_positions

if TYPE_CHECKING:
    from trainer_kit.parallel.context import SequenceParts

NAMES = ("input_ids", "attention_mask", "position_ids", "document_ids")
EXPECTED = f"expected token ids (batch, length), or a mapping with 'input_ids' and optionally {', '.join(map(repr, NAMES[1:]))}"


@dataclass(frozen=True, slots=True)
class DecoderInputs:
    """input_ids (B, T). attention_mask (B, T): 0 at padding, which may be left or right. document_ids (B, T): whole numbers that tell the
    documents of a packed row apart, -1 at padding; no token sees another document. position_ids (B, T) or (1, T): if None 0, 1, ..., from
    the start of each document.

    hidden: hidden states (B, T, D), or this rank's part of the sequence, in a stage after the first. With context parallelism all of them
    are of this rank's part.
    """

    input_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    @classmethod
    def of_model(cls, inputs: Any, config: DecoderConfig, num_parts: int = 1) -> DecoderInputs:
        """From what the first stage is called with, of sequences in so many parts. Raises ModelError."""
        given = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
        if "input_ids" not in given or not given.keys() <= set(NAMES):
            raise ModelError(f"Decoder got the inputs {sorted(map(str, given))}, {EXPECTED}")
        ids = given["input_ids"]
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise ModelError(f"Decoder got inputs {_described(ids)}, {EXPECTED}")
        if (length := ids.shape[1] * num_parts) > config.max_seq_len:
            raise ModelError(f"the sequence has {length} tokens, expected at most DecoderConfig(max_seq_len={config.max_seq_len})")
        found = cls(**given)
        _check_like_ids("attention_mask", found.attention_mask, ids, "1 at tokens and 0 at padding; document_ids tell packed samples apart")
        _check_like_ids("position_ids", found.position_ids, ids, f"positions below max_seq_len={config.max_seq_len}", one_row=True)
        _check_like_ids("document_ids", found.document_ids, ids, "the same at all tokens of a document")
        return found

    @classmethod
    def of_stage(cls, inputs: Any) -> DecoderInputs:
        """From what the stage before gave."""
        return cls(hidden=inputs) if isinstance(inputs, torch.Tensor) else cls(**inputs)

    def passed_on(self, hidden: torch.Tensor, config: DecoderConfig) -> Any:
        """What the next stage gets: hidden states, and what else it needs."""
        ids = self.input_ids if _finds_padding(config) else None
        rest = {name: getattr(self, name) for name in NAMES} | {"input_ids": ids}
        kept = {name: value for name, value in rest.items() if value is not None}
        return kept | {"hidden": hidden} if kept else hidden

    def num_positions(self, num_hidden_parts: int) -> int:
        """How many positions there are on this rank; its hidden states may be of one of so many parts of them."""
        if self.hidden is not None:
            return self.hidden.shape[1] * num_hidden_parts
        assert self.input_ids is not None
        return self.input_ids.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        tokens = self.input_ids if self.hidden is None else self.hidden
        assert tokens is not None
        return tokens.device

    def with_positions(self, parts: SequenceParts | None) -> DecoderInputs:
        """With the positions in packed documents, if these are given and those are not. With context parallelism a collective then."""
        if self.document_ids is None or self.position_ids is not None:
            return self
        if parts is None or self.document_ids.is_meta:
            return replace(self, position_ids=document_positions(self.document_ids))
        return replace(self, position_ids=parts.take(document_positions(parts.gather(self.document_ids))))

    def on_meta(self) -> DecoderInputs:
        """The same shapes and dtypes without values."""
        tensors = {name: getattr(self, name) for name in NAMES}
        return replace(self, **{name: torch.empty_like(t, device="meta") for name, t in tensors.items() if t is not None})

    def is_real_BT(self, config: DecoderConfig) -> torch.Tensor | None:  # noqa: N802
        """Which tokens the head takes for no padding; None: all."""
        if _finds_padding(config):
            assert self.input_ids is not None and not isinstance(config.head, (LanguageModeling, TokenClassification))
            assert config.head.pad_token_id is not None
            return self.input_ids.ne(config.head.pad_token_id)
        if self.attention_mask is not None:
            return self.attention_mask != 0
        return None if self.document_ids is None else self.document_ids >= 0


def _finds_padding(config: DecoderConfig) -> bool:
    """Whether the head knows padding by its id."""
    return getattr(config.head, "pad_token_id", None) is not None


def _check_like_ids(name: str, value: Any, ids: torch.Tensor, meaning: str, *, one_row: bool = False) -> None:
    if value is None:
        return
    shapes = [tuple(ids.shape), (1, ids.shape[1])] if one_row else [tuple(ids.shape)]
    if not isinstance(value, torch.Tensor) or tuple(value.shape) not in shapes or value.is_floating_point():
        raise ModelError(f"Decoder got {name} {_described(value)}, expected whole numbers of shape {tuple(ids.shape)}: {meaning}")


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"of shape {tuple(value.shape)} and {value.dtype}"
    return f"in a {type(value).__name__}"
