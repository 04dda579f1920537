"""What goes wrong in a pipeline: errors that name stage, rank, microbatch and what was expected, and the step after them."""

from __future__ import annotations

import pytest
import torch

from tests.pipeline.stages import WIDTH, Fit, Part, build_context, build_runner, gradients, one_process, pack_of
from trainer_kit.data import Pack
from trainer_kit.exceptions import ConfigurationError, ModelError, StateError
from trainer_kit.mesh.context import AddedLoss
from trainer_kit.pipeline.loss_terms import SharedWeights
from trainer_kit.testing import run_on_ranks


def catch(function):
    """The type, text and notes of the error that a call raises."""
    try:
        function()
    except Exception as error:
        return type(error), str(error), getattr(error, "__notes__", [])
    raise AssertionError("nothing was raised")


def train(runner, modules, *sizes):
    return gradients(modules, runner.run_pack(pack_of(*sizes), Fit(), {}, losses=None))


def check_step(by_rank, num_stages, *sizes):
    """The gradients of the ranks are those of one process."""
    runner, modules = one_process(num_stages)
    found = {name: gradient for gradients_of_rank in by_rank for name, gradient in gradients_of_rank.items()}
    for name, gradient in train(runner, modules, *sizes).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-13)


class Silent(Part):
    stage_transfer_spec = None


def silent_job():
    context = build_context(pp=2)
    return catch(lambda: build_runner(context, "1f1b", 2, make=Silent))


def test_a_module_without_a_description_is_refused_before_anything_runs():
    for rank, (kind, text, _) in enumerate(run_on_ranks(2, silent_job)):
        assert kind is ModelError and f"Silent, the module of stage {rank} on rank {rank}, has no stage_transfer_spec" in text


class Disagreeing(Part):
    """Stage 2 expects another shape when it gets seven samples."""

    def stage_transfer_spec(self, inputs, boundary):
        spec = super().stage_transfer_spec(inputs, boundary)
        if self.index == 2 and boundary == "incoming" and len(inputs["x"]) == 7:
            spec["hidden"] = torch.empty(7, WIDTH + 1, dtype=torch.float64, device="meta")
        return spec


def disagreeing_job(schedule):
    runner, modules = build_runner(build_context(pp=2), schedule, 4, make=Disagreeing)
    first = train(runner, modules, 2, 3, 2, 2)
    error = catch(lambda: train(runner, modules, 2, 2, 7, 2))
    return error, first, train(runner, modules, 3, 1, 1, 2, 4)


@pytest.mark.parametrize(("schedule", "ranks"), [("interleaved_1f1b", (1, 0)), ("zbv", (1, 1))])
def test_sides_of_a_transfer_that_do_not_fit_are_an_error_on_every_rank(schedule, ranks):
    """Contract 24 too: the next step works."""
    found = run_on_ranks(2, disagreeing_job, schedule)
    for kind, text, _ in (rank[0] for rank in found):
        assert kind is ModelError
        assert (
            f"stage 1 on rank {ranks[0]} sends for microbatch 2: fixed: float64 [2], hidden: float64 [7, 4], ids: int64 [7], side" in text
        )
        assert f"but stage 2 on rank {ranks[1]} expects: fixed: float64 [2], hidden: float64 [7, 5]" in text
    check_step([rank[1] for rank in found], 4, 2, 3, 2, 2)
    check_step([rank[2] for rank in found], 4, 3, 1, 1, 2, 4)


def lengths_job(schedule):
    context = build_context(pp=2)
    runner, modules = build_runner(context, schedule, 4)
    error = catch(lambda: train(runner, modules, *(2,) * (3 + context.rank)))
    return error, train(runner, modules, 2, 2, 1, 3)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "dualpipe_v"])
def test_packs_of_other_lengths_are_an_error_on_every_rank(schedule):
    """Also where one of them would be too short for the schedule."""
    found = run_on_ranks(2, lengths_job, schedule)
    for kind, text, _ in (rank[0] for rank in found):
        assert kind is ConfigurationError and "packs of different length for one step (rank 0: 3, rank 1: 4)" in text
    check_step([rank[1] for rank in found], 4, 2, 2, 1, 3)


def too_few_job():
    runner, modules = build_runner(build_context(pp=2), "dualpipe_v", 4)
    return catch(lambda: train(runner, modules, 2, 2, 2)), train(runner, modules, 2, 2, 2, 2)


def test_too_few_microbatches_are_an_error_on_every_rank():
    """Contract 22."""
    found = run_on_ranks(2, too_few_job)
    for kind, text, _ in (rank[0] for rank in found):
        assert kind is ConfigurationError and "needs 4 microbatches or more per step and data rank, got 3" in text
    check_step([rank[1] for rank in found], 4, 2, 2, 2, 2)


class Failing(Part):
    """Fails in the forward of a microbatch with these numbers of samples."""

    def forward(self, inputs, shared):
        if len(inputs["ids"]) == 10 + self.index:
            raise ZeroDivisionError("on purpose")
        return super().forward(inputs, shared)


def failing_job(schedule, num_stages, receive_ahead, sizes):
    runner, modules = build_runner(build_context(pp=2), schedule, num_stages, make=Failing, receive_ahead=receive_ahead)
    errors = []
    for _ in range(2):
        errors.append(catch(lambda: train(runner, modules, *sizes)))
        for module in modules.values():
            module.zero_grad()
    return errors, train(runner, modules, 3, 2, 4, 1), train(runner, modules, 2, 2)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "sizes", "failing_stages"),
    [
        ("1f1b", 2, (2, 11, 10, 2), (0, 1)),
        ("1f1b", 2, (11, 10, 2), (0, 1)),
        ("gpipe", 2, (11, 2, 2, 10), (0, 1)),
        ("zb1p", 2, (2, 2, 11, 10, 2), (0, 1)),
        ("interleaved_1f1b", 4, (2, 13, 10, 2), (0, 3)),
    ],
)
@pytest.mark.parametrize("receive_ahead", [0, 1])
def test_the_step_after_a_failed_one_meets_nothing_of_it(schedule, num_stages, sizes, failing_stages, receive_ahead):
    """Contract 24: both ranks fail, at different places, with transfers under way; twice, then steps that are right."""
    found = run_on_ranks(2, failing_job, schedule, num_stages, receive_ahead, sizes, timeout=20.0)
    for rank, (errors, *_) in enumerate(found):
        stage = failing_stages[rank]
        for kind, _text, notes in errors:
            assert kind is ZeroDivisionError
            assert notes == [f"in 'forward stage {stage} mb{sizes.index(10 + stage)}' of the pipeline, on rank {rank}"]
    check_step([rank[1] for rank in found], num_stages, 3, 2, 4, 1)
    check_step([rank[2] for rank in found], num_stages, 2, 2)


class Wrong(Part):
    """The first stage returns what it did not announce when it gets six samples."""

    def forward(self, inputs, shared):
        outputs = super().forward(inputs, shared)
        if self.is_first and len(outputs["ids"]) == 6:
            outputs["ids"] = outputs["ids"].float()
        return outputs


def wrong_job():
    context = build_context(pp=2)
    context.failures._grace = 0.5  # for the rank that waits, in place of four seconds
    runner, modules = build_runner(context, "1f1b", 2, make=Wrong)
    with context.failures.section():
        train(runner, modules, 2, 6, 2)


def test_outputs_that_were_not_announced_end_all_ranks_with_that_error():
    """Contract 41: the other rank waits for them, and ends with this error in sight."""
    with pytest.raises(StateError) as caught:
        run_on_ranks(2, wrong_job)
    text = str(caught.value)
    assert "returned ids: float32 [6], where its stage_transfer_spec(inputs, 'outgoing') says ids: int64 [6]" in text
    assert "in 'forward stage 0 mb1' of the pipeline, on rank 0" in text


def misplaced_job():
    context = build_context(pp=2)
    runner, _ = build_runner(context, "interleaved_1f1b", 4)
    stages = list(runner._stages.values())
    return catch(lambda: type(runner)(stages[:1], context, runner._programs, context.group("regular", "pp")))


def test_stages_that_belong_elsewhere_are_refused():
    for rank, (kind, text, _) in enumerate(run_on_ranks(2, misplaced_job)):
        assert kind is ConfigurationError
        assert f"has the stages [{rank}], but the schedule has 2 ranks and puts the stages [{rank}, {rank + 2}] here" in text


def test_losses_that_an_early_stage_adds_need_a_declared_weight():
    weights = SharedWeights([None])
    assert weights.added_terms(0, []) == []
    with pytest.raises(ConfigurationError, match=r"context.add_loss\('router', ...\) .* declare it as ForwardInputs.weight"):
        weights.added_terms(0, [AddedLoss("router", torch.ones(()), 1.0)])


def filler_job():
    runner, modules = build_runner(build_context(pp=2), "1f1b", 2)
    return catch(lambda: runner.run_pack(Pack([], num_on_all=2), Fit(), {}, losses=None)), train(runner, modules, 2, 2)


def test_a_step_without_anything_to_fill_up_with_is_an_error():
    found = run_on_ranks(2, filler_job)
    assert all(kind is ConfigurationError and "Pack.filler is None" in text for (kind, text, _), _ in found)
    check_step([rank[1] for rank in found], 2, 2, 2)
