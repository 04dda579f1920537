"""GradientClipping against torch.nn.utils.clip_grad_norm_ and clip_grad_value_."""

import math

import pytest
import torch

from trainer_kit import events
from trainer_kit.callbacks import GradientClipping


def clip(fake_trainer, callback, gradients, *, step=0, **settings):
    """The gradients after the callback, with torch's norm as the shared one; also what was logged and how often it was scaled."""
    trainer = fake_trainer(model=torch.nn.ParameterList([torch.zeros_like(g) for g in gradients]), log_every=1, **settings)
    parameters = list(trainer.stages[0].parameters())
    factors = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()

    def scale(factor):
        factors.append(factor)
        for parameter in parameters:
            parameter.grad.mul_(factor)

    def grad_norm(p=2.0):
        return torch.nn.utils.get_total_norm([q.grad for q in parameters], p)

    callback.on_gradients_ready(events.GradientsReady(trainer=trainer, step=step, grad_norm=grad_norm, scale=scale))
    return [p.grad for p in parameters], dict(trainer.logged), factors


def torch_clipped(gradients, max_norm, norm_type=2.0):
    parameters = [torch.zeros_like(g).requires_grad_() for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    return [p.grad for p in parameters], norm


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_by_norm_is_torchs(fake_trainer, norm_type, max_norm):
    """Contract 8: p = 1, 2, 3, inf; the logged norm is the one from before."""
    torch.manual_seed(0)
    gradients = [torch.randn(3, 4), torch.randn(5)]
    expected, norm = torch_clipped(gradients, max_norm, norm_type)
    clipped, logged, _ = clip(fake_trainer, GradientClipping(max_norm, norm_type=norm_type), gradients)
    for found, wanted in zip(clipped, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert float(logged["optim/grad_norm"]) == pytest.approx(float(norm))


def test_an_infinite_limit_measures_and_changes_nothing(fake_trainer):
    """Contract 8."""
    gradients = [torch.tensor([3.0, 4.0])]
    clipped, logged, factors = clip(fake_trainer, GradientClipping(math.inf), gradients)
    assert torch.equal(clipped[0], gradients[0]) and factors == []
    assert float(logged["optim/grad_norm"]) == 5.0


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e20])
def test_a_norm_that_is_not_finite_zeroes_nothing(fake_trainer, bad):
    """B55 and B57: 1 / inf would make every gradient 0; the gradients stay, for the policy to see."""
    gradients = [torch.tensor([bad, 1.0]), torch.tensor([2.0])]
    clipped, _, _ = clip(fake_trainer, GradientClipping(1.0), gradients)
    assert clipped[1].item() == 2.0
    assert torch.equal(clipped[0], gradients[0]) or math.isnan(bad)


def test_clipping_once_per_step_of_the_sum(fake_trainer):
    """B53: gradients +10 and -9 add up to 1, which a limit of 1 leaves alone (up to torch's epsilon)."""
    clipped, _, _ = clip(fake_trainer, GradientClipping(1.0), [torch.tensor([10.0]) + torch.tensor([-9.0])])
    assert clipped[0].item() == pytest.approx(1.0, rel=2e-6)


def test_clipping_by_value_is_torchs(fake_trainer):
    gradients = [torch.tensor([-3.0, 0.2, 7.0]), torch.tensor([0.5])]
    clipped, _, _ = clip(fake_trainer, GradientClipping(max_value=0.5), gradients)
    assert torch.equal(clipped[0], torch.tensor([-0.5, 0.2, 0.5])) and torch.equal(clipped[1], torch.tensor([0.5]))


def test_the_norm_is_logged_only_where_a_record_is_made(fake_trainer):
    """B66: no work for values that nobody sees."""
    callback = GradientClipping(math.inf)
    trainer = fake_trainer(log_every=10, total_steps=15)
    asked = []
    for step in range(15):
        callback.on_gradients_ready(
            events.GradientsReady(trainer=trainer, step=step, grad_norm=lambda p, s=step: asked.append(s) or torch.tensor(1.0), scale=None)
        )
    assert asked == [9, 14]
