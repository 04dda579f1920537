"""Ring attention (Liu et al. 2023, arXiv:2310.01889): each rank keeps its queries, and keys and values travel round the ranks.

Exact: the same output and gradients as attention over the whole sequence, in another order of summation. Sequences are cut as
`sequence_parts.py` says, so that with a causal mask every rank has as much to compute in every step; what the mask makes empty is left out.
Not here: dropout of attention weights (there is none, so no random numbers either) and sliding windows.
Before editing: a ring holds the keys and values that it uses and those on their way, never more; all ranks post the same transfers in the
same order, from which the backends know what belongs together.
"""

# ruff: noqa: N803, N806
# Shapes: B batch, t = T / R positions of this rank of R, H query heads, K key-value heads, E head size (of values it may be another one).
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer_kit.parallel.ring_attention_blocks import Sight, add_block, attend, attend_backward, wide_dtype
from trainer_kit.parallel.sequence_parts import check_parts

Tensors = tuple[torch.Tensor, ...]


def ring_attention(
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

    q, k, v: (B, t, H, E), (B, t, K, E), (B, t, K, E); H is a multiple of K, and head h uses head h * K // H of keys and values.
    document_ids: (B, t) integers, cut like the sequence. Tokens see those with the same id; padding that has an id of its own is seen by
    no other token. None: all are one document.
    scale: of the products; None is 1 / sqrt(E).
    """
    ring = Ring(group)
    check_parts(q_BtHE.shape[1] * ring.num_ranks, ring.num_ranks)
    inputs = _as_under_autocast((q_BtHE, k_BtKE, v_BtKE))
    pass_ = _Pass(ring, causal, q_BtHE.shape[-1] ** -0.5 if scale is None else scale)
    with torch.autocast(q_BtHE.device.type, enabled=False):
        return _RingAttention.apply(*inputs, document_ids_Bt, pass_)


class Ring:
    """The ranks of a group in a circle, each of which sends to the next one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def source(self, step: int) -> int:
        """Whose keys and values are here after so many steps."""
        return (self.rank - step) % self.num_ranks

    def send_on(self, tensors: Tensors) -> Arriving:
        """Start to send these to the next rank, and to receive as much from the one before."""
        following, before = (self.rank + 1) % self.num_ranks, (self.rank - 1) % self.num_ranks
        sent = tuple(x.contiguous() for x in tensors)
        received = tuple(torch.empty_like(x) for x in sent)
        transfers = [dist.P2POp(dist.isend, x, group=self.group, group_peer=following) for x in sent]
        transfers += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=before) for x in received]
        return Arriving(sent, received, dist.batch_isend_irecv(transfers))


@dataclass(slots=True)
class Arriving:
    """Tensors on their way. What is sent stays alive until it has left; a transfer that is over must not keep its tensors."""

    sent: Tensors
    received: Tensors
    works: list[Any]

    def wait(self) -> Tensors:
        for work in self.works:
            work.wait()
        self.sent, self.works = (), []
        return self.received


@dataclass(frozen=True, slots=True)
class Block:
    """The queries of a rank and the keys at hand that have to do with each other."""

    queries: slice
    keys: slice
    is_causal: bool = False

    @classmethod
    def of(cls, rank: int, source: int, num_positions: int, causal: bool) -> Block:
        """For the queries of `rank` and the keys of `source`, of `num_positions` each: two chunks, of which the first is early."""
        everything, early, late = slice(None), slice(0, num_positions // 2), slice(num_positions // 2, None)
        if not causal:
            return cls(everything, everything)
        if source == rank:
            return cls(everything, everything, is_causal=True)
        # A rank before this one has an earlier first chunk and a later second one; a rank after it lies between its two chunks.
        return cls(everything, early) if source < rank else cls(late, everything)

    def keys_of(self, held: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of this block, (B, K, S, E), from those at hand, (B, t, K, E)."""
        k, v = (x[:, self.keys].transpose(1, 2) for x in held[:2])
        return k, v


@dataclass(frozen=True, slots=True)
class _Pass:
    """One attention: the ring, and what is seen."""

    ring: Ring
    causal: bool
    scale: float

    def block(self, step: int, num_positions: int) -> Block:
        return Block.of(self.ring.rank, self.ring.source(step), num_positions, self.causal)

    def sight(self, block: Block, own_ids: torch.Tensor | None, ids: Tensors) -> Sight:
        """own_ids: of all queries; ids: of all keys, in a tuple that is empty without documents."""
        if own_ids is None:
            return Sight(self.scale, block.is_causal)
        same = own_ids[:, None, block.queries, None] == ids[0][:, None, None, block.keys]
        return Sight(self.scale, block.is_causal, same)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BtHE: torch.Tensor, k_BtKE: torch.Tensor, v_BtKE: torch.Tensor, ids_Bt: torch.Tensor | None, pass_: _Pass
    ) -> torch.Tensor:
        ring, q = pass_.ring, q_BtHE.transpose(1, 2)
        held: Tensors = (k_BtKE, v_BtKE) if ids_Bt is None else (k_BtKE, v_BtKE, ids_Bt)
        for step in range(ring.num_ranks):
            arriving = ring.send_on(held) if step + 1 < ring.num_ranks else None
            block = pass_.block(step, q.shape[2])
            found, found_logsumexp = attend(q[:, :, block.queries], *block.keys_of(held), pass_.sight(block, ids_Bt, held[2:]))
            if step == 0:  # every query sees itself, so that no logsumexp is -inf from here on
                out, logsumexp = found.to(wide_dtype(q.dtype)), found_logsumexp
            else:
                add_block(out[:, :, block.queries], logsumexp[:, :, block.queries], found, found_logsumexp)
            held = arriving.wait() if arriving else ()
        result_BtHE = q_BtHE.new_empty(*q_BtHE.shape[:-1], v_BtKE.shape[-1])
        result_BtHE.transpose(1, 2).copy_(out)
        ctx.save_for_backward(q_BtHE, k_BtKE, v_BtKE, ids_Bt, result_BtHE, logsumexp)
        ctx.pass_ = pass_
        return result_BtHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BtHE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Keys and values go round once more; the sums of their gradients follow them, one step behind, and end at their owner."""
        q_BtHE, k_BtKE, v_BtKE, ids_Bt, result_BtHE, logsumexp = ctx.saved_tensors
        pass_, ring, wide = ctx.pass_, ctx.pass_.ring, wide_dtype(q_BtHE.dtype)
        q, gradient, result = (x.contiguous().transpose(1, 2) for x in (q_BtHE, gradient_BtHE, result_BtHE))
        held: Tensors = (k_BtKE, v_BtKE) if ids_Bt is None else (k_BtKE, v_BtKE, ids_Bt)
        sums: Arriving | None = None
        for step in range(ring.num_ranks):
            arriving = ring.send_on(held) if step + 1 < ring.num_ranks else None
            block = pass_.block(step, q.shape[2])
            rows, sight = block.queries, pass_.sight(block, ids_Bt, held[2:])
            outputs = (gradient[:, :, rows], result[:, :, rows], logsumexp[:, :, rows])
            more_q, *more_kv = attend_backward((q[:, :, rows], *block.keys_of(held)), *outputs, sight)
            if step == 0:
                dq, own_kv = more_q.to(wide), tuple(x.transpose(1, 2).to(wide) for x in more_kv)
            else:
                dq[:, :, rows] += more_q
                travelling = sums.wait() if sums else tuple(torch.zeros_like(x) for x in own_kv)
                for total, more in zip(travelling, more_kv, strict=True):
                    total[:, block.keys] += more.transpose(1, 2)
                sums = ring.send_on(travelling)
            held = arriving.wait() if arriving else ()
        if sums:
            own_kv = tuple(own + others for own, others in zip(own_kv, sums.wait(), strict=True))
        dk, dv = (x.to(k_BtKE.dtype) for x in own_kv)
        return dq.transpose(1, 2).to(q.dtype), dk, dv, None, None


def _as_under_autocast(tensors: Tensors) -> Tensors:
    """What `scaled_dot_product_attention` would compute with: autocast does not know of this function."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(kind)) for x in tensors)
