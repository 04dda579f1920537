"""Records on ranks: one value of the run under each name, the same on every rank, and brought together only when it is delivered."""

import importlib.util
import math
import warnings

import pytest
import torch

from tests.ranks.support import MESHES, MeanOutput, Parts, Weight, on_mesh, t
from tests.test_records import PerStep
from trainer_kit import Callback
from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.metrics import Last, Max, Mean, Metric, Min, Sum
from trainer_kit.testing import run_on_ranks

# Data rank 0 has one sample, data rank 1 has three; where there is one data rank, it has all four.
UNEQUAL = {"replicate": ([[t(4)]] * 2, [[t(0, 0, 0)]] * 2), "tp": ([[t(4), t(0, 0, 0)]] * 2,)}
UNEQUAL["fsdp"] = UNEQUAL["replicate"]


def history(trainer):
    return {name: trainer.history.values(name) for name in trainer.history.names()}


def fitted(trainer):
    """After a fit and an evaluation on the same data: what was recorded, and the values of the evaluation."""
    trainer.fit()
    values = trainer.evaluate(trainer.data)
    found = history(trainer)
    trainer.close()
    return found, values


def same(found: dict, expected: dict) -> bool:
    """Whether two histories are equal, nan included."""
    return str(sorted(found.items())) == str(sorted(expected.items()))


class LogsByRank(Callback):
    """Logs on each rank something else."""

    def on_step_end(self, event):
        trainer, rank = event.trainer, event.trainer.context.rank
        trainer.log("mean", rank)
        trainer.log("sum", rank + 1.0, reduce="sum")
        trainer.log("max", torch.tensor(float(rank)), reduce="max")
        trainer.log("min", rank, reduce="min")
        trainer.log("nan", math.nan if rank == 0 else 1.0, reduce="max")
        trainer.log("inf", math.inf if rank else -math.inf)
        trainer.log("large", 1e308, reduce="sum")
        if rank == 1:
            trainer.log("one", 7.0)

    def on_epoch_end(self, event):
        event.trainer.log("epoch", event.epoch)


def job_log(name):
    trainer = on_mesh(Weight(), MeanOutput(), Parts(*UNEQUAL[name]), MESHES[name], callbacks=[LogsByRank()], epochs=1)
    trainer.log("before", 1.0)
    trainer.fit()
    if trainer.context.rank == 1:
        trainer.log("after", 2.0)
    values = trainer.evaluate(trainer.data)
    found = history(trainer)
    trainer.close()
    return found, values


@pytest.mark.parametrize("name", MESHES)
def test_values_of_the_ranks_become_one(name):
    """B67: rank sizes 1 and 3 with means 4 and 0 give 1.0. Design decision 11: a name that one rank logged counts with that rank alone.

    Tensor peers have the same samples: a sum or mean counts one of them, and what only one of them logged is not lost.
    """
    (found, values), (other, other_values) = run_on_ranks(2, job_log, name)
    assert same(found, other) and values == other_values
    assert found["train/loss"] == [(1, 1.0), (2, 0.0)] and found["train/mean"] == [(1, 1.0), (2, 1.0)]  # w goes 1, 0, -1
    assert found["optim/grad_norm"] == [(1, 1.0), (2, 1.0)] and found["optim/lr"] == [(1, 1.0), (2, 1.0)]
    assert values == {"val/loss": -1.0, "val/mean": 1.0}
    expected = {"mean": 0.5, "sum": 3.0, "inf": math.nan, "large": math.inf}
    if name == "tp":
        expected = {"mean": 0.0, "sum": 1.0, "inf": -math.inf, "large": 1e308}
    expected |= {"max": 1.0, "min": 0.0, "nan": math.nan, "one": 7.0}
    assert str({key: [value for _, value in found[key]] for key in expected}) == str({key: [value] * 2 for key, value in expected.items()})
    assert found["before"] == [(0, 1.0)] and found["epoch"] == [(2, 0.0)] and found["after"] == [(2, 2.0)]


class OwnMetric(Metric):
    """The largest sample over the number of samples: a kind of our own, with two states that combine differently."""

    reductions = {"top": "max", "count": "sum"}

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def update(self, values):
        self.accumulate("top", self.widen(values).max())
        self.accumulate("count", values.numel())

    def _compute(self):
        return {"a": self.scale * self.state("top"), "b": self.state("count")}


class ManyMetrics(MeanOutput):
    """Metrics of every kind. The samples 9 are left out of `some`, and nothing is ever put into `none`."""

    def metrics(self):
        kinds = {"sum": Sum(), "max": Max(), "min": Min(), "last": Last(), "own": OwnMetric(2.0)}
        return super().metrics() | kinds | {"some": Mean(), "none": Mean(), "mixed": Sum()}

    def update_metrics(self, metrics, pipeline_results, state):
        super().update_metrics(metrics, pipeline_results, state)
        for name in ("sum", "max", "min", "last", "own"):
            metrics[name].update(state)
        if state[0] != 9:
            metrics["some"].update(state)
        metrics["mixed"].update(state.sum() if state[0] == 9 else 2)  # a float on one rank, an integer on the other


PACKS = [([t(9), t(9, 9)], [t(1, 5), t(2)]), ([t(9)], [t(3, 3, 4)]), ([t(9)], [t(1)])]  # by step and data rank


def job_metrics(name, degrees):
    together = [[a + b for a, b in PACKS]]
    parts = [list(part) for part in zip(*PACKS, strict=True)] if name in ("replicate", "fsdp") else together
    trainer = on_mesh(Weight(), ManyMetrics(), Parts(*parts), degrees, log_every=2, log_delay=0)
    return fitted(trainer)


@pytest.mark.parametrize("name", MESHES)
def test_metrics_are_those_of_one_process(name):
    """Contract 2 and design decision 11: over several steps, without an update on one rank or on all, with states of our own kind."""
    expected = job_metrics("one", {})
    for found in run_on_ranks(2, job_metrics, name, MESHES[name]):
        assert same(found[0], expected[0]) and same(found[1], expected[1])
    last, first = expected[0], PACKS[0]
    assert last["train/own/b"] == [(2, 10.0), (3, 2.0)] and last["train/some"][0] == (2, 3.0) and math.isnan(last["train/none"][0][1])
    assert last["train/sum"][0][1] == sum(float(x.sum()) for pack in PACKS[:2] for part in pack for x in part)
    assert len(first) == 2 and last["train/mixed"][1] == (3, 11.0)


class Foreign(MeanOutput):
    """Metrics of torchmetrics, alone and in a collection; `only` is updated on one data rank."""

    def metrics(self):
        import torchmetrics as tm

        collection = tm.MetricCollection({"sum": tm.SumMetric(), "max": tm.MaxMetric()})
        return {"mean": tm.MeanMetric(), "all": collection, "only": tm.SumMetric()}

    def update_metrics(self, metrics, pipeline_results, state):
        metrics["mean"].update(state)
        for name in ("sum", "max"):
            metrics["all"][name].update(state)
        if state[0] == 0:
            metrics["only"].update(state + 1)


def job_foreign(name):
    trainer = on_mesh(Weight(), Foreign(), Parts(*UNEQUAL[name]), MESHES[name])
    return fitted(trainer)


@pytest.mark.parametrize("name", MESHES)
def test_torchmetrics_reduce_over_the_data_ranks(name):
    """Samples 4 and 0, 0, 0: tensor peers alone have no other samples, though they are ranks of one world. No warning on any rank."""
    if importlib.util.find_spec("torchmetrics") is None:
        pytest.skip("torchmetrics is not installed")
    for found, values in run_on_ranks(2, job_foreign, name):
        assert found["train/mean"] == [(1, 1.0), (2, 1.0)] and found["train/only"] == [(1, 3.0), (2, 3.0)]
        assert found["train/all/sum"] == [(1, 4.0), (2, 4.0)] and found["train/all/max"] == [(1, 4.0), (2, 4.0)]
        assert values == {"val/loss": -1.0, "val/mean": 1.0, "val/all/sum": 8.0, "val/all/max": 4.0, "val/only": 6.0}


class Unknown:
    """Serves as a metric in one process, and says nothing of ranks."""

    def update(self, value): ...
    def compute(self):
        return 1.0

    def reset(self): ...


class WithUnknown(MeanOutput):
    def metrics(self):
        return {"mine": Unknown()}


class LogsDifferently(Callback):
    def on_step_end(self, event):
        event.trainer.log("x", 1.0, reduce="sum" if event.trainer.context.rank else "mean")


class LogsTheLoss(Callback):
    def on_step_end(self, event):
        if event.trainer.context.rank:
            event.trainer.log("train/loss", 1.0)


class TermAndMetric(MeanOutput):
    def compute_loss(self, pipeline_results, state):
        return {"mean": pipeline_results.mean(), "other": pipeline_results.mean() * 0}


def job_refused():
    """What cannot be brought together, each by an error on every rank after which the next trainer works."""
    found = []
    cases = [(WithUnknown(), []), (MeanOutput(), [LogsDifferently()]), (MeanOutput(), [LogsTheLoss()]), (TermAndMetric(), [])]
    for task, callbacks in cases:
        trainer = on_mesh(Weight(), task, Parts([[t(4)]], [[t(0)]]), MESHES["replicate"], callbacks=callbacks)
        with pytest.raises((ConfigurationError, UnsupportedError)) as caught:
            trainer.fit()
        found.append((type(caught.value).__name__, str(caught.value), trainer.step))
        trainer.close()
    return found


def test_what_cannot_be_brought_together_is_an_error_on_all_ranks():
    """Design decision 11: different kinds under one name. A metric of unknown kind is refused before the first step."""
    first, second = run_on_ranks(2, job_refused)
    assert first == second
    unknown, differently, loss, term = first
    assert unknown[0] == "UnsupportedError" and "metric 'mine' is a Unknown" in unknown[1] and unknown[2] == 0
    assert "'x' was logged with reduce='mean' on one rank and reduce='sum' on another" in differently[1]
    assert "'train/loss' was logged by trainer.log on one rank and is a loss or metric on another" in loss[1]
    assert "'mean' is the name of a loss term and of a metric" in term[1]


class Counts(Callback):
    """The steps after which records were brought together, and how many exchanges between hosts were made inside of steps."""

    def on_build_end(self, event):
        trainer = event.trainer
        self.combined, self.inside = [], 0
        exchange, combine = trainer.context.host.exchange, trainer._records.combine

        def count_exchange(value):
            self.inside += trainer._run.phase == "step"
            return exchange(value)

        def count_combine(values, reductions):
            self.combined.append(trainer.step)
            return combine(values, reductions)

        trainer.context.host.exchange, trainer._records.combine = count_exchange, count_combine


def job_waits(name):
    watch, count = PerStep(), Counts()
    data = Parts(*([[t(1)]] * 7 for _ in range(2)))
    trainer = on_mesh(Weight(), MeanOutput(), data, MESHES[name], callbacks=[watch, count], log_every=3, log_delay=1, nonfinite="skip")
    trainer.fit()
    trainer.close()
    return watch.counts, count.combined, count.inside


@pytest.mark.parametrize("name", ["replicate", "fsdp"])
def test_nothing_in_a_step_waits_and_records_travel_when_they_are_delivered(name):
    """Contract 44: records of the steps 3 and 6, and the last one, are exchanged after the steps 4 and 7 and at the end."""
    for waits, combined, inside in run_on_ranks(2, job_waits, name):
        assert waits == [0] * 7 and inside == 0
        assert combined == [4, 7, 7, 7]  # the last: the record of the last step, and what the handlers of the end may have logged


class Stepwise(Callback):
    def on_step_end(self, event):
        if event.trainer.step == 1:
            event.trainer.log("kept", event.trainer.context.rank + 1.0, reduce="sum")


def job_resume(folder):
    data = Parts(*([[t(1)]] * 4 for _ in range(2)))
    first = on_mesh(Weight(), MeanOutput(), data, MESHES["replicate"], callbacks=[Stepwise()], total_steps=2, log_every=4)
    first._records.close_step = lambda finished: None  # a run that is killed here would not close its record
    first.fit()
    first.save_checkpoint(folder)
    first.close()
    second = on_mesh(Weight(), MeanOutput(), data, MESHES["replicate"], total_steps=4, log_every=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second.fit(resume=folder)
    found = history(second)
    second.close()
    return found["kept"]


def test_a_value_that_waits_for_its_record_keeps_its_reduction_over_a_resume(tmp_path):
    """B61 on ranks: logged with reduce="sum" before a save, recorded after the resume."""
    assert run_on_ranks(2, job_resume, str(tmp_path / "step-00000002")) == [[(4, 3.0)], [(4, 3.0)]]
