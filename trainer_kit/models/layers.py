"""The parts of a decoder block: projections, attention, feed-forward. Not here: rotary positions (`rotary.py`), experts (`experts.py`).

Shapes: B batch, T sequence, D hidden, H query heads, K key-value heads, E head size, F intermediate.
Before editing: each module that owns tensors sets all of them in `reset_parameters`, and its constructor does nothing else to values,
so that a model built on the meta device is the same model.
"""

# ruff: noqa: N803, N806, N815  (shape suffixes are upper case)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from trainer_kit.models.config import DecoderConfig
from trainer_kit.models.rotary import RotaryTable
from trainer_kit.parallel.context import num_rows_here
from trainer_kit.parallel.context_attention import choose_attention, context_attention

if TYPE_CHECKING:
    from trainer_kit.parallel.context import SequenceParts
    from trainer_kit.parallel.context_attention import Way


class Projection(nn.Linear):
    """A linear map, initialised from a normal distribution; a bias starts at 0."""

    def __init__(self, in_features: int, out_features: int, *, std: float, bias: bool = False) -> None:
        self.std = std  # before the parent's constructor, which calls reset_parameters
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class TokenEmbedding(nn.Embedding):
    """A table of token vectors, initialised from a normal distribution."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float) -> None:
        self.std = std  # before the parent's constructor, which calls reset_parameters
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """What layers know of the tokens beside their hidden states.

    positions_BT: None for 0, 1, ... is_real_BT: which are no padding; None for all. documents_BT: a token sees those up to its own place
    that have the same number; None for all. visible_B1TT: the same as a mask, for attention over whole sequences.
    """

    positions_BT: torch.Tensor | None = None
    is_real_BT: torch.Tensor | None = None
    documents_BT: torch.Tensor | None = None
    visible_B1TT: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        attention_mask_BT: torch.Tensor | None,
        positions_BT: torch.Tensor | None,
        document_ids_BT: torch.Tensor | None = None,
        *,
        has_mask: bool = True,
    ) -> TokenInfo:
        """From a mask that is 0 at padding, on either side, positions, and the documents that are packed into a row.

        Padding is as a document of its own: it sees itself, because a softmax over nothing is no number, and its gradient would be
        everybody's. has_mask: whether `visible_B1TT` is needed.
        """
        is_real_BT, documents_BT = None if document_ids_BT is None else document_ids_BT >= 0, document_ids_BT
        if attention_mask_BT is not None:
            is_real_BT = attention_mask_BT != 0
            documents_BT = is_real_BT.long() if document_ids_BT is None else 2 * document_ids_BT + is_real_BT
        if documents_BT is None or not has_mask:
            return cls(positions_BT, is_real_BT, documents_BT)
        same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
        return cls(positions_BT, is_real_BT, documents_BT, same_BTT.tril().unsqueeze(1))


PLAIN = TokenInfo()
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, TokenInfo], torch.Tensor]
"""Queries (B, T, H, E), keys and values (B, T, K, E) to what the heads give, (B, T, H, E), with a causal mask."""


def attend_here(q_BTHE: torch.Tensor, k_BTKE: torch.Tensor, v_BTKE: torch.Tensor, tokens: TokenInfo) -> torch.Tensor:
    """The whole sequence is on this rank."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
    visible, is_grouped = tokens.visible_B1TT, q.shape[1] != k.shape[1]
    y_BHTE = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=is_grouped)
    return y_BHTE.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class AttendOverParts:
    """Context parallelism: every rank has a part of the sequence, and attends to all of it."""

    parts: SequenceParts
    attention: Way

    def __call__(self, q_BtHE: torch.Tensor, k_BtKE: torch.Tensor, v_BtKE: torch.Tensor, tokens: TokenInfo) -> torch.Tensor:
        documents = tokens.documents_BT
        return context_attention(q_BtHE, k_BtKE, v_BtKE, self.parts.group, attention=self.attention, document_ids_Bt=documents)


class Attention(nn.Module):
    """Causal self-attention; groups of query heads share a head of keys and values (Ainslie et al. 2023, arXiv:2305.13245).

    With `qk_norm` queries and keys of each head are normalised (Henry et al. 2020, arXiv:2010.04245), here by RMS and before the rotation.
    """

    def __init__(self, config: DecoderConfig, residual_std: float) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.attend: Attend = attend_here
        width, bias = config.hidden_size, config.attention_bias
        q_width, kv_width = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        self.q_proj = Projection(width, q_width, std=config.init_std, bias=bias)
        self.k_proj = Projection(width, kv_width, std=config.init_std, bias=bias)
        self.v_proj = Projection(width, kv_width, std=config.init_std, bias=bias)
        self.o_proj = Projection(q_width, width, std=residual_std, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_BTD: torch.Tensor, rotary: RotaryTable, tokens: TokenInfo = PLAIN) -> torch.Tensor:
        q_BTHE = rotary(_normed(self._heads(self.q_proj(x_BTD)), self.q_norm), tokens.positions_BT)
        k_BTKE = rotary(_normed(self._heads(self.k_proj(x_BTD)), self.k_norm), tokens.positions_BT)
        v_BTKE = self._heads(self.v_proj(x_BTD))
        return self.o_proj(self.attend(q_BTHE, k_BTKE, v_BTKE, tokens).flatten(2))

    def set_sequence_parts(self, parts: SequenceParts, attention: Way) -> None:
        """See `parallelize_context`. With tensor parallelism this rank has some of the heads."""
        num_heads, num_kv_heads = (num_rows_here(layer.weight) // self.head_size for layer in (self.q_proj, self.k_proj))
        self.attend = AttendOverParts(parts, choose_attention(num_heads, num_kv_heads, parts.num_ranks, attention))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_size))


def _normed(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    """In the dtype of the norm's weight: autocast gives projections in another one, which torch's norm takes with a warning, slowly."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype) if isinstance(norm, nn.RMSNorm) else x


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): a gated linear unit with SiLU."""

    def __init__(self, config: DecoderConfig, residual_std: float) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Projection(width, inner, std=config.init_std, bias=bias)
        self.up_proj = Projection(width, inner, std=config.init_std, bias=bias)
        self.down_proj = Projection(inner, width, std=residual_std, bias=bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
