"""The calls into torch that are not public, each against its public counterpart, so that a new torch cannot change them unseen."""

import pytest
import torch
from torch import nn

from trainer_kit.torch_private import (
    fingerprint,
    multiply_and_flag_non_finite,
    read_cpu_scalar,
    run_backward,
    step_optimizer,
    takes_found_inf,
)

KINDS = [
    lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    lambda p: torch.optim.Adam(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
]


def model() -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    for parameter in layer.parameters():
        parameter.grad = torch.randn_like(parameter)
    return layer


@pytest.mark.parametrize("make", KINDS)
def test_a_step_without_the_profiler_range_is_the_step(make):
    one, other = model(), model()
    first, second = make(one.parameters()), make(other.parameters())
    for _ in range(3):
        step_optimizer(first)
        second.step()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_hooks_schedulers_and_profilers_see_the_step():
    calls = []
    layer = model()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    step_optimizer(optimizer)
    handle.remove()
    step_optimizer(optimizer)
    assert calls == ["hook"]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step_optimizer(optimizer)
    scheduler.step()  # warns if it did not see the step
    with torch.profiler.profile() as profiler:
        step_optimizer(optimizer)
    assert any("Optimizer.step" in event.key for event in profiler.key_averages())


def test_backward_from_given_starts():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    run_backward(((x * x).sum(), x.sum()), (torch.tensor(3.0), torch.tensor(5.0)))
    assert torch.equal(x.grad, torch.tensor([11.0, 17.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_scaling_and_flag(dtype, bad):
    values = torch.tensor([1.0, -2.0, 4.0 if bad is None else bad], dtype=dtype)
    tensors, flag = [values.clone(), torch.ones(2, dtype=dtype)], torch.zeros(())
    multiply_and_flag_non_finite(tensors, torch.tensor(0.5), flag)
    assert flag.item() == (bad is not None)
    torch.testing.assert_close(tensors[0], values * 0.5, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_a_scalar_is_read_from_memory(dtype):
    assert read_cpu_scalar(torch.tensor(1, dtype=dtype)) == 1.0


def test_a_fingerprint_changes_with_the_content_and_the_object():
    tensor = torch.ones(2)
    before = fingerprint([tensor])
    assert fingerprint([tensor]) == before
    tensor.mul_(2)
    assert fingerprint([tensor]) != before
    assert fingerprint([tensor]) != fingerprint([tensor.clone()])


def test_which_optimizers_can_be_told_to_leave_a_step_out():
    parameters = list(nn.Linear(1, 1).parameters())
    assert takes_found_inf(torch.optim.AdamW(parameters, fused=True))
    assert not takes_found_inf(torch.optim.AdamW(parameters, foreach=True))
