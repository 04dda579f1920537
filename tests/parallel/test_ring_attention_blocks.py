"""Blocks of attention, by torch's kernels and in plain operations, against autograd through a softmax."""

import pytest
import torch

from trainer_kit.parallel import ring_attention_blocks as module
from trainer_kit.parallel.ring_attention_blocks import Sight, add_block, attend, attend_backward

B, H, K, E = 2, 4, 2, 8


def tensors(num_queries, num_keys, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sizes = [(H, num_queries), (K, num_keys), (K, num_keys), (H, num_queries)]
    return [torch.randn(B, *size, E, dtype=torch.float64, generator=generator).to(dtype) for size in sizes]


def visible(num_queries, num_keys):
    """One query sees nothing."""
    found = torch.rand(B, 1, num_queries, num_keys, generator=torch.Generator().manual_seed(1)) > 0.4
    found[1, :, 2] = False
    return found


SIGHTS = {
    "all": (5, 7, lambda: Sight(0.4)),
    "causal": (6, 6, lambda: Sight(0.4, is_causal=True)),
    "some": (5, 7, lambda: Sight(0.4, visible_B1TS=visible(5, 7))),
    "some, causal": (6, 6, lambda: Sight(0.4, is_causal=True, visible_B1TS=visible(6, 6))),
}


def expected_scores(q, k, sight):
    scores = sight.scale * q @ k.repeat_interleave(H // K, 1).mT
    if sight.is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores if sight.visible_B1TS is None else scores.masked_fill(~sight.visible_B1TS, -torch.inf)


@pytest.fixture(params=["kernel", "plain", "plain in slices"])
def way(request, monkeypatch):
    if request.param != "kernel":
        monkeypatch.setattr(module, "_has_kernel", lambda *_: False)
    if request.param == "plain in slices":
        monkeypatch.setattr(module, "_MAX_SCORES", 2 * B * H * 7)  # two queries at a time


@pytest.mark.parametrize("name", SIGHTS)
def test_output_and_logsumexp(way, name):
    num_queries, num_keys, make = SIGHTS[name]
    q, k, v, _ = tensors(num_queries, num_keys)
    out, logsumexp = attend(q, k, v, make())
    scores = expected_scores(q, k, make())
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1).nan_to_num(0) @ v.repeat_interleave(H // K, 1))


@pytest.mark.parametrize("name", SIGHTS)
def test_the_gradients_of_blocks_add_up(way, name):
    """Of a softmax over the keys of the block and others, as a ring gives its output and logsumexp."""
    num_queries, num_keys, make = SIGHTS[name]
    q, k, v, gradient = tensors(num_queries, num_keys)
    others = tensors(num_queries, 3)[1:3]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = torch.cat([expected_scores(*leaves[:2], make()), expected_scores(leaves[0], others[0], Sight(0.4))], -1)
    out = scores.softmax(-1) @ torch.cat([leaves[2], others[1]], 2).repeat_interleave(H // K, 1)
    out.backward(gradient)
    saved = (gradient, out.detach(), scores.logsumexp(-1).detach())
    dq, dk, dv = attend_backward((q, k, v), *saved, make())
    dq += attend_backward((q, *others), *saved, Sight(0.4))[0]
    for found, leaf in zip((dq, dk, dv), leaves, strict=True):
        torch.testing.assert_close(found, leaf.grad)


def test_blocks_are_joined(way):
    """Also with a block of which a query sees nothing."""
    q, k, v, _ = tensors(5, 7)
    more = [x[:, :, :7] + 1 for x in (k, v)]
    sight = Sight(0.4, visible_B1TS=visible(5, 7))
    out, logsumexp = attend(q, k, v, Sight(0.4))
    add_block(out, logsumexp, *attend(q, *more, sight))
    scores = torch.cat([expected_scores(q, k, Sight(0.4)), expected_scores(q, more[0], sight)], -1)
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ torch.cat([v, more[1]], 2).repeat_interleave(H // K, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_of_narrow_numbers_are_in_single_precision(way, dtype):
    q, k, v, gradient = tensors(5, 7, dtype)
    out, logsumexp = attend(q, k, v, Sight(0.4))
    assert logsumexp.dtype == torch.float32
    gradients = attend_backward((q, k, v), gradient, out.to(dtype), logsumexp, Sight(0.4))
    assert {x.dtype for x in (out, *gradients)} <= {dtype, torch.float32}
    torch.testing.assert_close(logsumexp, expected_scores(q.float(), k.float(), Sight(0.4)).logsumexp(-1), atol=1e-2, rtol=0)
