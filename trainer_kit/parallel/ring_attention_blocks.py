"""Attention of some queries to some keys, with what is needed to join it with their attention to other keys: the logsumexp.

The kernels are those of torch's `scaled_dot_product_attention`, which keeps the logsumexp to itself; where they do not take what is asked
(another device, a mask on an accelerator, values of another size than keys) the same is computed in plain operations, a slice of the
queries at a time. Sums over keys are joined by the online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867).
Before editing: the backward of a block takes the output and the logsumexp over all keys. Then its probabilities are the right ones, and
the gradients of blocks only have to be added.
"""

# ruff: noqa: N803, N806, N815
# Shapes: B batch, H query heads, K key-value heads, R = T * H / K, T queries, S keys, E head size (of values it may be another one).
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trainer_kit.torch_private import flash_attention, flash_attention_backward

_MAX_SCORES = 2**26  # at a time in plain operations: 256 MiB in float32


@dataclass(frozen=True, slots=True)
class Sight:
    """Which keys queries see, and by how much products are scaled.

    is_causal: query t sees keys 0 to t. visible_B1TS: those that are True too, None for all; a query may see none.
    """

    scale: float
    is_causal: bool = False
    visible_B1TS: torch.Tensor | None = None


def attend(q_BHTE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, sight: Sight) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (B, H, T, E), and the logsumexp of the scores (B, H, T): -inf for queries that see none of the keys.

    The logsumexp is in `wide_dtype`; the output is in that or in the dtype of the inputs, whichever it was computed in.
    """
    if not _has_kernel(q_BHTE, k_BKSE, v_BKSE, sight):
        return _attend_plainly(q_BHTE, k_BKSE, v_BKSE, sight)
    is_causal, bias = _for_kernel(sight, q_BHTE)
    out, logsumexp = flash_attention(q_BHTE, k_BKSE, v_BKSE, is_causal=is_causal, bias=bias, scale=sight.scale)
    if sight.visible_B1TS is not None:  # the kernel says 0 for a sum over nothing
        logsumexp = logsumexp.masked_fill(~sight.visible_B1TS.any(-1), -torch.inf)
    return out, logsumexp


def attend_backward(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gradient_BHTE: torch.Tensor,
    out_BHTE: torch.Tensor,
    logsumexp_BHT: torch.Tensor,
    sight: Sight,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a block adds to the gradients of its inputs (queries, keys, values); output and logsumexp are those over all keys.

    Each is in the dtype of the inputs or in `wide_dtype`.
    """
    if not _has_kernel(*inputs, sight):
        return _attend_plainly_backward(inputs, gradient_BHTE, out_BHTE, logsumexp_BHT, sight)
    is_causal, bias = _for_kernel(sight, inputs[0])
    return flash_attention_backward(
        inputs, gradient_BHTE, out_BHTE, logsumexp_BHT, is_causal=is_causal, bias=bias, scale=sight.scale
    )


def add_block(out: torch.Tensor, logsumexp: torch.Tensor, more_out: torch.Tensor, more_logsumexp: torch.Tensor) -> None:
    """Join in place the attention to some keys with the attention of the same queries to more keys. `logsumexp` is finite."""
    joined = torch.logaddexp(logsumexp, more_logsumexp)
    out.mul_((logsumexp - joined).exp_().unsqueeze(-1)).add_(more_out * (more_logsumexp - joined).exp_().unsqueeze(-1))
    logsumexp.copy_(joined)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums over blocks are kept: float32, and float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _has_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight) -> bool:
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return False
    if q.device.type == "cpu":
        return True
    if q.device.type != "cuda" or sight.visible_B1TS is not None or q.shape[-1] % 8:
        return False
    asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, sight.is_causal, q.shape[1] != k.shape[1])
    return torch.backends.cuda.can_use_flash_attention(asked)


def _for_kernel(sight: Sight, q: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
    """`is_causal` and the mask as a kernel takes them: one or the other, and -inf for what is not seen."""
    visible = sight.visible_B1TS
    if visible is None:
        return sight.is_causal, None
    visible = visible.tril() if sight.is_causal else visible
    return False, torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, -torch.inf)


def _attend_plainly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight) -> tuple[torch.Tensor, torch.Tensor]:
    out, logsumexp = (q.new_empty(*q.shape[:-1], *size, dtype=wide_dtype(q.dtype)) for size in (v.shape[-1:], ()))
    for rows, _, scores_BKRS in _scores(q, k, sight):
        total_BKR = scores_BKRS.logsumexp(-1)
        out[:, :, rows] = _ungroup(_probabilities(scores_BKRS, total_BKR) @ v.to(scores_BKRS.dtype), q.shape[1])
        logsumexp[:, :, rows] = _ungroup(total_BKR, q.shape[1])
    return out, logsumexp


def _attend_plainly_backward(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gradient: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    sight: Sight,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = inputs
    wide, num_groups = wide_dtype(q.dtype), k.shape[1]
    k_wide, v_wide = k.to(wide), v.to(wide)
    dq, dk, dv = torch.empty_like(q, dtype=wide), torch.zeros_like(k_wide), torch.zeros_like(v_wide)
    for rows, q_BKRE, scores_BKRS in _scores(q, k, sight):
        d_out, out_rows, total_BKR = (_group(x[:, :, rows], num_groups).to(wide) for x in (gradient, out, logsumexp))
        probabilities = _probabilities(scores_BKRS, total_BKR)
        dv += probabilities.mT @ d_out
        d_scores = (d_out @ v_wide.mT).sub_((d_out * out_rows).sum(-1, keepdim=True)).mul_(probabilities).mul_(sight.scale)
        dq[:, :, rows] = _ungroup(d_scores @ k_wide, q.shape[1])
        dk += d_scores.mT @ q_BKRE
    return dq, dk, dv


def _scores(q: torch.Tensor, k: torch.Tensor, sight: Sight) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """A slice of the queries, these as (B, K, R, E), and their scores (B, K, R, S), -inf for keys that they do not see."""
    wide, (num_queries, num_keys) = wide_dtype(q.dtype), (q.shape[2], k.shape[2])
    at_a_time = max(1, _MAX_SCORES // (q.shape[0] * q.shape[1] * num_keys))
    k_wide = k.to(wide)
    keys = torch.arange(num_keys, device=q.device)
    for start in range(0, num_queries, at_a_time):
        rows = slice(start, min(start + at_a_time, num_queries))
        q_BKRE = _group(q[:, :, rows], k.shape[1]).to(wide)
        scores_BKRS = (q_BKRE @ k_wide.mT).mul_(sight.scale)
        scores_BKGTS = scores_BKRS.unflatten(2, (-1, rows.stop - start))
        if sight.is_causal:
            scores_BKGTS.masked_fill_(keys > keys[rows, None], -torch.inf)
        if sight.visible_B1TS is not None:
            scores_BKGTS.masked_fill_(~sight.visible_B1TS[:, :, None, rows], -torch.inf)
        yield rows, q_BKRE, scores_BKRS


def _group(x_BHT: torch.Tensor, num_groups: int) -> torch.Tensor:
    """The queries of the heads that share a key-value head in one row: (B, H, T, ...) to (B, K, R, ...)."""
    return x_BHT.unflatten(1, (num_groups, -1)).flatten(2, 3)


def _ungroup(x_BKR: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x_BKR.unflatten(2, (num_heads // x_BKR.shape[1], -1)).flatten(1, 2)


def _probabilities(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """In place of the scores; 0 in a row whose logsumexp is -inf, where the difference would be no number."""
    return scores.sub_(logsumexp.clamp(min=torch.finfo(scores.dtype).min).unsqueeze(-1)).exp_()
