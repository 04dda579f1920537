"""Attention over a sequence that is cut over the ranks of a context group, by one of two ways, chosen by heads and ranks.

The ways are `ring_attention.py` and `ulysses.py`; both are exact. Not here: how the sequence is cut (`sequence_parts.py`).
"""

# ruff: noqa: N803
from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.distributed as dist

from trainer_kit.exceptions import ConfigurationError, nearest
from trainer_kit.parallel.ring_attention import ring_attention
from trainer_kit.parallel.ulysses import check_heads, repeated_kv_heads, ulysses_attention

Way = Literal["ring", "ulysses", "auto"]


def context_attention(
    q_BtHE: torch.Tensor,
    k_BtKE: torch.Tensor,
    v_BtKE: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    attention: Way = "auto",
    causal: bool = True,
    document_ids_Bt: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Self-attention of this rank's part of the sequence to the whole of it: (B, t, H, E). See `ring_attention` for the arguments."""
    chosen = choose_attention(q_BtHE.shape[2], k_BtKE.shape[2], dist.get_world_size(group), attention)
    attend = ulysses_attention if chosen == "ulysses" else ring_attention
    return attend(q_BtHE, k_BtKE, v_BtKE, group, causal=causal, document_ids_Bt=document_ids_Bt, scale=scale)


def choose_attention(num_heads: int, num_kv_heads: int, num_ranks: int, attention: str = "auto") -> Literal["ring", "ulysses"]:
    """The way for so many heads, those of one rank of tensor parallelism, over so many ranks of the context group.

    "auto": Ulysses where the query heads can be shared out and fewer elements are sent than round a ring. Per position, forward and
    backward: Ulysses sends queries, outputs, keys and values, and as many gradients, each element once; a ring sends keys and values twice
    and their gradients once, R - 1 times.

    Raises ConfigurationError for a way that does not exist, or one that needs other heads.
    """
    if attention == "ring":
        return "ring"
    if attention == "ulysses":
        check_heads(num_heads, num_ranks)
        return "ulysses"
    if attention != "auto":
        raise ConfigurationError(f"attention={attention!r} is no way of context parallelism; {nearest(attention, get_args(Way))}")
    sent_by_ulysses = 4 * (num_heads + repeated_kv_heads(num_kv_heads, num_ranks)) / num_ranks
    sent_round_a_ring = 6 * num_kv_heads
    return "ulysses" if num_heads % num_ranks == 0 and sent_by_ulysses <= sent_round_a_ring else "ring"
