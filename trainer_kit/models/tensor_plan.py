"""How a `Decoder` is cut over the ranks of a tensor group.

Each rank has some of the attention heads, some columns of the feed-forward, and a part of the vocabulary. Experts are on every rank, and
see its part of the sequence. Heads that are not for language modelling are on every rank too, and see all of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer_kit.exceptions import UnsupportedError
from trainer_kit.model.provider import StageInfo
from trainer_kit.models.config import DecoderConfig
from trainer_kit.models.config_parts import LanguageModeling

if TYPE_CHECKING:
    from trainer_kit.parallel.tensor import Style


def decoder_tensor_plan(config: DecoderConfig, stage: StageInfo, layers: Sequence[int], num_ranks: int) -> dict[str, Style]:
    """The plan of `parallelize_tensor` for the stage with these layers. Raises UnsupportedError for sizes that cannot be cut."""
    dense = [layer for layer in layers if not config.has_experts(layer)]
    for name in ("num_heads", "num_kv_heads", "intermediate_size")[: 3 if dense else 2]:
        if (size := getattr(config, name)) % num_ranks:
            raise UnsupportedError(f"DecoderConfig({name}={size}) is cut over tp={num_ranks} ranks, which must divide it")
    plan: dict[str, Style] = {}
    if stage.is_first:
        plan |= {"embedding": "vocabulary", "dropout": "sequence"}
    plan |= {
        "layers.*_norm": "sequence",  # also those of queries and keys: on every rank, for the tokens or the heads that it has
        "layers.*.dropout": "sequence",
        "layers.*.attention.[qkv]_proj": "column",
        "layers.*.attention.o_proj": "row",
    }
    if dense:
        plan |= {
            "layers.*.feed_forward.gate_proj": "column",
            "layers.*.feed_forward.up_proj": "column",
            "layers.*.feed_forward.down_proj": "row",
        }
    plan |= {f"layers.{layer}.feed_forward": "sequence" for layer in layers if config.has_experts(layer)}
    if stage.is_last:
        plan |= {"norm": "sequence", "head": "vocabulary" if isinstance(config.head, LanguageModeling) else "whole"}
    return plan
