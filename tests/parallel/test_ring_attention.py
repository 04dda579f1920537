"""What a ring holds, sends and computes; that it is exact is in test_context_attention.py."""

import weakref
from collections import Counter, defaultdict
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.parallel import ring_attention as module
from trainer_kit.parallel.ring_attention import Block, ring_attention
from trainer_kit.parallel.sequence_parts import part_positions
from trainer_kit.testing import run_on_ranks

B, H, K, E, t = 2, 4, 2, 8, 6
KEYS_AND_VALUES = 2 * B * t * K * E  # elements that a rank has


class Transfers:
    """In place of torch's function: the elements that were sent, by dtype, and the most received ones that were held at a time."""

    def __init__(self):
        self.sent, self.most_held = Counter(), Counter()
        self._received = defaultdict(list)
        self._start = dist.batch_isend_irecv

    def __call__(self, transfers):
        for transfer in transfers:
            tensor = transfer.tensor
            if transfer.op is dist.isend:
                self.sent[tensor.dtype] += tensor.numel()
                continue
            received = self._received[tensor.dtype]
            received.append(weakref.ref(tensor))
            held = sum(ref().numel() for ref in received if ref() is not None)
            self.most_held[tensor.dtype] = max(self.most_held[tensor.dtype], held)
        return self._start(transfers)


def inputs():
    return [torch.randn(B, t, heads, E, dtype=torch.bfloat16).requires_grad_() for heads in (H, K, K)]


def transfers_job():
    with patch.object(dist, "batch_isend_irecv", Transfers()) as forward:
        out = ring_attention(*inputs(), dist.group.WORLD)
    with patch.object(dist, "batch_isend_irecv", Transfers()) as backward:
        out.sum().backward()
    return [(dict(transfers.sent), dict(transfers.most_held)) for transfers in (forward, backward)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_ring_holds_two_chunks_at_a_time(num_ranks):
    """Besides the own ones, which autograd keeps: what is used, and what is on its way. In the backward as much of gradients too."""
    held = min(2, num_ranks - 1) * KEYS_AND_VALUES
    once_round = (num_ranks - 1) * KEYS_AND_VALUES
    for forward, backward in run_on_ranks(num_ranks, transfers_job):
        assert forward == ({torch.bfloat16: once_round}, {torch.bfloat16: held})
        both = (torch.bfloat16, torch.float32)  # gradients are summed in float32
        assert backward == (dict.fromkeys(both, once_round), dict.fromkeys(both, held))


def saved_job():
    out = ring_attention(*inputs(), dist.group.WORLD)
    return sum(x.numel() for x in out.grad_fn.saved_tensors if x is not None)


def test_what_is_kept_for_the_backward_is_of_the_own_part():
    assert run_on_ranks(4, saved_job) == [2 * B * t * H * E + KEYS_AND_VALUES + B * t * H] * 4


def blocks_job():
    """The scores that are computed in each step, forward and backward."""
    found = []

    def counted(function):
        def call(*args):
            q, k = args[0][:2] if isinstance(args[0], tuple) else args[:2]
            found.append(q.shape[2] * k.shape[2])
            return function(*args)

        return call

    with (
        patch.object(module, "attend", counted(module.attend)),
        patch.object(module, "attend_backward", counted(module.attend_backward)),
    ):
        ring_attention(*inputs(), dist.group.WORLD).sum().backward()
    return found


def test_all_ranks_compute_as_much_in_each_step():
    """The own part with a causal kernel, and half of what the mask would leave of the others."""
    assert run_on_ranks(4, blocks_job) == [[t * t, *[t * t // 2] * 3] * 2] * 4


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_blocks_are_what_a_causal_mask_shows_and_no_more(num_ranks):
    seen = Counter()
    places = [part_positions(24, rank, num_ranks) for rank in range(num_ranks)]
    for rank, source in ((a, b) for a in range(num_ranks) for b in range(num_ranks)):
        block = Block.of(rank, source, len(places[0]), causal=True)
        queries, keys = places[rank][block.queries].tolist(), places[source][block.keys].tolist()
        seen.update((q, k) for i, q in enumerate(queries) for j, k in enumerate(keys) if not block.is_causal or j <= i)
    assert seen == Counter((q, k) for q in range(24) for k in range(q + 1))


def odd_job():
    with pytest.raises(ConfigurationError, match="10 positions cannot be cut over cp=2"):
        ring_attention(*[x[:, :5] for x in inputs()], dist.group.WORLD)


def test_a_part_of_an_odd_length_is_none():
    run_on_ranks(2, odd_job)
