"""`DecoderInputs`: what a stage of a `Decoder` is given, checked, and what it gives to the next one.

The first stage gets token ids, alone or in a mapping with masks and positions. Later ones get hidden states in place of the ids, and again
alone if there is nothing else. Not here: what masks mean (`TokenInfo`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.models.config import DecoderConfig
from trainer_kit.models.config_parts import LanguageModeling, TokenClassification

NAMES = ("input_ids", "attention_mask", "position_ids")
EXPECTED = "expected token ids (batch, length), or a mapping with 'input_ids' and optionally 'attention_mask' and 'position_ids'"


@dataclass(frozen=True, slots=True)
class DecoderInputs:
    """input_ids (B, T). attention_mask (B, T): 0 at padding, which may be left or right. position_ids (B, T) or (1, T): 0, 1, ... if None.

    hidden: hidden states (B, T, D), or this rank's part of the sequence, in a stage after the first.
    """

    input_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    @classmethod
    def of_model(cls, inputs: Any, config: DecoderConfig) -> DecoderInputs:
        """From what the first stage is called with. Raises ModelError."""
        given = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
        if "input_ids" not in given or not given.keys() <= set(NAMES):
            raise ModelError(f"Decoder got the inputs {sorted(map(str, given))}, {EXPECTED}")
        ids = given["input_ids"]
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise ModelError(f"Decoder got inputs {_described(ids)}, {EXPECTED}")
        if ids.shape[1] > config.max_seq_len:
            raise ModelError(f"the sequence has {ids.shape[1]} tokens, expected at most DecoderConfig(max_seq_len={config.max_seq_len})")
        found = cls(**given)
        _check_like_ids("attention_mask", found.attention_mask, ids, "1 at tokens and 0 at padding; packed samples are not supported")
        _check_like_ids("position_ids", found.position_ids, ids, f"positions below max_seq_len={config.max_seq_len}", one_row=True)
        return found

    @classmethod
    def of_stage(cls, inputs: Any) -> DecoderInputs:
        """From what the stage before gave."""
        return cls(hidden=inputs) if isinstance(inputs, torch.Tensor) else cls(**inputs)

    def passed_on(self, hidden: torch.Tensor, config: DecoderConfig) -> Any:
        """What the next stage gets: hidden states, and what else it needs."""
        ids = self.input_ids if _finds_padding(config) else None
        rest = {"input_ids": ids, "attention_mask": self.attention_mask, "position_ids": self.position_ids}
        kept = {name: value for name, value in rest.items() if value is not None}
        return kept | {"hidden": hidden} if kept else hidden

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
        return None if self.attention_mask is None else self.attention_mask != 0


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
