"""The model types that a `Decoder` covers: their classes in transformers, and what their `config.json` means where it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """A model type. classes: how the names of its classes begin. defaults: of settings that are absent, as transformers has them."""

    model_type: str
    classes: str
    qk_norm: bool = False
    has_experts: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "Llama", defaults={"max_position_embeddings": 2048}),
        Family("qwen3", "Qwen3", True, defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128}),
        Family("qwen3_moe", "Qwen3Moe", True, True, defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4}),
    )
}
