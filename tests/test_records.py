"""Values from the device to the host: under their own step, a few steps late, and never waited for inside a step."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import MeanTask, Scalar, quiet_trainer
from trainer_kit import AutoDataProvider, Callback, CausalLMTask, SupervisedTask
from trainer_kit.callbacks import GradientClipping
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.metrics import Mean
from trainer_kit.optim import AdamW, Piecewise
from trainer_kit.records import Deferred, History, Records


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


class CountHostReads(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


class PerStep(Callback):
    """Counts host reads between the start of a step and the end of its last handler, by step."""

    def __init__(self):
        self.counts = []

    def on_step_start(self, event):
        self.mode = CountHostReads()
        self.mode.__enter__()

    def on_step_end(self, event):
        self.mode.__exit__(None, None, None)
        self.counts.append(self.mode.count)


@pytest.mark.parametrize("nonfinite", ["error", "skip", "ignore"])
def test_nothing_in_a_step_waits_for_the_device(nonfinite):
    """Contract 44: no `_local_scalar_dense` and no `nonzero` in any step, recorded ones included."""
    tokens = torch.randint(0, 11, (12, 6))
    labels = tokens.clone()
    labels[:, :2] = -100
    data = [{"input_ids": a, "labels": b} for a, b in zip(tokens.split(2), labels.split(2), strict=True)]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(11, 11)

        def forward(self, input_ids):
            return self.table(input_ids)

    watch = PerStep()
    quiet_trainer(
        Model(),
        CausalLMTask(),
        data,
        callbacks=[watch, GradientClipping(1.0)],
        accumulate=2,
        log_every=2,
        nonfinite=nonfinite,
        optimizer=AdamW(lr=1e-2),
        lr_scheduler=Piecewise().linear(1.0, steps=3),
    ).fit()
    assert watch.counts == [0, 0, 0]


def test_values_are_read_on_logging_steps_alone():
    """B66: 20 steps with a record every 10: host reads happen for two records."""
    reads = []

    class Count(Callback):
        def on_metrics(self, event):
            reads.append(event.step)

        def on_microbatch_end(self, event):
            event.trainer.log("seen", event.loss)

    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 20, callbacks=[Count()], log_every=10, optimizer=AdamW(lr=0.1))
    with CountHostReads() as mode:
        trainer.fit()
    assert reads == [10, 20] and mode.count <= 2


def test_one_point_per_name_and_step_on_one_axis():
    """B61: 8 microbatches in packs of 4 are two points, at steps 1 and 2; evaluation and lr use the same axis."""

    class Ask(Callback):
        def on_step_end(self, event):
            event.trainer.request("evaluate", data=[t(2)])

    trainer = quiet_trainer(Scalar(0.0), MeanTask(), [t(1)] * 8, callbacks=[Ask()], accumulate=4, log_every=1)
    trainer.fit()
    for name in ("train/loss", "optim/lr", "optim/grad_norm", "val/loss"):
        assert [step for step, _ in trainer.history.values(name)] == [1, 2], name
    assert trainer.history.values("train/loss") == [(1, 0.0), (2, -1.0)]
    assert trainer.history.values("val/loss") == [(1, -2.0), (2, -4.0)]


def test_records_arrive_late_under_their_own_step():
    seen = []

    class Look(Callback):
        def on_metrics(self, event):
            seen.append((event.trainer.step, event.step, event.values["train/loss"]))

    data = [t(float(i)) for i in range(6)]
    quiet_trainer(
        Scalar(1.0), MeanTask(), data, callbacks=[Look()], log_every=1, log_delay=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)
    ).fit()
    assert seen == [(3, 1, 0.0), (4, 2, 1.0), (5, 3, 2.0), (6, 4, 3.0), (6, 5, 4.0), (6, 6, 5.0)]


def test_a_logged_value_is_the_value_of_its_time():
    """A tensor that changes before the record is read keeps the value it had when it was logged."""

    class Log(Callback):
        def on_step_end(self, event):
            event.trainer.log("w", event.trainer.model.w)

    trainer = quiet_trainer(Scalar(0.0), MeanTask(), [t(1)] * 4, callbacks=[Log()], log_every=1, log_delay=3)
    trainer.fit()
    assert [v for _, v in trainer.history.values("w")] == [-1.0, -2.0, -3.0, -4.0]


def test_metrics_accumulate_between_records_and_start_again():
    class WithMetric(MeanTask):
        def metrics(self):
            return {"c": Mean()}

        def update_metrics(self, metrics, pipeline_results, state):
            metrics["c"].update(state)

    trainer = quiet_trainer(Scalar(), WithMetric(), [t(1), t(3), t(10), t(20)], log_every=2)
    trainer.fit()
    assert trainer.history.values("train/c") == [(2, 2.0), (4, 15.0)]
    assert trainer.evaluate([t(1, 2), t(6)])["val/c"] == 3.0


def test_a_logged_loss_keeps_no_graph():
    """Contract 44 and B129: what the forward saved is free after the step, and the number of live tensors does not grow."""
    refs, counts = [], []

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, c):
            hidden = torch.tanh(self.layer(c))
            refs.append(weakref.ref(hidden))
            return hidden.mean()

    class Log(Callback):
        def on_step_end(self, event):
            import gc

            counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
            assert all(ref() is None for ref in refs)

    class Logs(MeanTask):
        def compute_loss(self, pipeline_results, state):
            trainer.log("mine", pipeline_results)
            return pipeline_results

    trainer = quiet_trainer(Keeps(), Logs(), [torch.ones(2, 4)] * 12, callbacks=[Log()], log_every=1)
    trainer.fit()
    assert counts[4] == counts[-1]


def test_metrics_may_be_edited_before_the_loggers_see_them():
    seen = []

    class Logger(Callback):
        is_logger = True

        def on_metrics(self, event):
            seen.append(event.values["extra"])

    class Edit(Callback):
        def on_metrics(self, event):
            event.values["extra"] = 7.0

    quiet_trainer(Scalar(), MeanTask(), [t(1)], callbacks=[Logger(), Edit()]).fit()
    assert seen == [7.0]


def test_what_is_logged_for_a_record_joins_the_next_one():
    """A value derived in on_metrics: one per record, and no record that leads to another without end."""

    class Derives(Callback):
        def on_metrics(self, event):
            if "train/loss" in event.values:
                event.trainer.log("twice", 2 * event.values["train/loss"])

    trainer = quiet_trainer(Scalar(1.0), MeanTask(), [t(1)] * 6, callbacks=[Derives()], log_every=2, log_delay=0)
    trainer.fit()
    assert trainer.history.values("twice") == [(4, 0.0), (6, -4.0), (6, -8.0)]


@pytest.mark.parametrize("value", [torch.ones(2), "text", None])
def test_only_numbers_can_be_logged(value):
    records = Records(lambda step, values: None, log_every=1, log_delay=0)
    with pytest.raises(ConfigurationError, match="log\\('x'"):
        records.log("x", value)


def test_deferred_numbers_and_history():
    assert float(Deferred([torch.tensor(2.5)])) == 2.5
    assert Deferred([torch.tensor(2**40), torch.tensor(True)]).values() == [2.0**40, 1.0]
    history = History(max_points=2)
    for step in range(3):
        history.add(step, {"a": float(step)})
    assert history.values("a") == [(1, 1.0), (2, 2.0)] and history.last("a") == (2, 2.0) and history.last("b") is None


def test_a_user_sees_the_accuracy_of_digits_as_scikit_learn_computes_it():
    """Weighted reduction of a metric over unequal microbatches, against scikit-learn."""
    sklearn = pytest.importorskip("sklearn.metrics")
    from trainer_kit.metrics import Accuracy

    torch.manual_seed(0)
    x, y = torch.randn(50, 5), torch.randint(0, 3, (50,))
    model = nn.Linear(5, 3)
    task = SupervisedTask(nn.functional.cross_entropy, metrics={"accuracy": (Accuracy, lambda out, target: (out, target))})
    data = AutoDataProvider(torch.utils.data.TensorDataset(x, y), global_batch_size=16, microbatch_size=8)
    values = quiet_trainer(model, task, data).evaluate(data)
    predicted = model(x).argmax(1)
    assert values["val/accuracy"] == pytest.approx(sklearn.accuracy_score(y, predicted))
    assert values["val/loss"] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-6)
