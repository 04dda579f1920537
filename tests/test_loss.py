"""The weighting of losses and gradients against closed forms."""

import math
import warnings

import pytest
import torch
from torch import nn

from tests.support import Gradients, MeanTask, Scalar, quiet_trainer, sgd
from trainer_kit import ForwardInputs, Loss, Task
from trainer_kit.exceptions import ConfigurationError, ModelError


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def run(packs: list[list[torch.Tensor]], weigh: str = "declared", **settings):
    """Train w (from 0, lr 1) on these packs; returns gradients by step, the trainer."""
    seen = Gradients()
    flat = [microbatch for pack in packs for microbatch in pack]
    sizes = {len(pack) for pack in packs}
    (accumulate,) = sizes if len(sizes) == 1 else (max(sizes),)
    trainer = quiet_trainer(
        Scalar(0.0), MeanTask(weigh), flat, callbacks=[seen], accumulate=accumulate, log_every=1, log_delay=0, **settings
    )
    trainer.fit()
    return [float(g["w"]) for g in seen.seen], trainer


@pytest.mark.parametrize("weigh", ["declared", "returned", "tensor"])
@pytest.mark.parametrize("cut", [[t(4), t(0, 0, 0)], [t(4, 0), t(0, 0)], [t(4, 0, 0, 0)]])
def test_the_gradient_is_the_mean_over_all_samples_however_the_batch_is_cut(weigh, cut):
    """Contracts 1 and 2, B01: sum of losses over the sum of weights: 4 / 4 = 1 for every cut."""
    grads, _ = run([cut], weigh)
    assert grads == [1.0]


def test_a_short_last_pack_counts_with_what_it_has():
    """B04 and B05: three microbatches in packs of two, loss = w, lr 1: w is -1, then -2; over two epochs the weights are 2, 1, 2, 1."""
    values = []

    class Watch(Gradients):
        def on_step_end(self, event):
            values.append(event.trainer.model.w.item())

    trainer = quiet_trainer(Scalar(0.0), MeanTask("none"), [t(1), t(1), t(1)], callbacks=[Watch()], accumulate=2, epochs=2)
    trainer.fit()
    assert values == [-1.0, -2.0, -3.0, -4.0]
    assert trainer.model.w.grad is None


@pytest.mark.parametrize("weigh", ["declared", "returned", "tensor"])
def test_an_empty_microbatch_adds_nothing_even_if_its_loss_is_nan(weigh):
    """Contract 2 and B07: a mean over no samples is nan and weighs 0."""
    grads, trainer = run([[t(), t(2, 2)]], weigh)
    assert grads == [2.0]
    assert trainer.history.last("train/loss") == (1, 0.0)


@pytest.mark.parametrize("weigh", ["declared", "returned"])
def test_a_pack_of_weight_zero_updates_nothing_and_is_reported(weigh, caplog):
    """B07: parameters bitwise unchanged, momentum too; the step is counted and reported."""
    trainer = quiet_trainer(Scalar(1.0), MeanTask(weigh), [t(), t()], accumulate=2, optimizer=sgd(momentum=0.9, weight_decay=0.1))
    trainer.fit()
    assert trainer.model.w.item() == 1.0 and trainer.step == 1
    assert "weight of its pack is 0" in caplog.text


def test_the_logged_loss_is_the_weighted_mean():
    """B63: losses 1 and 3 with weights 1 and 3 give 2.5, with equal weights 2."""

    class Fixed(Task):
        def __init__(self, weights):
            self.weights = iter(weights)

        def build_forward_inputs(self, batch):
            return ForwardInputs(inputs=batch, weight=next(self.weights))

        def compute_loss(self, pipeline_results, state):
            return pipeline_results

    for weights, expected in (((1, 3), 2.5), ((2, 2), 2.0)):
        trainer = quiet_trainer(Scalar(1.0), Fixed(weights), [t(1), t(3)], accumulate=2, log_every=1)
        trainer.fit()
        assert trainer.history.last("train/loss") == (1, expected)


def test_a_nan_loss_is_logged_as_it_was_and_alone():
    """B64: the value of step 2 is nan, those of the others are not touched by it."""
    trainer = quiet_trainer(Scalar(1.0), MeanTask(), [t(1), t(float("nan")), t(1)], log_every=1, nonfinite="skip", optimizer=sgd(0.5))
    trainer.fit()
    values = dict(trainer.history.values("train/loss"))
    assert values[1] == 1.0 and math.isnan(values[2]) and values[3] == 0.5


class TwoTerms(Task):
    """A token-weighted main term w * mean(c), and an auxiliary term 10 * w of weight 1 per microbatch."""

    def build_forward_inputs(self, batch):
        return ForwardInputs(inputs=batch, state=batch, weight={"ce": len(batch), "aux": 1})

    def compute_loss(self, pipeline_results, state):
        return {"ce": pipeline_results, "aux": 10 * pipeline_results / state.mean()}


@pytest.mark.parametrize("cut", [[t(1, 2, 3, 6)], [t(1), t(2, 3, 6)], [t(1), t(2), t(3), t(6)]])
def test_a_second_term_keeps_its_strength_however_the_batch_is_cut(cut):
    """B10: gradient = mean over tokens of c (3) + mean over microbatches of 10; losses by term are logged, and their sum."""
    seen = Gradients()
    trainer = quiet_trainer(Scalar(1.0), TwoTerms(), cut, callbacks=[seen], accumulate=len(cut), log_every=1)
    trainer.fit()
    torch.testing.assert_close(seen.seen[0]["w"], torch.tensor(13.0))
    assert {n: round(trainer.history.last(f"train/{n}")[1], 5) for n in ("loss", "ce", "aux")} == {"loss": 13.0, "ce": 3.0, "aux": 10.0}


def test_terms_without_weights_of_their_own_share_the_main_one():
    class Shared(MeanTask):
        def compute_loss(self, pipeline_results, state):
            return {"main": pipeline_results, "other": 2 * pipeline_results}

    seen = Gradients()
    quiet_trainer(Scalar(1.0), Shared(), [t(4), t(0, 0, 0)], callbacks=[seen], accumulate=2).fit()
    assert seen.seen[0]["w"] == 3.0


def test_a_module_can_add_a_loss_of_its_own():
    """`context.add_loss`: gradient of the main loss (2) plus coefficient 0.5 times 4, with the weight of the microbatch."""

    class Adds(Scalar):
        context = None

        def forward(self, c):
            self.context.add_loss("router", 4 * self.w, coefficient=0.5)
            return super().forward(c)

    model, seen = Adds(1.0), Gradients()
    trainer = quiet_trainer(model, MeanTask(), [t(2), t(2, 2)], callbacks=[seen], accumulate=2, log_every=1)
    model.context = trainer.context
    trainer.fit()
    assert seen.seen[0]["w"] == 4.0
    assert trainer.history.last("train/loss")[1] == 4.0 and trainer.history.last("train/router")[1] == 4.0


def test_undeclared_weights_with_microbatches_of_different_size_warn():
    """A bare loss counts 1 per microbatch; the warning names weight=."""
    with pytest.warns(UserWarning, match="weight= of ForwardInputs"):
        run([[t(4), t(0, 0, 0)]], "none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run([[t(4), t(2)]], "none")


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda out: out.detach(), "no graph"),
        (lambda out: out.expand(3), r"shape \(3,\)"),
        (lambda out: 3.0, "float"),
        (lambda out: {}, "empty mapping"),
        (lambda out: Loss(out, 2), "declared in ForwardInputs.weight and returned"),
        (lambda out: {"a": out, "b": Loss(out, 2)}, "declare one weight per term"),
        (lambda out: None, "NoneType"),
    ],
)
def test_a_loss_that_cannot_be_trained_says_why(returned, words):
    class Bad(MeanTask):
        def compute_loss(self, pipeline_results, state):
            return returned(pipeline_results)

    with pytest.raises((ModelError, ConfigurationError), match=words):
        quiet_trainer(Scalar(), Bad(), [t(1)]).fit()


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), torch.ones(2)])
def test_a_weight_that_is_no_weight_is_refused(weight):
    class Bad(MeanTask):
        def build_forward_inputs(self, batch):
            return ForwardInputs(inputs=batch, weight=weight)

    with pytest.raises(ConfigurationError, match="weight"):
        quiet_trainer(Scalar(), Bad(), [t(1)]).fit()


def test_one_process_agrees_with_a_plain_loop_of_torch():
    """Promise 1 at its base: AdamW with clipping and a schedule, a short last pack in each epoch, against a loop written by hand."""
    from trainer_kit import AutoDataProvider, SupervisedTask
    from trainer_kit.callbacks import GradientClipping
    from trainer_kit.optim import AdamW, Piecewise

    torch.manual_seed(0)
    x, y = torch.randn(22, 6, dtype=torch.float64), torch.randn(22, 1, dtype=torch.float64)
    start = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    ours, plain = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double() for _ in range(2))
    ours.load_state_dict(start.state_dict())
    plain.load_state_dict(start.state_dict())

    trainer = quiet_trainer(
        ours,
        SupervisedTask(nn.functional.mse_loss),
        AutoDataProvider(torch.utils.data.TensorDataset(x, y), global_batch_size=8, microbatch_size=4),
        callbacks=[GradientClipping(0.3)],
        optimizer=AdamW(lr=0.01, weight_decay=0.1),
        lr_scheduler=Piecewise().linear(1.0, steps=4).cosine(0.1, rest=True),
        total_steps=12,
    )
    trainer.fit()

    decay = [p for p in plain.parameters() if p.ndim > 1]
    rest = [p for p in plain.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01)
    for step in range(12):
        begin = step % 3 * 8  # packs of 8, 8 and 6 samples
        loss = nn.functional.mse_loss(plain(x[begin : begin + 8]), y[begin : begin + 8])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        factor = (step + 1) / 4 if step < 4 else 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / 8)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * factor
        optimizer.step()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_terms_of_one_name_from_several_layers_add_up():
    """What is logged is what is minimised: two layers add 4w and 6w with coefficient 0.5, the main loss is 2w."""

    class Adds(Scalar):
        context = None

        def forward(self, c):
            self.context.add_loss("router", 4 * self.w, coefficient=0.5)
            self.context.add_loss("router", 6 * self.w, coefficient=0.5)
            return super().forward(c)

    model, seen = Adds(1.0), Gradients()
    trainer = quiet_trainer(model, MeanTask(), [t(2), t(2, 2)], callbacks=[seen], accumulate=2, log_every=1)
    model.context = trainer.context
    trainer.fit()
    assert seen.seen[0]["w"] == 7.0
    assert trainer.history.last("train/loss")[1] == 7.0 and trainer.history.last("train/router")[1] == 10.0


def test_a_recomputed_forward_adds_no_loss_twice():
    """Activation checkpointing runs the forward again in the backward; the term counts once per microbatch."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.layer.weight)

        def forward(self, x):
            Block.context.add_loss("penalty", self.layer.weight.sum() * x.mean())
            return torch.tanh(self.layer(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, c):
            x = c[:, None]
            for block in self.blocks:
                x = block(x)
            return x.mean()

    gradients = []
    for setting in (False, True):
        seen = Gradients()
        trainer = quiet_trainer(Net(), MeanTask(), [t(1), t(2, 3)], callbacks=[seen], accumulate=2, activation_checkpointing=setting)
        Block.context = trainer.context
        trainer.fit()
        gradients.append(seen.seen[0])
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_a_long_evaluation_sums_in_double_precision():
    """1e5 losses of 0.1: an fp32 sum is off by 1e-4."""
    model = Scalar(0.1)
    value = quiet_trainer(model, MeanTask(), [t(1)]).evaluate([t(1)] * 20_000)["val/loss"]
    assert value == pytest.approx(float(torch.tensor(0.1)), rel=1e-9)


def test_a_weight_that_the_dtype_of_the_loss_rounds_warns():
    class Half(MeanTask):
        def build_forward_inputs(self, batch):
            return ForwardInputs(inputs=batch, weight=257)

        def compute_loss(self, pipeline_results, state):
            return pipeline_results.bfloat16()

    with pytest.warns(UserWarning, match="loss in fp32"):
        quiet_trainer(Scalar(), Half(), [t(1)]).fit()


def test_a_fractional_weight_is_as_good_as_any():
    """0.1 and 0.2: no warning in fp32, and the weighted mean of 1 and 4 is 3."""

    class Fractions(MeanTask):
        def build_forward_inputs(self, batch):
            return ForwardInputs(inputs=batch, weight=0.1 if batch.mean() == 1 else 0.2)

    seen = Gradients()
    quiet_trainer(Scalar(), Fractions(), [t(1), t(4)], callbacks=[seen], accumulate=2).fit()
    assert seen.seen[0]["w"].item() == pytest.approx(3.0, rel=1e-6)


def test_floating_inputs_of_a_bf16_model_are_bf16():
    """`precision="bf16"`: fp32 samples, as data sets have them, are brought to the dtype of the parameters; integers stay."""
    seen = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x, index):
            seen.append((x.dtype, index.dtype))
            return self.layer(x)

    class Fit(MeanTask):
        def build_forward_inputs(self, batch):
            return ForwardInputs(inputs=batch, weight=1)

        def compute_loss(self, pipeline_results, state):
            return pipeline_results.float().mean()

    from trainer_kit.optim import StochasticAdamW

    data = [{"x": torch.ones(3, 2), "index": torch.arange(3)}]
    quiet_trainer(Net(), Fit(), data, precision="bf16", optimizer=StochasticAdamW(lr=1e-3)).fit()
    assert seen == [(torch.bfloat16, torch.int64)]


def test_one_of_several_terms_named_loss_is_refused():
    class Named(MeanTask):
        def compute_loss(self, pipeline_results, state):
            return {"loss": pipeline_results, "aux": pipeline_results}

    with pytest.raises(ConfigurationError, match="name 'loss'"):
        quiet_trainer(Scalar(), Named(), [t(1)]).fit()
