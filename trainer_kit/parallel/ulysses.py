"""Attention by an exchange of heads for positions (DeepSpeed-Ulysses: Jacobs et al. 2023, arXiv:2309.14509).

An all-to-all gives each rank the whole sequence for its share of the heads, torch computes attention there, and another all-to-all brings
the output back to its positions. Inside, the sequence is in its order again (see `sequence_parts.py` for how it is cut).
Not here: dropout of attention weights (there is none, so no random numbers either) and sliding windows.
"""

# ruff: noqa: N803, N806
# Shapes: B batch, T the whole sequence, t = T / R positions of this rank of R, H query heads, K key-value heads, E head size.
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.parallel.sequence_parts import check_parts, gather_parts, join_parts, split_parts

Mover: TypeAlias = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def ulysses_attention(
    q_BtHE: torch.Tensor,
    k_BtKE: torch.Tensor,
    v_BtKE: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    causal: bool = True,
    document_ids_Bt: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Self-attention of this rank's part of the sequence to the whole of it: (B, t, H, E). All ranks of the group take part.

    The arguments are those of `ring_attention`. H must be a multiple of the number of ranks; if K is not, the heads of keys and values
    are repeated until they are, and so are the bytes that are sent. With documents each rank holds a mask of (B, 1, T, T) booleans.

    Raises ConfigurationError for heads or positions that cannot be divided.
    """
    num_ranks = dist.get_world_size(group)
    num_heads, num_kv_heads = q_BtHE.shape[2], k_BtKE.shape[2]
    check_heads(num_heads, num_ranks)
    check_parts(q_BtHE.shape[1] * num_ranks, num_ranks)
    repeats = repeated_kv_heads(num_kv_heads, num_ranks) // num_kv_heads
    if repeats > 1:
        k_BtKE, v_BtKE = (x.repeat_interleave(repeats, 2) for x in (k_BtKE, v_BtKE))
    q, k, v = (_Move.apply(x, group, _to_heads, _to_positions).transpose(1, 2) for x in (q_BtHE, k_BtKE, v_BtKE))
    visible = None if document_ids_Bt is None else _visible(gather_parts(document_ids_Bt, group), causal)
    is_causal, is_grouped = causal and visible is None, q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=is_causal, scale=scale, enable_gqa=is_grouped)
    return _Move.apply(y.transpose(1, 2), group, _to_positions, _to_heads)


def check_heads(num_heads: int, num_ranks: int) -> None:
    """Raises ConfigurationError if the query heads cannot be shared out."""
    if num_heads % num_ranks:
        raise ConfigurationError(
            f"{num_heads} attention heads cannot be shared out over cp={num_ranks} ranks; expected a multiple of {num_ranks}. "
            'Take attention="ring" (context_attention of MeshStrategy), which does not divide heads, or another cp. Usual cause: tp took '
            "its share of the heads before"
        )


def repeated_kv_heads(num_kv_heads: int, num_ranks: int) -> int:
    """How many heads of keys and values are sent, so that each rank gets those of its query heads and no others."""
    return math.lcm(num_kv_heads, num_ranks)


class _Move(torch.autograd.Function):
    """`there`, whose gradient goes `back`: each puts elements into other places, so the other one is its derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, there: Mover, back: Mover) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(gradient, ctx.group), None, None, None


def _to_heads(x_BtHE: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(B, t, H, E) to (B, T, H / R, E)."""
    x_BtRhE = x_BtHE.unflatten(2, (dist.get_world_size(group), -1))
    return join_parts(_exchange(x_BtRhE.movedim(2, 0), group))


def _to_positions(x_BThE: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(B, T, H / R, E) to (B, t, H, E)."""
    x_RBthE = _exchange(split_parts(x_BThE, dist.get_world_size(group)), group)
    return x_RBthE.movedim(0, 2).flatten(2, 3).contiguous()


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """x[i] goes to rank i; result[i] came from rank i."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def _visible(ids_BT: torch.Tensor, causal: bool) -> torch.Tensor:
    same_B1TT = (ids_BT[:, :, None] == ids_BT[:, None, :]).unsqueeze(1)
    return same_B1TT.tril() if causal else same_B1TT
