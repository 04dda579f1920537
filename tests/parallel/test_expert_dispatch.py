"""Tokens to experts on other ranks and back: values, gradients, bytes, host synchronisations; whatever the routing is."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.common import make_mesh
from trainer_kit.models import DecoderConfig, MoEConfig
from trainer_kit.models.experts import MixtureOfExperts, Routing, dispatch_here, within_capacity
from trainer_kit.parallel import parallelize_expert
from trainer_kit.testing import run_on_ranks
from trainer_kit.torch_private import local_tensor

NUM_EXPERTS, WIDTH = 6, 8
NAMES = ("gate_proj", "up_proj", "down_proj")


def layer(dtype=torch.float64):
    torch.manual_seed(0)
    moe = MoEConfig(num_experts=NUM_EXPERTS, num_experts_per_token=2, intermediate_size=4)
    config = DecoderConfig(vocab_size=5, num_layers=1, num_heads=2, hidden_size=WIDTH, init_std=0.5, moe=moe)
    return MixtureOfExperts(config, 0.5).to(dtype)


def routing(rank, case, num_tokens):
    """Weights and choices of the tokens of a rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    chosen = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(2).indices
    if case == "one expert":  # twice, so that a token meets it two times
        chosen = torch.full_like(chosen, 3)
    elif case == "some experts":
        chosen = chosen % 2 * 4
    weights = torch.rand(num_tokens, 2, generator=generator, dtype=torch.float64).requires_grad_()
    kept = within_capacity(chosen, NUM_EXPERTS, 0.6) if case == "capacity" else None
    return Routing(chosen, weights, torch.zeros(num_tokens, NUM_EXPERTS), kept)


def tokens_of(rank, num_tokens):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(num_tokens, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


def compared(case, sizes):
    """The largest difference from all experts on one rank, of outputs and of the gradients of tokens, weights and experts."""
    rank, whole = dist.get_rank(), layer()
    cut = copy.deepcopy(whole)
    parallelize_expert(cut, make_mesh(ep_replicate=1, ep_shard=1, ep=len(sizes)))
    found, expected = [], []
    for other, size in enumerate(sizes):
        x, how = tokens_of(other, size), routing(other, case, size)
        y = dispatch_here(x, how, whole.experts)
        y.square().sum().backward()
        if other == rank:
            expected += [y, x.grad, how.weights_NK.grad]
    x, how = tokens_of(rank, sizes[rank]), routing(rank, case, sizes[rank])
    y = cut.dispatch(x, how, cut.experts)
    y.square().sum().backward()
    found += [y, x.grad, how.weights_NK.grad]
    num_local = NUM_EXPERTS // len(sizes)
    for name in NAMES:
        found.append(local_tensor(getattr(cut.experts, name).grad))
        expected.append(getattr(whole.experts, name).grad[rank * num_local : (rank + 1) * num_local])
    return max((a - b).abs().max().item() if a.numel() else float(a.shape != b.shape) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", ["all", "one expert", "some experts", "capacity"])
@pytest.mark.parametrize("sizes", [[5, 3], [4, 0], [7, 1, 0], [0, 0]], ids=str)
def test_a_dispatch_gives_what_one_rank_computes(case, sizes):
    """B119: ranks without tokens, experts without any, all tokens to one expert, dropped tokens; a gradient is summed and not divided."""
    assert max(run_on_ranks(len(sizes), compared, case, sizes)) < 1e-12


def test_the_first_tokens_are_within_the_capacity():
    """Six copies over three experts: an even share is two, and half of it is one."""
    chosen = torch.tensor([[0, 1], [0, 1], [0, 2]])
    assert within_capacity(chosen, 3, 0.5).tolist() == [[True, True], [False, False], [False, True]]
    assert within_capacity(chosen, 3, 1.0).tolist() == [[True, True], [True, True], [False, True]]
    assert within_capacity(chosen[:0], 3, 1.0).shape == (0, 2)


class Traffic(TorchDispatchMode):
    """The bytes that this rank gives to each collective, by its name."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in str(func):
            self.sent.append((func.overloadpacket.__name__, args[1].numel() * args[1].element_size()))
        return func(*args, **(kwargs or {}))


def traffic(case):
    """The collectives of a forward and a backward, and how often values were read on the host."""
    model, rank = layer(torch.float32), dist.get_rank()
    parallelize_expert(model, make_mesh(ep_replicate=1, ep_shard=1, ep=2))
    how = routing(rank, case, 5)
    x = tokens_of(rank, 5).detach().float().requires_grad_()
    reads, patched = [], {name: getattr(torch.Tensor, name) for name in ("tolist", "item", "__bool__", "__int__", "nonzero")}
    try:
        for name, original in patched.items():
            setattr(torch.Tensor, name, lambda *args, original=original: (reads.append(original), original(*args))[1])
        with Traffic() as forward:
            y = model.dispatch(x, how, model.experts)
    finally:
        for name, original in patched.items():
            setattr(torch.Tensor, name, original)
    with Traffic() as backward:
        y.sum().backward()
    kept = torch.ones_like(how.chosen_NK) if how.kept_NK is None else how.kept_NK
    to_each = [int((kept * (how.chosen_NK // 3 == other)).sum()) for other in range(2)]
    return forward.sent, backward.sent, len(reads), to_each


@pytest.mark.parametrize("case", ["all", "one expert", "capacity"])
def test_what_is_sent_is_what_is_routed(case):
    """No all-gather with a mask: counts of experts, then copies of tokens and nothing else; and one look at the host per layer."""
    by_rank = run_on_ranks(2, traffic, case)
    counts, row = NUM_EXPERTS * 8, WIDTH * 4
    for rank, (forward, backward, num_reads, to_each) in enumerate(by_rank):
        arriving = sum(other[3][rank] for other in by_rank)
        assert [size for _, size in forward] == [counts, sum(to_each) * row, arriving * row]
        assert [size for _, size in backward] == [sum(to_each) * row, arriving * row]
        assert {name for name, _ in forward + backward} == {"alltoall_base_"}
        assert num_reads == 1
