"""What Ulysses sends; that it is exact is in test_context_attention.py."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.parallel.ulysses import repeated_kv_heads, ulysses_attention
from trainer_kit.testing import run_on_ranks

B, t, E = 2, 4, 8


def inputs(num_heads, num_kv_heads):
    return [torch.randn(B, t, heads, E).requires_grad_() for heads in (num_heads, num_kv_heads, num_kv_heads)]


def sent_job(num_heads, num_kv_heads):
    """Elements of the exchanges, forward and backward."""
    start, sizes = dist.all_to_all_single, []

    def counted(received, sent, **options):
        sizes.append(sent.numel())
        return start(received, sent, **options)

    with patch.object(dist, "all_to_all_single", counted):
        ulysses_attention(*inputs(num_heads, num_kv_heads), dist.group.WORLD).sum().backward()
    return sorted(sizes[:4]), sorted(sizes[4:])


@pytest.mark.parametrize(("num_kv_heads", "sent_heads"), [(4, 4), (2, 4), (6, 12)])
def test_heads_of_keys_and_values_are_repeated_until_they_can_be_shared_out(num_kv_heads, sent_heads):
    once = sorted(B * t * E * heads for heads in (12, 12, sent_heads, sent_heads))
    assert repeated_kv_heads(num_kv_heads, 4) == sent_heads
    assert run_on_ranks(4, sent_job, 12, num_kv_heads) == [(once, once)] * 4


def refused_job():
    with pytest.raises(ConfigurationError, match="3 attention heads cannot be shared out over cp=2 ranks; expected a multiple of 2"):
        ulysses_attention(*inputs(3, 3), dist.group.WORLD)
    with pytest.raises(ConfigurationError, match="6 positions cannot be cut over cp=2"):
        ulysses_attention(*[x[:, :3] for x in inputs(4, 4)], dist.group.WORLD)


def test_what_cannot_be_divided_is_refused():
    run_on_ranks(2, refused_job)
