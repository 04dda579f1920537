"""A pipelined run from its start to its end: what is frozen, how weights are given, what was asked for in a step, and short runs."""

import math
import threading
import warnings

import pytest
import torch

from tests.ranks.stage_runs import (
    Fit,
    assert_same_history,
    assert_same_weights,
    history,
    num_ranks,
    provider,
    run_of,
    weights_of,
)
from trainer_kit import Callback, Loss
from trainer_kit.callbacks import Checkpoint, Evaluate, GradientClipping
from trainer_kit.exceptions import ModelError, StateError
from trainer_kit.testing import run_on_ranks


def fitted(trainer):
    """Records and weights of a fit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit()
    found = history(trainer), weights_of(trainer), [str(warning.message) for warning in caught]
    trainer.close()
    return found


def compare(ranks, expected):
    """Records everywhere, and weights wherever they are, are those of one process."""
    for found in ranks:
        assert found[0] == ranks[0][0]
    assert_same_history(ranks[0][0], expected[0])
    assert_same_weights([found[1] for found in ranks], expected[1])


class Freezes(Callback):
    """Freezes what starts with these names once the model is there."""

    def __init__(self, *names):
        self.names = names

    def on_model_ready(self, event):
        for stage in event.trainer.stages:
            for name, parameter in stage.named_parameters():
                if name.startswith(self.names):
                    parameter.requires_grad_(False)


FROZEN = {
    "the first stages": ("embedding", "layers.0", "layers.1"),
    "the last stages": ("layers.2", "layers.3", "head"),
    "a middle": ("layers.2",),
}


def job_frozen(layout):
    """Runs of which whole stages are frozen, and one with nothing to train."""
    found = {}
    for name, names in FROZEN.items():
        # A rank without gradients still takes part in the largest one, in the dtype of the others.
        clipping = GradientClipping(0.05, norm_type=math.inf) if name == "the last stages" else GradientClipping(0.01)
        found[name] = fitted(run_of(layout, provider(12, 4), Freezes(*names), clipping))
    trainer = run_of(layout, provider(12, 4), Freezes("embedding", "layers", "head"))
    values = trainer.evaluate(provider(5, 4))
    with pytest.raises(ModelError) as caught:
        trainer.fit()
    trainer.close()
    return found, values, str(caught.value)


@pytest.mark.parametrize("layout", ["shard"])
def test_stages_may_be_frozen(layout):
    """Contracts 13 and 22: a rank with nothing to train takes part; with nothing to train at all, every rank says so."""
    expected, expected_values, refused = job_frozen("one")
    ranks = run_on_ranks(num_ranks(layout), job_frozen, layout)
    for name in expected:
        compare([found[0][name] for found in ranks], expected[name])
    for _, values, text in ranks:
        assert values == pytest.approx(expected_values, rel=1e-9) and text == refused and "no trainable parameter" in text


class Returns(Fit):
    """The weight comes with the loss: a number, or a tensor of a device that is not waited for."""

    def __init__(self, kind):
        super().__init__(None)
        self.kind = kind

    def compute_loss(self, pipeline_results, state):
        loss = super().compute_loss(pipeline_results, state)
        if self.kind == "none":
            return loss
        return Loss(loss, torch.tensor(len(state)) if self.kind == "tensor" else len(state))


def job_weights(layout):
    return {kind: fitted(run_of(layout, provider(11, 4, 2), task=Returns(kind))) for kind in ("number", "tensor", "none")}


@pytest.mark.parametrize(("layout", "same"), [("zbv replicate", "replicate")])
def test_weights_that_the_last_stage_alone_knows(layout, same):
    """B116, B117 and contract 1: the total reaches every rank. A bare loss counts 1, which one rank tells where sizes differ.

    The last pack has 3 samples; how they are cut into microbatches depends on the data ranks, so the reference has as many.
    """
    expected = run_on_ranks(num_ranks(same), job_weights, same)
    ranks = run_on_ranks(num_ranks(layout), job_weights, layout)
    for kind in ("number", "tensor", "none"):
        compare([found[kind] for found in ranks], expected[0][kind])
    told = [sum("declares no weight" in text for text in found["none"][2]) for found in ranks]
    assert sum(told) == 1 and all(found["number"][2] == found["tensor"][2] == [] for found in ranks)


class Asks(Callback):
    """Asks for a save and an evaluation in the second step, on these ranks."""

    def __init__(self, folder, ranks=None):
        self.folder, self.ranks = folder, ranks

    def on_microbatch_end(self, event):
        event.trainer.log("last/microbatch", event.microbatch)

    def on_step_start(self, event):
        if event.step == 1 and (self.ranks is None or event.trainer.context.rank in self.ranks):
            event.trainer.request("save", path=f"{self.folder}/step-00000002")
            event.trainer.request("evaluate", data=provider(5, 4), name="asked")


def job_requests(folder):
    trainer = run_of("zbv", provider(12, 4), Asks(folder))
    trainer.fit()
    found = trainer.history.values("asked/count"), trainer.history.values("last/microbatch")
    trainer.close()
    alone = run_of("zbv", provider(12, 4), Asks(f"{folder}/alone", ranks=[1]))
    with pytest.raises(StateError) as caught:
        alone.fit()
    alone.close()
    again = run_of("zbv", provider(12, 4))
    again.fit(resume=f"{folder}/step-00000002")
    step = again.step
    again.close()
    return found, str(caught.value), step


def test_what_is_asked_for_in_a_step_is_done_after_it(tmp_path):
    """Design section 4: on all ranks of a pipeline together; what one rank alone asks for is an error on all, not a hang."""
    for found, text, step in run_on_ranks(2, job_requests, str(tmp_path)):
        assert found == ([(2, 5.0)], [(1, 3.0), (2, 3.0), (3, 3.0)]) and step == 3
        assert "rank 0: nothing" in text and "rank 1: save(" in text
    assert (tmp_path / "step-00000002").exists() and not (tmp_path / "alone").exists()


def job_short(layout, folder):
    """Runs that are cut short, one after the other in the same process."""
    found = {}
    cases = {
        "overfit": {"overfit_packs": 1, "limit_evaluate_packs": 1, "total_steps": 4},
        "dev": {"fast_dev_run": True},
        "extended": {"total_steps": 2},
    }
    for name, settings in cases.items():
        callbacks = [Evaluate(provider(12, 4), every=2), Checkpoint(f"{folder}/{name}", every=2, asynchronous=False)]
        trainer = run_of(layout, provider(24, 4), *callbacks, **settings)
        trainer.fit()
        if name == "extended":
            trainer.fit(4)
        numbers = [value for _, value in trainer.history.values("train/numbers")]
        counts = [value for _, value in trainer.history.values("val/count")]
        found[name] = trainer.step, numbers, counts
        trainer.close()
    return found, [thread.name for thread in threading.enumerate() if "trainer_kit" in thread.name]


def test_short_runs_are_those_of_one_process(tmp_path):
    """Contracts 32 and 42: overfit_packs, fast_dev_run, limits, a run that is extended; nothing is left."""
    expected, _ = job_short("one", str(tmp_path / "one"))
    assert expected["overfit"][:2] == (4, [6.0] * 4) and expected["overfit"][2] == [4.0] * 2 and expected["extended"][0] == 4
    for found, threads in run_on_ranks(2, job_short, "zbv", str(tmp_path / "zbv")):
        assert found == expected and threads == []
    folders = [sorted(str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).glob("*/step-*")) for name in ("one", "zbv")]
    assert folders[0] == folders[1] and not (tmp_path / "zbv" / "dev").exists()
