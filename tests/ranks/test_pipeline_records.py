"""Records of a run in pipeline stages: the values of one process under each name, wherever they came from, and the same on every rank."""

import importlib.util

import pytest
import torch

from tests.ranks.stage_runs import (
    LAYOUTS,
    Fit,
    Nets,
    OfRanks,
    assert_same_history,
    assert_same_weights,
    history,
    num_ranks,
    provider,
    rows,
    run_of,
    weights_of,
)
from trainer_kit import Callback
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.testing import run_on_ranks

# What layers add, by number: early, late, and on stages that a V layout puts on one rank; one name from several stages, with one
# coefficient and with several.
ADDED = {
    "one name": {number: [("router", 0.5)] for number in range(4)},
    "several coefficients": {0: [("router", 0.5)], 1: [("router", 0.25), ("z", 2.0)], 3: [("router", 1.5), ("z", 2.0)]},
    "several names": {0: [("a", 0.5), ("c", 1.0)], 2: [("b", 0.25)], 3: [("c", 1.0)]},
}
TERMS = {"main": None, "router": 3, "second": 2}  # None: the number of samples
CASES = [("one name", "declared"), ("several coefficients", "declared"), ("several coefficients", TERMS), ("several names", TERMS)]


def job_losses(layout):
    """Runs on uneven packs, one per entry of CASES: records, values of an evaluation, final weights."""
    found = []
    for name, weigh in CASES:
        trainer = run_of(layout, provider(11, 4, shuffle=True), model=Nets(added=ADDED[name]), task=Fit(weigh))
        trainer.fit()
        values = trainer.evaluate(provider(7, 4))
        found.append((history(trainer), values, weights_of(trainer)))
        trainer.close()
    return found


@pytest.fixture(scope="module")
def losses_of_one_process():
    return job_losses("one")


@pytest.mark.parametrize("layout", ["interleaved", "zbv replicate"])
def test_losses_of_any_stage_are_those_of_one_process(layout, losses_of_one_process):
    """B115, B116, B117 and contract 2: the loss, each term by its name, the gradient norm, and what was learned.

    The last pack has 3 of 4 samples, so two data ranks have different weights.
    """
    ranks = run_on_ranks(num_ranks(layout), job_losses, layout)
    for case, (records, values, weights) in enumerate(losses_of_one_process):
        assert {f"train/{term}" for of_layer in ADDED[CASES[case][0]].values() for term, _ in of_layer} <= records.keys()
        for found in ranks:
            assert found[case][0] == ranks[0][case][0] and found[case][1] == pytest.approx(values, rel=1e-9)
        assert_same_history(ranks[0][case][0], records)
        assert_same_weights([found[case][2] for found in ranks], weights)


def test_a_loss_of_several_stages_has_the_mean_that_is_minimised():
    """By hand, on a V layout: w goes to both stages of rank 0, and 2 samples weigh 2 once, not once for each of them."""
    expected = run_on_ranks(1, job_by_hand, "one")
    assert run_on_ranks(2, job_by_hand, "zbv") == expected * 2
    main, router, loss = expected[0]
    assert router == pytest.approx(loss - main, rel=1e-12) and router == pytest.approx(4.0 + 3.0, rel=1e-12)


def job_by_hand(layout):
    trainer = run_of(layout, [rows(1), rows(2)], model=Constants(), task=Fit({"main": None, "router": 1}), accumulate=2)
    trainer.fit()
    found = [trainer.history.last(f"train/{name}")[1] for name in ("main", "router", "loss")]
    trainer.close()
    return found


class Constants(Nets):
    """The first layer adds 4, the last one 3."""

    def initialize_model_stage(self, ctx):
        module, context = super().initialize_model_stage(ctx), ctx.context
        for number, layer in module.layers.items():
            value = {"0": 4.0, "3": 3.0}.get(number)
            if value is not None:
                layer.register_forward_hook(
                    lambda layer, _, out, value=value: context.add_loss("router", value + 0 * layer.linear.weight.sum())
                )
        return module


class Foreign(Fit):
    """A metric of torchmetrics beside ours: only the ranks of the last stage see updates."""

    def metrics(self):
        import torchmetrics as tm

        return super().metrics() | {"mean": tm.MeanMetric(), "all": tm.MetricCollection({"sum": tm.SumMetric(), "max": tm.MaxMetric()})}

    def update_metrics(self, metrics, pipeline_results, state):
        super().update_metrics(metrics, pipeline_results, state)
        metrics["mean"].update(state[:, 0])
        for name in ("sum", "max"):
            metrics["all"][name].update(state[:, 0])


class LogsByStage(Callback):
    """Logs under names of stages, and under one name everywhere."""

    def on_step_end(self, event):
        trainer, rank = event.trainer, event.trainer.context.rank
        for stage in trainer.context.stages:
            trainer.log(f"stage/{stage}", torch.tensor(10.0 * stage))
        trainer.log("ranks/sum", 1.0, reduce="sum")
        trainer.log("ranks/max", rank, reduce="max")
        if trainer.context.hosts_last_stage:
            trainer.log("last/only", 7.0)


def job_metrics(layout, task):
    trainer = run_of(layout, provider(11, 4, shuffle=True), LogsByStage(), task=task, log_every=2, log_delay=0)
    trainer.fit()
    values = trainer.evaluate(OfRanks([[rows(1, 2), rows(3)]], [[rows(4, 9)]]))
    found = history(trainer)
    trainer.close()
    return found, values


@pytest.mark.parametrize(("layout", "task"), [("zbv replicate", Fit()), ("zbv", Foreign())])
def test_metrics_and_logged_values_are_of_the_run(layout, task):
    """Contract 8 and design decision 11: metrics of ours and of torchmetrics (which a rank imports in seconds), and what ranks of different
    stages logged."""
    if isinstance(task, Foreign) and importlib.util.find_spec("torchmetrics") is None:
        pytest.skip("torchmetrics is not installed")
    expected, expected_values = job_metrics("one", task)
    assert expected_values["val/count"] == 5
    if isinstance(task, Foreign):
        assert expected_values["val/mean"] == pytest.approx(3.8) and expected_values["val/all/max"] == 9
    ranks = run_on_ranks(num_ranks(layout), job_metrics, layout, task)
    last = max(int(name.partition("/")[2]) for name in ranks[0][0] if name.startswith("stage/"))
    data_ranks = num_ranks(layout) // LAYOUTS[layout]["pp"]
    for found, values in ranks:
        assert values == pytest.approx(expected_values, rel=1e-6) and found == ranks[0][0]  # torchmetrics compute in fp32
        of_run, of_one = ({n: v for n, v in each.items() if not n.startswith(("stage/", "ranks/"))} for each in (found, expected))
        assert_same_history(of_run, of_one, rel=1e-6)
        assert [found[f"stage/{stage}"][0] for stage in range(last + 1)] == [(2, 10.0 * stage) for stage in range(last + 1)]
        assert found["ranks/sum"] == [(2, data_ranks), (3, data_ranks)] and found["ranks/max"][0] == (2, num_ranks(layout) - 1)


def job_refused():
    """What the values of stages cannot be brought to: each an error on every rank, after which the next trainer works."""
    found = []
    for callback in (LogsDifferently(), LogsTheLoss()):
        trainer = run_of("zbv", provider(4, 4), callback, total_steps=1)
        with pytest.raises(ConfigurationError) as caught:
            trainer.fit()
        found.append(str(caught.value))
        trainer.close()
    return found


class LogsDifferently(Callback):
    def on_step_end(self, event):
        event.trainer.log("x", 1.0, reduce="mean" if event.trainer.context.hosts_last_stage else "max")


class LogsTheLoss(Callback):
    """The rank that has no losses logs one."""

    def on_step_end(self, event):
        if not event.trainer.context.hosts_last_stage:
            event.trainer.log("train/loss", 1.0)


def test_what_stages_log_must_fit_together():
    first, second = run_on_ranks(2, job_refused)
    assert first == second
    assert "'x' was logged with reduce='mean' on one rank and reduce='max' on another" in first[0]
    assert "'train/loss' was logged by trainer.log on one rank and is a loss or metric on another" in first[1]
