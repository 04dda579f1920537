"""Gradients between backward and update: norm, clipping, dtype, unused parameters; and the guard against inf and nan."""

import pytest
import torch
from torch import nn

from tests.gradients.on_ranks import NaNBackward
from tests.support import Gradients as Seen
from tests.support import MeanTask, Scalar, quiet_trainer, sgd
from trainer_kit import Callback, ForwardInputs, Task
from trainer_kit.callbacks import GradientClipping
from trainer_kit.exceptions import ModelError, NonFiniteError
from trainer_kit.gradients import Gradients, NonFiniteGuard
from trainer_kit.optim import AdamW, Piecewise, StochasticAdamW
from trainer_kit.parameters import ParameterTable


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def with_gradients(*tensors: torch.Tensor) -> tuple[nn.ParameterList, Gradients]:
    model = nn.ParameterList([nn.Parameter(torch.zeros_like(x)) for x in tensors])
    gradients = Gradients(ParameterTable([model]).rows)
    for parameter, gradient in zip(model, tensors, strict=True):
        parameter.grad = gradient.clone()
    return model, gradients


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_the_norm_is_that_of_torch_for_mixed_dtypes(p):
    """Contract 8 on one process: the p-norm over all gradients, in fp32 at least."""
    torch.manual_seed(0)
    tensors = [torch.randn(3, 4), torch.randn(5), torch.randn(2).double(), torch.randn(7).bfloat16(), torch.randn(())]
    _, gradients = with_gradients(*tensors)
    gradients.finish(1)
    expected = torch.linalg.vector_norm(torch.cat([x.double().flatten() for x in tensors]), p)
    torch.testing.assert_close(gradients.norm(p).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("weight", [3, 4, torch.tensor(3)])
def test_gradients_larger_than_the_cache_are_divided_and_checked_whole(weight):
    """Contracts 3 and 8: 1 MB of gradients at a time, of which one parameter has more; the last of them shows a nan."""
    torch.manual_seed(0)
    tensors = [torch.randn(size) for size in (200_000, 300_000, 60_000, 7)] + [torch.randn(5).double(), torch.randn(100_000)]
    model, gradients = with_gradients(*tensors)
    flag = torch.zeros(())
    gradients.finish(weight, flag)
    assert all(torch.equal(parameter.grad, x / weight) for parameter, x in zip(model, tensors, strict=True)) and flag == 0
    norms = dict(zip(gradients.names_in_groups(), gradients.norm_per_parameter().tolist(), strict=True))
    assert norms == pytest.approx({str(index): (x / weight).norm().item() for index, x in enumerate(tensors)}, rel=1e-5)
    model[5].grad[-1] = float("nan")
    gradients.finish(weight, flag)
    assert flag == 1


def test_the_norm_is_computed_once_and_follows_a_scaling(monkeypatch):
    calls = []
    real = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda *a, **k: calls.append(1) or real(*a, **k))
    _, gradients = with_gradients(t(3, 4))
    gradients.finish(1)
    assert gradients.norm() == 5 and gradients.norm() == 5
    gradients.scale(0.5)
    assert gradients.norm() == 2.5 and len(calls) == 1


@pytest.mark.parametrize("weight", [49, 64, 3, 1, 0.5, torch.tensor(49)])
@pytest.mark.parametrize("flagged", [False, True])
def test_dividing_is_exact(weight, flagged):
    """49 times a rounded 1/49 is not 1; the division is a division, with the finite check in the same pass or without."""
    values = torch.randn(1000) * torch.logspace(-40, 30, 1000)
    model, gradients = with_gradients(values, t(49, 98))
    gradients.finish(weight, torch.zeros(()) if flagged else None)
    assert torch.equal(model[0].grad, values / weight) and torch.equal(model[1].grad, t(49, 98) / weight)


def test_a_parameter_that_nothing_used_has_a_zero_gradient():
    """Contract 4: as on a mesh, where its bucket is reduced all the same, so weight decay acts on it."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Parameter(t(1, 1)), nn.Parameter(t(2, 2))

        def forward(self, c):
            return (self.used * c).mean()

    trainer = quiet_trainer(Half(), MeanTask(), [t(1, 1)], optimizer=sgd(lr=0.5, weight_decay=0.1))
    trainer.fit()
    torch.testing.assert_close(trainer.model.unused.detach(), t(1.9, 1.9))


def test_clipping_acts_once_per_step_on_the_sum():
    """B53: gradients +10 and -9 add to 1, which a limit of 1 leaves alone."""
    seen = []

    class Look(Callback):
        def on_before_optimizer_step(self, event):
            seen.append(event.trainer.model.w.grad.item())

    trainer = quiet_trainer(
        Scalar(), MeanTask("none"), [t(20), t(-18)], callbacks=[GradientClipping(1.0), Look()], accumulate=2, log_every=1
    )
    trainer.fit()
    assert seen == pytest.approx([1.0], abs=2e-6)
    assert trainer.history.last("optim/grad_norm") == (1, 1.0)


def test_bf16_parameters_accumulate_their_gradients_in_fp32():
    """Contract 5 and B109: 256 and 16 times 0.5 is 264; a bf16 sum stays at 256."""
    seen = Seen()

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, c):
            return (self.w * c.to(self.w.dtype)).sum()

    data = [t(256)] + [t(0.5)] * 16
    task = MeanTask("none")
    settings = {"callbacks": [seen], "accumulate": 17, "precision": "bf16", "optimizer": StochasticAdamW(lr=1e-3)}
    trainer = quiet_trainer(One(), task, data, **settings)
    trainer.fit()
    assert trainer.model.w.dtype == torch.bfloat16
    assert seen.seen[0]["w"].dtype == torch.float32
    torch.testing.assert_close(seen.seen[0]["w"] * 17, torch.tensor(264.0))


def test_grad_dtype_works_with_an_optimizer_that_needs_the_parameters_dtype():
    """`grad_dtype="fp32"` with torch's SGD on bf16 parameters: summed in fp32, given to the update in bf16."""
    model = Scalar(1.0).bfloat16()
    trainer = quiet_trainer(
        model,
        MeanTask("none"),
        [t(256).bfloat16()] + [t(0.5).bfloat16()] * 16,
        accumulate=17,
        precision="bf16",
        grad_dtype="fp32",
        total_steps=1,
    )
    trainer.fit()
    assert trainer.model.w.item() == torch.tensor(1 - 264 / 17).bfloat16().item()


def test_complex_parameters_are_refused():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self, c):
            return (self.w * c).abs().sum()

    with pytest.raises(NotImplementedError, match="'w' is complex"):
        quiet_trainer(Complex(), MeanTask(), [t(1)]).fit()


def test_sparse_gradients_are_refused():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 2, sparse=True)

        def forward(self, c):
            return self.table(c.long()).mean()

    with pytest.raises(ModelError, match="sparse=False"):
        quiet_trainer(Sparse(), MeanTask(), [t(1)]).fit()


class Changes(Callback):
    """Does something to the gradients when they are ready."""

    def __init__(self, act):
        self.act = act

    def on_gradients_ready(self, event):
        self.act(event.trainer.model.w)


@pytest.mark.parametrize("log_every", [1, 100])
def test_clipping_sees_what_another_callback_did_to_the_gradients(log_every):
    """The update does not depend on what is logged: a gradient of 1, times 1000, clipped to 1."""

    def enlarge(w):
        w.grad.mul_(1000)

    trainer = quiet_trainer(Scalar(5.0), MeanTask(), [t(1), t(1)], callbacks=[Changes(enlarge), GradientClipping(1.0)], log_every=log_every)
    trainer.fit()
    assert trainer.model.w.item() == pytest.approx(3.0, abs=1e-5)


@pytest.mark.parametrize("clip", [[], [GradientClipping(1.0)]])
@pytest.mark.parametrize("log_every", [1, 100])
def test_a_gradient_that_a_callback_breaks_or_mends_is_judged_the_same_whatever_is_logged(log_every, clip):
    """A callback that writes nan is caught; one that replaces the gradient by a new tensor is seen too."""

    def spoil(w):
        w.grad = w.grad * float("nan")

    trainer = quiet_trainer(Scalar(5.0), MeanTask(), [t(1), t(1)], callbacks=[Changes(spoil), *clip], log_every=log_every)
    with pytest.raises(NonFiniteError, match="step 0: .*'w'"):
        trainer.fit()
    assert trainer.model.w.item() == 5.0


def test_an_inf_that_is_clipped_by_value_is_not_accepted():
    trainer = quiet_trainer(Scalar(5.0), MeanTask(), [t(float("inf"))], callbacks=[GradientClipping(max_value=1.0)])
    with pytest.raises(NonFiniteError, match="clipped away"):
        trainer.fit()


@pytest.mark.parametrize("frozen_first", [True, False])
def test_what_is_trainable_may_not_change_after_the_build(frozen_first):
    """Silently untrained parameters are an error that names them."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(t(1)), nn.Parameter(t(1), requires_grad=not frozen_first)

        def forward(self, c):
            return ((self.a + self.b) * c).sum()

    class Flips(Callback):
        def on_step_end(self, event):
            event.trainer.model.b.requires_grad_(frozen_first)

    trainer = quiet_trainer(Two(), MeanTask(), [t(1)] * 4, callbacks=[Flips()], log_every=2)
    with pytest.raises(ModelError, match="requires_grad of 'b'"):
        trainer.fit()


class FiniteLossNaNGradient(Task):
    """The gradient of steps in `bad` is nan although the loss is finite (B56)."""

    def __init__(self, bad):
        self.bad, self.step = set(bad), -1

    def build_forward_inputs(self, batch):
        self.step += 1
        return ForwardInputs(inputs=batch)

    def compute_loss(self, pipeline_results, state):
        return NaNBackward.apply(pipeline_results) if self.step in self.bad else pipeline_results


def test_error_names_step_and_parameter_and_changes_nothing():
    """B55 and B56: the update is not made."""
    trainer = quiet_trainer(Scalar(1.0), FiniteLossNaNGradient([1]), [t(1)] * 3, optimizer=AdamW(lr=0.1))
    with pytest.raises(NonFiniteError, match="step 1: .* 'w'"):
        trainer.fit()
    assert trainer.step == 1 and torch.isfinite(trainer.model.w)


def test_skip_leaves_parameters_moments_and_schedule_as_they_were():
    """B55 and B124: nan in the first step: parameters bitwise the same, the lr of the second step is the first value."""
    rates, weights = [], []

    class Look(Callback):
        def on_before_optimizer_step(self, event):
            rates.append(event.trainer.optimizer.param_groups[0]["lr"])

        def on_step_end(self, event):
            weights.append((event.skipped, event.trainer.model.w.item()))

    trainer = quiet_trainer(
        Scalar(1.0),
        FiniteLossNaNGradient([0]),
        [t(1)] * 3,
        callbacks=[Look()],
        nonfinite="skip",
        optimizer=AdamW(lr=1.0),
        lr_scheduler=Piecewise().linear(1.0, steps=3),
    )
    trainer.fit()
    assert rates == [1 / 3, 2 / 3]
    assert weights[0] == (True, 1.0) and not weights[1][0]
    assert trainer.step == 3 and trainer.lr_scheduler.last_epoch == 2


def test_ignore_makes_the_update():
    trainer = quiet_trainer(Scalar(1.0), FiniteLossNaNGradient([0]), [t(1)], nonfinite="ignore")
    trainer.fit()
    assert torch.isnan(trainer.model.w)


@pytest.mark.parametrize("clip", [False, True])
def test_large_finite_gradients_are_never_a_silent_zero_update(clip):
    """B57: the squares of two gradients of 1e20 overflow in fp32. Their norm is sqrt(2) * 1e20 all the same, and clipping is exact."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(t(0)), nn.Parameter(t(0))

        def forward(self, c):
            return ((self.a + self.b) * c).sum()

    trainer = quiet_trainer(Two(), MeanTask(), [t(1e20)], callbacks=[GradientClipping(1.0)] if clip else [])
    trainer.fit()
    assert trainer.history.last("optim/grad_norm")[1] == pytest.approx(2**0.5 * 1e20, rel=1e-6)
    assert trainer.model.a.item() == pytest.approx(-(0.5**0.5) if clip else -1e20, rel=1e-6)


class TestDeferred:
    """The way of accelerators, run on the CPU: the flag is read some steps later and nothing is waited for."""

    def step(self, model, gradients, guard, optimizer, index, value):
        for parameter in model:
            parameter.grad = torch.full_like(parameter, value)
        gradients.finish(1, guard.flag())
        permitted = guard.permits(index, 1)
        if permitted:
            optimizer.step()
        gradients.zero()
        return permitted

    def test_a_fused_optimizer_withholds_the_update_and_the_error_comes_later(self):
        model, gradients = with_gradients(t(1, 2), t(3))
        optimizer = torch.optim.AdamW(model, lr=0.1, fused=True)
        guard = NonFiniteGuard(gradients, optimizer, "error", device=torch.device("cpu"), deferred=True, delay=2)
        self.step(model, gradients, guard, optimizer, 0, 1.0)
        good = [p.detach().clone() for p in model]
        self.step(model, gradients, guard, optimizer, 1, float("nan"))
        self.step(model, gradients, guard, optimizer, 2, 1.0)
        assert all(torch.equal(p, q) for p, q in zip(model, good, strict=True))
        with pytest.raises(NonFiniteError, match="step 1: .*'0' .2 of 2 have one.; no parameter was changed"):
            self.step(model, gradients, guard, optimizer, 3, 1.0)

    def test_everything_is_read_before_a_save(self):
        model, gradients = with_gradients(t(1))
        optimizer = torch.optim.SGD(model, lr=0.1)
        guard = NonFiniteGuard(gradients, optimizer, "error", device=torch.device("cpu"), deferred=True, delay=10)
        self.step(model, gradients, guard, optimizer, 0, float("inf"))
        with pytest.raises(NonFiniteError, match="step 0.*has updated the parameters"):
            guard.resolve()

    def test_a_pack_of_weight_zero_is_withheld_on_the_device(self):
        model, gradients = with_gradients(t(1))
        optimizer = torch.optim.AdamW(model, lr=0.1, fused=True, weight_decay=0.5)
        guard = NonFiniteGuard(gradients, optimizer, "error", device=torch.device("cpu"), deferred=True, delay=1)
        model[0].data.fill_(2.0)
        model[0].grad = t(0)
        gradients.finish(torch.tensor(0), guard.flag())
        assert guard.permits(0, torch.tensor(0))
        optimizer.step()
        assert model[0].item() == 2.0
