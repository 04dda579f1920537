"""The parts of a decoder block: projections, rotary positions, attention, feed-forward.

Shapes: B batch, T sequence, D hidden, H query heads, K key-value heads, E head size, F intermediate.
Before editing: each module that owns tensors sets all of them in `reset_parameters`, and its constructor does nothing else to values,
so that a model built on the meta device is the same model.
"""

# ruff: noqa: N803, N806, N815  (shape suffixes are upper case)
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trainer_kit.models.config import DecoderConfig


class Projection(nn.Linear):
    """A linear map without bias, initialised from a normal distribution."""

    def __init__(self, in_features: int, out_features: int, *, std: float) -> None:
        self.std = std  # before the parent's constructor, which calls reset_parameters
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class TokenEmbedding(nn.Embedding):
    """A table of token vectors, initialised from a normal distribution."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float) -> None:
        self.std = std  # before the parent's constructor, which calls reset_parameters
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class RotaryTable(nn.Module):
    """Cosines and sines of rotary positions (Su et al. 2021, arXiv:2104.09864), in float32 whatever the dtype of the model.

    Position t turns the pair (e, e + E/2) of a head by the angle t * theta^(-2e/E).
    """

    cos_TE: torch.Tensor
    sin_TE: torch.Tensor

    def __init__(self, head_size: int, max_seq_len: int, theta: float) -> None:
        super().__init__()
        self.theta = theta
        self.register_buffer("cos_TE", torch.empty(max_seq_len, head_size // 2, dtype=torch.float32), persistent=False)
        self.register_buffer("sin_TE", torch.empty(max_seq_len, head_size // 2, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the table, in float64: an angle of 100,000 has no exact cosine in float32."""
        num_positions, half = self.cos_TE.shape
        device = self.cos_TE.device
        exponents = torch.arange(half, dtype=torch.float64, device=device) / half
        positions = torch.arange(num_positions, dtype=torch.float64, device=device)
        angles = torch.outer(positions, self.theta**-exponents)
        self.cos_TE.copy_(angles.cos())
        self.sin_TE.copy_(angles.sin())

    def forward(self, x_BTHE: torch.Tensor) -> torch.Tensor:
        """Turn each head by its position; the sequence starts at position 0."""
        seq_len = x_BTHE.shape[1]
        cos, sin = self.cos_TE[:seq_len, None, :], self.sin_TE[:seq_len, None, :]
        wide = torch.promote_types(x_BTHE.dtype, cos.dtype)
        first, second = x_BTHE.to(wide).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHE.dtype)


class Attention(nn.Module):
    """Causal self-attention; groups of query heads share a head of keys and values (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, config: DecoderConfig, residual_std: float) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.is_grouped = config.num_kv_heads != config.num_heads
        width, kv_width = config.hidden_size, config.num_kv_heads * config.head_size
        self.q_proj = Projection(width, width, std=config.init_std)
        self.k_proj = Projection(width, kv_width, std=config.init_std)
        self.v_proj = Projection(width, kv_width, std=config.init_std)
        self.o_proj = Projection(width, width, std=residual_std)

    def forward(self, x_BTD: torch.Tensor, rotary: RotaryTable) -> torch.Tensor:
        q_BTHE = rotary(self.q_proj(x_BTD).unflatten(-1, (-1, self.head_size)))
        k_BTKE = rotary(self.k_proj(x_BTD).unflatten(-1, (-1, self.head_size)))
        v_BTKE = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_size))
        q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
        y_BHTE = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.is_grouped)
        return self.o_proj(y_BHTE.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): a gated linear unit with SiLU."""

    def __init__(self, config: DecoderConfig, residual_std: float) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden_size, config.intermediate_size, std=config.init_std)
        self.up_proj = Projection(config.hidden_size, config.intermediate_size, std=config.init_std)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size, std=residual_std)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
