"""Steps that fail in a pipeline: an error on one rank ends all of them with that error in sight, and the run goes on afterwards."""

import threading

import pytest
import torch

from tests.ranks.stage_runs import Net, assert_same_weights, history, num_ranks, provider, run_of, weights_of
from trainer_kit import Callback
from trainer_kit.callbacks import Checkpoint
from trainer_kit.exceptions import StateError
from trainer_kit.testing import run_on_ranks


class Breaks:
    """What is to fail next, once: "forward" in each stage in another microbatch, such that all ranks come to theirs."""

    place = ""
    num_calls: dict[int, int] = {}

    @classmethod
    def arm(cls, place):
        cls.place, cls.num_calls = place, {}

    @classmethod
    def in_forward(cls, stage):
        if cls.place == "forward":
            cls.num_calls[stage] = cls.num_calls.get(stage, 0) + 1
            if cls.num_calls[stage] == max(1, 3 - stage):
                cls.place = ""
                raise ValueError("broken in forward")

    @classmethod
    def at(cls, place):
        if cls.place == place:
            cls.place = ""
            raise ValueError(f"broken in {place}")


class Fragile(Net):
    def forward(self, inputs, shared=None):
        Breaks.in_forward(self.stage.index)
        return super().forward(inputs, shared)


class Arms(Callback):
    """Chooses what fails in the third step, and fails itself."""

    def __init__(self, place):
        self.place, self.is_armed = place, False

    def on_step_start(self, event):
        if event.step == 2 and not self.is_armed:
            self.is_armed = True
            Breaks.arm(self.place)
        Breaks.at("step_start")

    def on_gradients_ready(self, event):
        Breaks.at("gradients")


def fragile(stage):
    return Fragile(stage).double()


# Where a V layout has all stages of a microbatch on few ranks, not every rank would come to a forward that fails.
PLACES = {"shard": ["step_start", "forward", "gradients"], "zbv shard": ["gradients"], "one": ["nowhere"]}


def job_symmetric(layout):
    """Runs that fail in the third step, each at another place, and go on by a second fit."""
    Breaks.arm("")
    weights, found, records = [], [], []
    for place in PLACES[layout]:
        trainer = run_of(layout, provider(32, 8, shuffle=True), Arms(place), model=fragile, total_steps=4)
        try:
            trainer.fit()
        except ValueError as error:
            found.append((str(error), trainer.step))
            trainer.fit()
        weights.append(weights_of(trainer))
        records.append([point for point in history(trainer)["train/loss"] if point[0] > 2])  # records of before are lost with the error
        trainer.close()
    return weights, found, records, [thread.name for thread in threading.enumerate() if "trainer_kit" in thread.name]


@pytest.mark.parametrize("layout", ["shard", "zbv shard"])
def test_a_step_that_failed_on_all_ranks_leaves_nothing_behind(layout):
    """Contracts 24 and 42: transfers under way, gradients half summed, parameters half gathered: a second fit ends as a run without it."""
    (expected,), _, (losses,), _ = job_symmetric("one")
    ranks = run_on_ranks(num_ranks(layout), job_symmetric, layout)
    for _, found, records, threads in ranks:
        assert threads == [] and found == [(f"broken in {place}", 2) for place in PLACES[layout]]
        for of_run in records:
            assert [step for step, _ in of_run] == [3, 4] and of_run == [(n, pytest.approx(v, rel=1e-9)) for n, v in losses]
    for index in range(len(PLACES[layout])):
        assert_same_weights([found[0][index] for found in ranks], expected)


class Quick(Callback):
    """Lets ranks that wait for a dead one leave after half a second in place of four."""

    def on_build_start(self, event):
        event.trainer.context.failures._grace = 0.5


class FailsInside(Net):
    """The forward of one stage fails in the fourth step, in its second microbatch, unless there is a mark that it did."""

    fails = True

    def forward(self, inputs, shared=None):
        if self.stage.index == 1 and self.training and self.fails and int(self.layers["1"].calls) == 3 * 4 + 1:
            raise ValueError("bad sample 17")
        return super().forward(inputs, shared)


def failing(stage):
    return FailsInside(stage).double()


def job_fail_inside(layout, folder, fails):
    FailsInside.fails = fails
    callbacks = [Quick(), Checkpoint(folder, every=2, asynchronous=False)]
    trainer = run_of(layout, provider(16, 4, shuffle=True), *callbacks, model=failing, total_steps=6)
    trainer.fit()
    found = history(trainer)["train/loss"], weights_of(trainer)
    trainer.close()
    return found


def test_an_error_in_the_middle_of_a_pipeline_ends_all_ranks_and_the_run_resumes(tmp_path):
    """Contract 41 on four ranks that all wait for each other: the error, its action and rank are told; contract 24 for the next start."""
    with pytest.raises(StateError) as caught:
        run_on_ranks(4, job_fail_inside, "four", str(tmp_path / "a"), True, timeout=10.0)
    text = str(caught.value)
    assert type(caught.value.__cause__) is ValueError or "rank 1 failed: ValueError: bad sample 17" in text
    assert "in 'forward stage 1 mb1' of the pipeline, on rank 1" in text
    assert [path.name for path in (tmp_path / "a").glob("step-*")] == ["step-00000002"]
    resumed = run_on_ranks(4, job_fail_inside, "four", str(tmp_path / "a"), False)
    (expected,) = run_on_ranks(1, job_fail_inside, "one", str(tmp_path / "b"), False)
    assert all(found[0] == resumed[0][0] for found in resumed)
    assert resumed[0][0] == [(step, pytest.approx(value, rel=1e-9)) for step, value in expected[0] if step > 2]
    assert_same_weights([found[1] for found in resumed], expected[1])


class Misfit(Net):
    """The first stage returns something other than it describes."""

    def forward(self, inputs, shared=None):
        outputs = super().forward(inputs, shared)
        return outputs[:, :-1] if self.stage.is_first else outputs


def job_misfit():
    run_of("1f1b", [torch.zeros(1, 4)] * 3, Quick(), model=Misfit).fit()


def test_a_stage_that_returns_something_else_than_it_describes_ends_all_ranks():
    """Contracts 20 and 41: the stage, the rank, the microbatch, what came and what was expected."""
    with pytest.raises(StateError) as caught:
        run_on_ranks(2, job_misfit, timeout=10.0)
    text = str(caught.value)
    assert "the stage returned float32 [1, 3], where its stage_transfer_spec(inputs, 'outgoing') says float32 [1, 4]" in text
    assert "in 'forward stage 0 mb0' of the pipeline, on rank 0" in text
