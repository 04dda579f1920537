"""Evaluation and prediction: right values, and no trace in the run that they interrupt."""

import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import Gradients, MeanTask, Scalar, quiet_trainer, sgd
from trainer_kit import AutoDataProvider, Callback, ForwardInputs, SupervisedTask, Task, Trainer
from trainer_kit.callbacks import EMA, Checkpoint
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.metrics import Accuracy, Mean
from trainer_kit.optim import AdamW


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


class Noisy(torch.utils.data.Dataset):
    """Draws from every stream when it is read."""

    def __init__(self, count: int = 10):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.full((4,), float(index)) + torch.randn(4)
        return x, x.sum(0, keepdim=True) + random.random() + np.random.rand()


class WithNorm(nn.Module):
    """Batch statistics and dropout: what an evaluation in the wrong mode would change."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))

    def forward(self, x):
        return self.layers(x)


def provider(count: int = 10, **options: Any) -> AutoDataProvider:
    return AutoDataProvider(Noisy(count), global_batch_size=4, microbatch_size=2, shuffle=True, **options)


class Asks(Callback):
    """Asks for evaluations in every step."""

    def __init__(self, data: Any = None):
        self.data = data

    def on_step_end(self, event):
        data = event.trainer.data if self.data == "training" else self.data
        if data is not None:
            event.trainer.request("evaluate", data=data, name="val")


class Mse(SupervisedTask):
    def __init__(self):
        super().__init__(F.mse_loss, metrics={"mean": (Mean, lambda out, target: (out,))})


def run(folder: Path, data: Any, **settings: Any) -> tuple[Trainer, list[Any]]:
    """Seven steps with evaluations after each; the last checkpoint holds the whole state of the run."""
    callbacks = [Asks(data), EMA(0.9), Checkpoint(folder, every=100)]
    trainer = quiet_trainer(
        WithNorm, Mse(), provider(), callbacks=callbacks, optimizer=AdamW(lr=0.1), total_steps=7, log_every=1, **settings
    )
    trainer.fit()
    names = ("train/loss", "train/mean", "optim/grad_norm")
    return trainer, [trainer.history.values(name) for name in names]


DATA = {
    "provider": lambda: provider(6),
    "training data": lambda: "training",
    "list": lambda: [(torch.ones(3, 4), torch.ones(3, 1))],
    "loader that shuffles": lambda: torch.utils.data.DataLoader(Noisy(6), batch_size=2, shuffle=True),
    "workers": lambda: provider(4, num_workers=1),
}


@pytest.mark.parametrize("prefetch_packs", [0, 2])
@pytest.mark.parametrize("name", DATA)
def test_evaluations_change_nothing_of_the_run(name, prefetch_packs, tmp_path):
    """Design section 2: bitwise the run without them: weights, buffers, moments, averages, random streams, position, records."""
    plain, records = run(tmp_path / "plain", None, prefetch_packs=prefetch_packs)
    watched, watched_records = run(tmp_path / "watched", DATA[name](), prefetch_packs=prefetch_packs)
    assert len(watched.history.values("val/loss")) == 7 and records == watched_records
    files = [(tmp_path / part / "step-00000007" / "rank-00000.safetensors").read_bytes() for part in ("plain", "watched")]
    assert files[0] == files[1]
    assert [m.training for m in watched.model.modules()] == [m.training for m in plain.model.modules()]


def test_the_training_data_is_evaluated_from_its_start_whatever_the_position():
    """An evaluation over the training provider passes over one whole epoch, and the run goes on where it was."""
    ids = []

    class Ids(MeanTask):
        def build_forward_inputs(self, batch):
            ids.append([int(i) for i in batch[0]])
            return super().build_forward_inputs(batch[0])

    data = AutoDataProvider(torch.utils.data.TensorDataset(torch.arange(6.0)), 2)
    quiet_trainer(Scalar(), Ids(), data, callbacks=[Asks("training")], optimizer=sgd(0.0)).fit()
    epoch = [[0, 1], [2, 3], [4, 5]]
    assert ids == [[0, 1], *epoch, [2, 3], *epoch, [4, 5], *epoch]


def loader(count: int = 8, **options: Any) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(float(count))), batch_size=2, **options)


def lazy_sampler() -> torch.utils.data.RandomSampler:
    """Draws its order in portions, from a generator of its own."""
    return torch.utils.data.RandomSampler(range(80), replacement=True, num_samples=80, generator=torch.Generator())


BOTH = {
    "workers of a provider": lambda: AutoDataProvider(torch.utils.data.TensorDataset(torch.arange(8.0)), 2, shuffle=True, num_workers=1),
    "loader": lambda: loader(shuffle=True),
    "loader with workers": lambda: loader(shuffle=True, num_workers=1),
    "loader with workers that stay": lambda: loader(shuffle=True, num_workers=1, persistent_workers=True),
    "loader with a generator": lambda: loader(80, sampler=lazy_sampler()),
}


@pytest.mark.parametrize("name", BOTH)
def test_the_very_data_that_is_being_read_can_be_evaluated(name):
    """An evaluation changes nothing of the data position, also when it reads from the same object."""

    def run(evaluates: bool) -> list[list[int]]:
        seen, data = [], BOTH[name]()

        class First(MeanTask):
            def build_forward_inputs(self, batch):
                return super().build_forward_inputs(batch[0])

        class Ids(First):
            def build_forward_inputs(self, batch):
                seen.append([int(i) for i in batch[0]])
                return super().build_forward_inputs(batch)

        class Ask(Callback):
            def on_step_end(self, event):
                event.trainer.request("evaluate", data=data, task=First())

        quiet_trainer(Scalar(), Ids(), data, callbacks=[Ask()] if evaluates else [], optimizer=sgd(0.0), epochs=2).fit()
        return seen

    assert run(True) == run(False)


def test_a_loss_that_was_added_before_a_failure_counts_nowhere_else():
    """Contract 24: after a failed evaluation and a failed step the gradient is 2 + 0.5 * 4, that of one microbatch."""

    class Adds(Scalar):
        context: Any = None

        def forward(self, c):
            self.context.add_loss("router", 4 * self.w, coefficient=0.5)
            return super().forward(c)

    class FailsTwice(MeanTask):
        num_calls = 0

        def compute_loss(self, pipeline_results, state):
            self.num_calls += 1
            if self.num_calls <= 2:
                raise ValueError("mine")
            return pipeline_results

    model, seen = Adds(1.0), Gradients()
    trainer = quiet_trainer(model, FailsTwice(), [t(2)] * 4, callbacks=[seen])
    model.context = trainer.context
    for act in (lambda: trainer.evaluate([t(2)]), trainer.fit):
        with pytest.raises(ValueError, match=r"mine"):
            act()
    trainer.fit()
    assert [float(g["w"]) for g in seen.seen] == [4.0] * len(seen.seen) and seen.seen


def test_random_streams_and_modes_are_as_they_were_outside_of_a_fit():
    """Contract 42: the caller's streams; each module's own mode."""
    model = WithNorm()
    model.layers[1].eval()
    trainer = quiet_trainer(model, Mse(), provider())
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = torch.rand(2), random.random(), np.random.rand()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    trainer.evaluate(provider())
    trainer.predict(provider())
    found = torch.rand(2), random.random(), np.random.rand()
    assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:]
    assert [m.training for m in model.modules()] == [True, True, True, False, True, True]


class Fails(Mse):
    """Draws random numbers and raises."""

    def update_metrics(self, metrics, pipeline_results, state):
        torch.rand(3), random.random()
        raise ValueError("mine")


def test_an_evaluation_that_fails_leaves_no_trace():
    """Contract 42: modes, random streams, gradient mode; the error surfaces unchanged, and the trainer stays usable."""
    model = WithNorm()
    trainer = quiet_trainer(model, Mse(), provider(), optimizer=AdamW(lr=0.1), total_steps=4)
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(ValueError, match=r"^mine$"):
        trainer.evaluate(provider(), task=Fails())
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert all(m.training for m in model.modules()) and torch.is_grad_enabled()
    trainer.fit()
    assert trainer.step == 4


def test_a_failed_evaluation_that_a_callback_catches_changes_nothing_of_the_run(tmp_path):
    """Bitwise the run without it, from which the same goes on."""

    class Tries(Callback):
        def on_epoch_start(self, event):
            with pytest.raises(ValueError, match=r"^mine$"):
                event.trainer.evaluate(provider(), task=Fails())

    files = []
    for name, more in (("plain", []), ("watched", [Tries()])):
        callbacks = [*more, Checkpoint(tmp_path / name, every=100)]
        quiet_trainer(WithNorm, Mse(), provider(), callbacks=callbacks, optimizer=AdamW(lr=0.1), total_steps=7).fit()
        files.append((tmp_path / name / "step-00000007" / "rank-00000.safetensors").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize(("size", "micro"), [(7, None), (4, 2), (3, 3), (2, 1)])
def test_the_result_is_that_of_one_big_batch(size, micro):
    """Contract 2: the weighted mean over all samples, whatever the batch sizes; the metric of a plain loop."""
    torch.manual_seed(0)
    x, y, model = torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 3, (7,)), nn.Linear(4, 3).double()
    task = SupervisedTask(F.cross_entropy, metrics={"accuracy": (Accuracy, lambda out, target: (out, target))})
    data = AutoDataProvider(torch.utils.data.TensorDataset(x, y), size, micro)
    values = quiet_trainer(model, task, data).evaluate(data)
    assert values["val/loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-12)
    assert values["val/accuracy"] == pytest.approx((model(x).argmax(1) == y).double().mean().item(), rel=1e-6)


@pytest.mark.parametrize("metric", [Accuracy, Mean])
def test_counts_are_divided_in_double_precision(metric):
    """Counts add up as exact integers; their quotient is that of Python, not one of float32."""
    x = torch.eye(3)[torch.tensor([0, 1, 2, 0, 1, 2, 0])]
    y = torch.tensor([0, 1, 2, 1, 2, 0, 1])
    arguments = {Accuracy: lambda out, target: (out, target), Mean: lambda out, target: ((out.argmax(1) == target).long(),)}[metric]
    task = SupervisedTask(F.cross_entropy, metrics={"share": (metric, arguments)})
    model = nn.Linear(3, 3, bias=False)
    nn.init.eye_(model.weight)
    assert quiet_trainer(model, task, [(x, y)]).evaluate([(x, y)])["val/share"] == 3 / 7


@pytest.mark.parametrize("weigh", ["declared", "returned", "tensor"])
def test_every_kind_of_weight_counts(weigh):
    """B63 in evaluation: means 4 of one sample and 0 of three are 1; microbatches without a sample count nothing."""
    trainer = quiet_trainer(Scalar(1.0), MeanTask(weigh), [t(1)])
    assert trainer.evaluate([t(4), t(0, 0, 0), t()]) == {"val/loss": 1.0}


def test_terms_and_added_losses_are_reported_as_in_training():
    class Terms(Task):
        def build_forward_inputs(self, batch):
            return ForwardInputs(inputs=batch, state=batch, weight={"ce": len(batch), "aux": 1})

        def compute_loss(self, pipeline_results, state):
            return {"ce": pipeline_results, "aux": 10 * pipeline_results / state.mean()}

    trainer = quiet_trainer(Scalar(2.0), Terms(), [t(1)])
    found = trainer.evaluate([t(1), t(2, 3, 6)], name="test")  # each loss is an fp32 number
    assert found == pytest.approx({"test/loss": 26.0, "test/ce": 6.0, "test/aux": 20.0}, rel=1e-6)


def test_values_are_recorded_under_the_finished_steps_and_the_name():
    trainer = quiet_trainer(Scalar(1.0), MeanTask(), [t(1)] * 3, optimizer=sgd(0.0))
    trainer.fit()
    assert trainer.evaluate([t(5)], name="test") == {"test/loss": 5.0}
    assert trainer.history.last("test/loss") == (3, 5.0) and trainer.history.last("val/loss") is None


@pytest.mark.parametrize(("limit", "expected"), [({"limit_evaluate_packs": 2}, 3.0), ({"fast_dev_run": 1}, 2.0), ({}, 5.0)])
def test_the_number_of_packs_can_be_limited(limit, expected):
    trainer = quiet_trainer(Scalar(1.0), MeanTask(), [t(1)], **limit)
    assert trainer.evaluate([t(2), t(4), t(9)])["val/loss"] == expected


def test_a_limit_counts_packs_and_not_microbatches():
    data = AutoDataProvider(torch.utils.data.TensorDataset(torch.arange(1.0, 9.0)), global_batch_size=4, microbatch_size=1)

    class First(MeanTask):
        def build_forward_inputs(self, batch):
            return super().build_forward_inputs(batch[0])

    assert quiet_trainer(Scalar(1.0), First(), data, limit_evaluate_packs=1).evaluate(data)["val/loss"] == 2.5


@pytest.mark.parametrize(
    "data", [lambda: [t(2), t(4)], lambda: (t(2), t(4)), lambda: iter([t(2), t(4)]), lambda: (t(c) for c in (2.0, 4.0))]
)
def test_any_iterable_is_evaluated_once(data):
    assert quiet_trainer(Scalar(1.0), MeanTask(), [t(1)]).evaluate(data()) == {"val/loss": 3.0}


def test_an_exhausted_iterator_is_an_error():
    trainer, data = quiet_trainer(Scalar(1.0), MeanTask(), [t(1)]), iter([t(2)])
    trainer.evaluate(data)
    with pytest.raises(ConfigurationError, match=r"no pack"):
        trainer.evaluate(data)


def test_nothing_keeps_a_graph_and_activations_are_freed_as_they_go():
    """Contract 25: at most one microbatch's output is alive at a time, in evaluation and prediction."""
    alive, most = [], []

    class Watches(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            assert not out.requires_grad
            alive.append(weakref.ref(out))
            most.append(sum(ref() is not None for ref in alive))
            return out

    data = [(torch.ones(2, 3), torch.ones(2, 1)) for _ in range(4)]
    trainer = quiet_trainer(Watches(3, 1), SupervisedTask(F.mse_loss), data)
    trainer.evaluate(data)
    trainer.predict(data, each=lambda outputs: None)
    assert max(most) <= 2 and len(most) == 8


def test_predictions_are_complete_in_order_and_on_the_host():
    """Against a plain loop in eval mode, over unequal microbatches."""
    torch.manual_seed(0)
    model = WithNorm()
    x = torch.randn(7, 4)
    data = [(part, torch.zeros(len(part), 1)) for part in x.split((3, 1, 2, 1))]
    results = quiet_trainer(model, Mse(), data).predict(data)
    with torch.no_grad():
        model.eval()
        expected = [model(part) for part in x.split((3, 1, 2, 1))]
    assert len(results) == 4 and all(map(torch.equal, results, expected))
    assert all(r.device.type == "cpu" and not r.requires_grad for r in results)


def test_predictions_of_a_provider_come_in_the_order_of_the_data_set():
    data = AutoDataProvider(torch.utils.data.TensorDataset(torch.arange(7.0)), global_batch_size=4, microbatch_size=2)

    class Ids(Task):
        def build_forward_inputs(self, batch):
            return ForwardInputs(inputs=batch[0], state=batch[0])

        def process_outputs(self, pipeline_results, state):
            return {"ids": state, "out": (pipeline_results, "text")}

    results = quiet_trainer(Scalar(2.0), Ids(), [t(1)]).predict(data)
    assert [r["ids"].tolist() for r in results] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [r["out"][0].item() for r in results] == [1.0, 5.0, 9.0, 12.0] and results[0]["out"][1] == "text"


def test_each_takes_the_results_as_they_come():
    log = []

    class Notes(Scalar):
        def forward(self, c):
            log.append(("forward", c.item()))
            return super().forward(c)

    trainer = quiet_trainer(Notes(1.0), MeanTask(), [t(1)])
    assert trainer.predict([t(1), t(2)], each=lambda outputs: log.append(("each", outputs.item()))) == []
    assert log == [("forward", 1.0), ("each", 1.0), ("forward", 2.0), ("each", 2.0)]


def test_another_task_measures_the_same_model():
    class Doubles(MeanTask):
        def compute_loss(self, pipeline_results, state):
            return 2 * pipeline_results

    trainer = quiet_trainer(Scalar(1.0), MeanTask(), [t(1)])
    assert trainer.evaluate([t(3)], task=Doubles()) == {"val/loss": 6.0}
    assert trainer.evaluate([t(3)]) == {"val/loss": 3.0}


def test_the_events_of_an_evaluation_and_a_prediction_come_in_pairs():
    log = []

    class Look(Callback):
        def on_evaluate_start(self, event):
            log.append("evaluate")

        def on_evaluate_end(self, event):
            log.append(dict(event.values))

        def on_predict_start(self, event):
            log.append("predict")

        def on_predict_end(self, event):
            log.append("predicted")

    trainer = quiet_trainer(Scalar(1.0), MeanTask(), [t(1)], callbacks=[Look()])
    trainer.evaluate([t(3)])
    trainer.predict([t(3)])
    assert log == ["evaluate", {"val/loss": 3.0}, "predict", "predicted"]


def test_an_evaluation_at_the_end_of_a_fit_sees_the_last_weights():
    """A request in on_fit_end is carried out; w is 1 - 2 steps."""

    class Ask(Callback):
        def on_fit_end(self, event):
            event.trainer.request("evaluate", data=[t(1)])

    trainer = quiet_trainer(Scalar(1.0), MeanTask(), [t(1)] * 2, callbacks=[Ask()])
    trainer.fit()
    assert trainer.history.values("val/loss") == [(2, -1.0)]


def test_evaluation_and_prediction_need_no_optimizer_and_no_training_data():
    """Design section 2: the optimizer may be missing; the training data is not read."""

    class Never:
        def __iter__(self):
            raise AssertionError("read")

    trainer = quiet_trainer(Scalar(2.0), MeanTask(), Never(), optimizer=None, total_steps=1)
    assert trainer.evaluate([t(3)]) == {"val/loss": 6.0}
    assert [float(p) for p in trainer.predict([t(3)])] == [6.0]
