"""`Decoder`: a small decoder-only transformer, pre-norm, with rotary positions and SwiGLU. Not a copy of any published model's layout.

    ids -> embedding -> [ x + attention(norm(x)), x + feed_forward(norm(x)) ] * layers -> norm -> head -> logits

Shapes: B batch, T sequence, D hidden, V vocabulary.
Before editing: names carry global layer numbers (`layers.7.` is the eighth layer on any stage); weights are saved under them.
"""

# ruff: noqa: N803, N806  (shape suffixes are upper case)
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from trainer_kit.exceptions import ModelError, UnsupportedError
from trainer_kit.model.provider import StageInfo
from trainer_kit.model.stage_layers import distribute_layers
from trainer_kit.models.config import DecoderConfig
from trainer_kit.models.layers import Attention, FeedForward, Projection, RotaryTable, TokenEmbedding

if TYPE_CHECKING:
    from trainer_kit.parallel.tensor import Style


class DecoderBlock(nn.Module):
    """One layer: attention and feed-forward, each on the normalised residual stream and added back to it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        # 2 * num_layers projections add up in the residual stream; so scaled, its variance does not grow with the depth (GPT-2).
        residual_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config, residual_std)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.feed_forward = FeedForward(config, residual_std)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x_BTD: torch.Tensor, rotary: RotaryTable) -> torch.Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), rotary))
        return x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))


class Decoder(nn.Module):
    """The layers of one stage: the embedding on the first, the norm and the head on the last, all of it without pipeline stages.

    Called as `model(input_ids)` with token ids (B, T), T at most `config.max_seq_len`; gives logits (B, T, V). With several stages,
    `lambda stage: Decoder(config, stage)` is a model provider.
    """

    def __init__(self, config: DecoderConfig, stage: StageInfo | None = None) -> None:
        super().__init__()
        stage = stage or StageInfo()
        self.config, self._stage = config, stage
        self._num_sequence_parts = 1
        numbers = distribute_layers(config.num_layers, stage.num_stages)[stage.index]
        self.rotary = RotaryTable(config.head_size, config.max_seq_len, config.rope_theta)
        if stage.is_first:
            self.embedding = TokenEmbedding(config.vocab_size, config.hidden_size, std=config.init_std)
            self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.layers = nn.ModuleDict({str(number): DecoderBlock(config) for number in numbers})
        if stage.is_last:
            self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
            self.head = Projection(config.hidden_size, config.vocab_size, std=config.init_std)
            if config.tie_embeddings and stage.is_first:
                self.head.weight = self.embedding.weight

    def forward(self, inputs: Any, shared: None = None) -> torch.Tensor:
        """Token ids (B, T), alone or as `input_ids` of a mapping, to logits (B, T, V); a stage in the middle takes and gives hidden states
        (B, T, D)."""
        x_BTD = self.dropout(self.embedding(self._tokens(inputs))) if self._stage.is_first else inputs
        for layer in self.layers.values():
            x_BTD = layer(x_BTD, self.rotary)
        return self.head(self.norm(x_BTD)) if self._stage.is_last else x_BTD

    def _tokens(self, inputs: Any) -> torch.Tensor:
        if isinstance(inputs, Mapping):
            if inputs.keys() != {"input_ids"}:
                raise ModelError(
                    f"Decoder got the inputs {sorted(map(str, inputs))}, expected token ids, or a mapping with 'input_ids' alone"
                )
            inputs = inputs["input_ids"]
        if not isinstance(inputs, torch.Tensor) or inputs.ndim != 2:
            found = f"of shape {tuple(inputs.shape)}" if isinstance(inputs, torch.Tensor) else f"in a {type(inputs).__name__}"
            raise ModelError(f"Decoder got inputs {found}, expected token ids (batch, length), or a mapping with 'input_ids' alone")
        if inputs.shape[1] > self.config.max_seq_len:
            raise ModelError(
                f"the sequence has {inputs.shape[1]} tokens, expected at most DecoderConfig(max_seq_len={self.config.max_seq_len})"
            )
        return inputs

    def stage_transfer_spec(self, inputs: Any, boundary: Literal["incoming", "outgoing"]) -> torch.Tensor:
        """Between stages go hidden states (B, T, D), or this rank's part of the sequence."""
        B, T = self._tokens(inputs).shape
        dtype = next(self.parameters()).dtype
        return torch.empty(B, T // self._num_sequence_parts, self.config.hidden_size, dtype=dtype, device="meta")

    def tied_parameters(self) -> dict[str, str]:
        """The head is the embedding of the first stage, if they are tied."""
        is_tie = self.config.tie_embeddings and self._stage.is_last and not self._stage.is_first
        return {"head.weight": "embedding.weight"} if is_tie else {}

    def tensor_plan(self, num_ranks: int) -> dict[str, Style]:
        """The plan of `parallelize_tensor` over this many ranks, with sequence parallelism: T is a multiple of the ranks.

        Each rank has some of the attention heads, some columns of the feed-forward, and a part of the vocabulary.
        """
        for name in ("num_heads", "num_kv_heads", "intermediate_size"):
            if (size := getattr(self.config, name)) % num_ranks:
                raise UnsupportedError(f"DecoderConfig({name}={size}) is cut over tp={num_ranks} ranks, which must divide it")
        self._num_sequence_parts = num_ranks
        first: dict[str, Style] = {"embedding": "vocabulary", "dropout": "sequence"}
        block: dict[str, Style] = {
            "layers.*_norm": "sequence",
            "layers.*.dropout": "sequence",
            "layers.*.attention.[qkv]_proj": "column",
            "layers.*.attention.o_proj": "row",
            "layers.*.feed_forward.gate_proj": "column",
            "layers.*.feed_forward.up_proj": "column",
            "layers.*.feed_forward.down_proj": "row",
        }
        last: dict[str, Style] = {"norm": "sequence", "head": "vocabulary"}
        return (first if self._stage.is_first else {}) | block | (last if self._stage.is_last else {})
