"""`RotaryTable`: rotary positions. Not here: how they are stretched for long sequences (`rotary_scaling.py`)."""

# ruff: noqa: N803, N815  (shape suffixes are upper case: B batch, T sequence, H heads, E head size)
from __future__ import annotations

import torch
from torch import nn

from trainer_kit.models.rotary_scaling import RotaryScaling, frequencies


class RotaryTable(nn.Module):
    """Cosines and sines of rotary positions (Su et al. 2021, arXiv:2104.09864), in float32 whatever the dtype of the model.

    Position t turns the pair (e, e + E/2) of a head by the angle t * theta^(-2e/E), or by what `scaling` makes of it.
    """

    cos_TE: torch.Tensor
    sin_TE: torch.Tensor

    def __init__(self, head_size: int, max_seq_len: int, theta: float, scaling: RotaryScaling | None = None) -> None:
        super().__init__()
        self.theta, self.scaling = theta, scaling
        self.register_buffer("cos_TE", torch.empty(max_seq_len, head_size // 2, dtype=torch.float32), persistent=False)
        self.register_buffer("sin_TE", torch.empty(max_seq_len, head_size // 2, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the table, in float64: an angle of 100,000 has no exact cosine in float32."""
        num_positions, half = self.cos_TE.shape
        with self.cos_TE.device:
            positions = torch.arange(num_positions, dtype=torch.float64)
            per_position = self.scaling.frequencies(2 * half, self.theta) if self.scaling else frequencies(2 * half, self.theta)
        angles, scale = torch.outer(positions, per_position), self.scaling.attention_scale if self.scaling else 1.0
        self.cos_TE.copy_(angles.cos() * scale)
        self.sin_TE.copy_(angles.sin() * scale)

    def forward(self, x_BTHE: torch.Tensor, positions_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Turn each head by its position; without positions the sequence starts at 0."""
        if positions_BT is None:
            seq_len = x_BTHE.shape[1]
            cos, sin = self.cos_TE[:seq_len, None, :], self.sin_TE[:seq_len, None, :]
        else:
            cos, sin = self.cos_TE[positions_BT].unsqueeze(2), self.sin_TE[positions_BT].unsqueeze(2)
        wide = torch.promote_types(x_BTHE.dtype, cos.dtype)
        first, second = x_BTHE.to(wide).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHE.dtype)
