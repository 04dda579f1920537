"""Both ways of attention over a cut sequence, against torch's attention over the whole one in one process."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.parallel.common import make_mesh
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.parallel.context_attention import choose_attention, context_attention
from trainer_kit.parallel.sequence_parts import gather_parts, take_part
from trainer_kit.testing import run_on_ranks

B, T, E = 2, 24, 6


@dataclass(frozen=True)
class Case:
    num_heads: int = 4
    num_kv_heads: int = 4
    causal: bool = True
    documents: bool = False
    scale: float | None = None
    size: float = 1.0  # of the queries
    value_size: int = E


CASES = {
    "plain": Case(),
    "grouped": Case(8, 2),
    "other groups": Case(12, 3),
    "one head of keys": Case(4, 1),
    "documents": Case(8, 2, documents=True),
    "not causal": Case(4, 2, causal=False),
    "documents, not causal": Case(causal=False, documents=True),
    "a scale": Case(scale=0.3),
    "large scores": Case(size=100.0),
    "values of another size": Case(4, 2, value_size=4),
    "values of another size, documents": Case(4, 2, value_size=4, documents=True),
}


def document_ids():
    """Documents that end within chunks and at their ends, one of a single token, and padding."""
    rows = [[(7, 5), (8, 1), (9, 6), (1, 12)], [(3, 3), (4, 17), (-1, 4)]]
    return torch.tensor([[number for number, length in row for _ in range(length)] for row in rows])


def whole_inputs(case, dtype):
    generator = torch.Generator().manual_seed(0)
    sizes = [(case.num_heads, E), (case.num_kv_heads, E), (case.num_kv_heads, case.value_size), (case.num_heads, case.value_size)]
    q, k, v, start = (torch.randn(B, T, *size, dtype=torch.float64, generator=generator) for size in sizes)
    return [(x * factor).to(dtype) for x, factor in ((q, case.size), (k, 1), (v, 1), (start, 1))]


def in_one_process(case, inputs):
    """Output and gradients from torch, with the whole mask written out."""
    q, k, v, start = inputs
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    places = torch.arange(T)
    visible = (places[:, None] >= places if case.causal else places[:, None] >= 0).expand(B, 1, T, T)
    if case.documents:
        ids = document_ids()
        visible = visible & (ids[:, None, :, None] == ids[:, None, None, :])
    q, k, v = (x.transpose(1, 2) for x in leaves)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=case.scale, enable_gqa=True).transpose(1, 2)
    out.backward(start)
    return [out.detach(), *[leaf.grad for leaf in leaves]]


def on_ranks(case, inputs, attention, group):
    """Output and gradients of this rank's part."""
    part = dist.get_rank(group), dist.get_world_size(group)
    *leaves, start = [take_part(x, *part).detach().requires_grad_(index < 3) for index, x in enumerate(inputs)]
    ids = take_part(document_ids(), *part) if case.documents else None
    out = context_attention(*leaves, group, attention=attention, causal=case.causal, document_ids_Bt=ids, scale=case.scale)
    out.backward(start)
    return [out.detach(), *[leaf.grad for leaf in leaves]]


def differences(found, expected, group):
    """Of the output and the gradients of q, k, v; of this rank's part, relative to the largest value where that is above 1."""
    expected = [take_part(x, dist.get_rank(group), dist.get_world_size(group)) for x in expected]
    return [((f - e).abs().max() / e.abs().max().clamp(min=1)).item() for f, e in zip(found, expected, strict=True)]


def exact_job(name, attention, dtype):
    case, group = CASES[name], dist.group.WORLD
    inputs = whole_inputs(case, dtype)
    found = on_ranks(case, inputs, attention, group)
    assert all(x.dtype == dtype and x.is_contiguous() and x._base is None for x in found[:1])
    return differences(found, in_one_process(case, inputs), group)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_output_and_gradients_are_those_of_one_process(num_ranks, attention, name):
    assert max(max(found) for found in run_on_ranks(num_ranks, exact_job, name, attention, torch.float64)) < 1e-9


@pytest.mark.parametrize("name", ["grouped", "documents", "values of another size"])
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_single_precision(attention, name):
    assert max(max(found) for found in run_on_ranks(4, exact_job, name, attention, torch.float32)) < 1e-5


def half_precision_job(name, attention):
    """The squared errors of ours and of torch's bfloat16 attention against float64, for the output and each gradient."""
    case, group = CASES[name], dist.group.WORLD
    inputs = whole_inputs(case, torch.bfloat16)
    ours, torchs = on_ranks(case, inputs, attention, group), in_one_process(case, inputs)
    assert {x.dtype for x in ours} == {torch.bfloat16}
    exact = [take_part(x, dist.get_rank(), 4) for x in in_one_process(case, [x.double() for x in inputs])]
    torchs = [take_part(x, dist.get_rank(), 4) for x in torchs]
    return [[(x - e).square().sum().item() for x, e in zip(found, exact, strict=True)] for found in (ours, torchs)]


@pytest.mark.parametrize("name", ["grouped", "documents", "values of another size"])
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_bfloat16_is_about_as_exact_as_in_one_process(attention, name):
    """Sums over blocks and ranks add roundings of their own, but none that grows with their number."""
    errors = torch.tensor(run_on_ranks(4, half_precision_job, name, attention)).sum(0).sqrt()
    assert (errors[0] < 2 * errors[1]).all(), errors


def subgroup_job(attention):
    """Groups of ranks 0, 2 and 1, 3, whose data differs."""
    group = make_mesh(cp=2, dp=2).get_group("cp")
    inputs = [x + dist.get_rank() % 2 for x in whole_inputs(CASES["grouped"], torch.float64)]
    found = on_ranks(CASES["grouped"], inputs, attention, group)
    return differences(found, in_one_process(CASES["grouped"], inputs), group)


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_a_group_of_some_of_the_ranks(attention):
    assert max(max(found) for found in run_on_ranks(4, subgroup_job, attention)) < 1e-9


def alone_job(attention):
    group = make_mesh(dp=2, cp=1).get_group("cp")
    inputs = whole_inputs(CASES["documents"], torch.float64)
    return differences(on_ranks(CASES["documents"], inputs, attention, group), in_one_process(CASES["documents"], inputs), group)


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_a_group_of_one_rank(attention):
    assert max(max(found) for found in run_on_ranks(2, alone_job, attention)) < 1e-9


def without_gradients_job(attention):
    """The gathered output of a pass without gradients, for inputs that want some."""
    *inputs, _ = [take_part(x, dist.get_rank(), 2).requires_grad_() for x in whole_inputs(CASES["grouped"], torch.float64)]
    with torch.no_grad():
        out = context_attention(*inputs, dist.group.WORLD, attention=attention)
    return out.requires_grad, gather_parts(out, dist.group.WORLD)


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_without_gradients(attention):
    expected = in_one_process(CASES["grouped"], whole_inputs(CASES["grouped"], torch.float64))[0]
    for wants_gradient, found in run_on_ranks(2, without_gradients_job, attention):
        assert not wants_gradient
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def autocast_job(attention):
    """Normalised queries stay float32 under autocast while values come out of a projection in bfloat16."""
    q, k, v, _ = whole_inputs(CASES["grouped"], torch.float32)
    parts = [take_part(x, dist.get_rank(), 2) for x in (q, k, v.bfloat16())]
    with torch.autocast("cpu", torch.bfloat16):
        return context_attention(*parts, dist.group.WORLD, attention=attention).dtype


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_autocast_casts_as_torch_does(attention):
    assert run_on_ranks(2, autocast_job, attention) == [torch.bfloat16] * 2


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_ranks", "expected"),
    [
        (8, 8, 2, "ulysses"),  # 4 * 16 / 2 = 32 elements, 48 round a ring
        (32, 8, 2, "ring"),  # 80, 48
        (32, 8, 4, "ulysses"),  # 40, 48
        (32, 8, 16, "ulysses"),  # 12 with heads repeated, 48
        (8, 1, 4, "ring"),  # 12, 6
        (6, 6, 4, "ring"),  # heads that cannot be shared out
        (1, 1, 8, "ring"),
    ],
)
def test_the_way_is_chosen_by_what_is_sent(num_heads, num_kv_heads, num_ranks, expected):
    assert choose_attention(num_heads, num_kv_heads, num_ranks) == expected


def test_a_way_can_be_asked_for():
    assert choose_attention(8, 8, 2, "ring") == "ring"
    assert choose_attention(32, 8, 2, "ulysses") == "ulysses"
    with pytest.raises(ConfigurationError, match='6 attention heads .* cp=4 ranks; expected a multiple of 4. Take attention="ring"'):
        choose_attention(6, 6, 4, "ulysses")
    with pytest.raises(ConfigurationError, match="attention='ulyses' is no way .*did you mean 'ulysses'"):
        choose_attention(8, 8, 2, "ulyses")
