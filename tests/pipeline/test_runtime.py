"""Packs through the stages of a pipeline on gloo ranks, against the same model on one process, in fp64."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.pipeline.stages import WIDTH, Fit, Part, build_context, build_runner, gradients, one_process, pack_of
from trainer_kit.metrics import Mean
from trainer_kit.pipeline import LossSums
from trainer_kit.pipeline.actions import Kind
from trainer_kit.pipeline.building import ProgramCache
from trainer_kit.random_state import capture
from trainer_kit.testing import run_on_ranks

PACKS = [(3,), (2, 3, 4), (2, 2, 5, 3), (1, 2, 3, 4, 5), (2, 0, 3, 2, 2, 2, 2, 1), (3,) * 9, (4,)]
ALL = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 3), ("looped_bfs", 2), ("zb1p", 2), ("zbv", 2), ("dualpipe_v", 2)]
EACH_SHAPE = [("1f1b", 1), ("zb1p", 2), ("zbv", 2)]


def packs_for(schedule, num_ranks):
    return [sizes for sizes in PACKS if schedule != "dualpipe_v" or len(sizes) >= 2 * num_ranks]


def train_job(num_ranks, schedule, stages_per_rank, packs, weigh="declared", **options):
    runner, modules = build_runner(build_context(pp=num_ranks), schedule, num_ranks * stages_per_rank, **options)
    found = []
    for sizes in packs:
        told, losses = [], LossSums()
        weight = runner.run_pack(
            pack_of(*sizes),
            Fit(weigh),
            {},
            losses=losses,
            on_microbatch=lambda *given, told=told: told.append((given[0], given[1] is None)),
        )
        found.append((gradients(modules, weight), weight, told, losses.values("train"), runner.peak_activations))
    return found


def with_options(num_ranks, schedule, stages_per_rank, packs, options):
    return train_job(num_ranks, schedule, stages_per_rank, packs, **options)


def check_training(num_ranks, schedule, stages_per_rank, packs, *, timeout=60.0, **options):
    """Run it on ranks and on one process. Returns what the ranks found."""
    by_rank = run_on_ranks(num_ranks, with_options, num_ranks, schedule, stages_per_rank, packs, options, timeout=timeout)
    runner, modules = one_process(num_ranks * stages_per_rank, frozen=options.get("frozen", ()), make=options.get("make", Part))
    for step, sizes in enumerate(packs):
        losses, task = LossSums(), Fit(options.get("weigh", "declared"))
        weight = runner.run_pack(pack_of(*sizes), task, {}, losses=losses)
        expected = gradients(modules, weight)
        found = {name: gradient for rank in by_rank for name, gradient in rank[step][0].items()}
        assert set(found) == set(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")
        assert [rank[step][1] for rank in by_rank] == [weight] * num_ranks
        (told,) = [rank[step][2] for rank in by_rank if rank[step][2]]
        assert [index for index, _ in sorted(told)] == list(range(len(sizes)))
        assert [has_none for _, has_none in sorted(told)] == [size == 0 and options.get("weigh") != "terms" for size in sizes]
        (values,) = [rank[step][3] for rank in by_rank if rank[step][3]]
        torch.testing.assert_close(values, losses.values("train"), rtol=1e-12, atol=0)
    return by_rank


@pytest.mark.parametrize(("schedule", "stages_per_rank"), ALL)
def test_gradients_are_those_of_one_process(schedule, stages_per_rank):
    """Contracts 1, 2, 20 and 22, B116, B117: one to nine microbatches of changing shapes and weights, one of weight 0; several tensors
    between stages, some without a gradient. And the peak of live activations is the one that the schedule promises."""
    packs = packs_for(schedule, 2)
    by_rank = check_training(2, schedule, stages_per_rank, packs)
    for rank in (0, 1):
        assert [step[4] for step in by_rank[rank]] == peaks(schedule, stages_per_rank, 2, rank, packs)


def peaks(schedule, stages_per_rank, num_ranks, rank, packs):
    cache = ProgramCache(schedule, num_ranks, stages_per_rank=stages_per_rank)
    return [cache.schedule.peak_activations(cache.layout, len(sizes), rank) for sizes in packs]


@pytest.mark.parametrize(("schedule", "stages_per_rank", "ahead"), [("interleaved_1f1b", 2, 1), ("zbv", 2, 0), ("dualpipe_v", 2, 1)])
def test_on_four_ranks(schedule, stages_per_rank, ahead):
    """Contract 22, B117: with receives posted earlier than needed too."""
    check_training(4, schedule, stages_per_rank, [(2, 3, 1, 2, 4, 2, 2, 3), (1,) * 9], receive_ahead=ahead)


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("zbv", 2)])
@pytest.mark.parametrize("weigh", ["returned", "tensor", "terms", "none"])
def test_weights_that_come_in_any_way_reach_every_rank(schedule, stages_per_rank, weigh):
    """Contract 1, decision 3: known before the forward or only where the last stage is."""
    check_training(2, schedule, stages_per_rank, [(2, 2, 2), (3, 3, 3, 3)] if weigh == "none" else PACKS[:3], weigh=weigh)


@pytest.mark.parametrize(("schedule", "stages_per_rank"), EACH_SHAPE)
def test_parts_may_be_frozen(schedule, stages_per_rank):
    """Contracts 13 and 22: single parameters, and a whole stage in the middle or at the end."""
    last = 2 * stages_per_rank - 1
    check_training(2, schedule, stages_per_rank, PACKS[:3], frozen=((0, "a.weight"), (1, "w"), last))


@pytest.mark.parametrize(("schedule", "stages_per_rank", "frozen"), [("1f1b", 1, (0,)), ("zb1p", 2, (0, 1)), ("zbv", 2, (0, 1, 2))])
def test_no_gradient_goes_to_frozen_first_stages(schedule, stages_per_rank, frozen):
    check_training(2, schedule, stages_per_rank, PACKS[:3], frozen=frozen, first_trainable=len(frozen))
    for record in run_on_ranks(2, transfers_job, schedule, 2 * stages_per_rank, len(frozen)):
        gradients_to = {transfer.message.stage for transfer in record.transfers if transfer.message.is_gradient}
        assert gradients_to <= set(range(len(frozen), 2 * stages_per_rank))


def transfers_job(schedule, num_stages, first_trainable):
    runner, _ = build_runner(build_context(pp=2), schedule, num_stages, first_trainable=first_trainable, frozen=range(first_trainable))
    runner.run_pack(pack_of(2, 2, 2, 2), Fit(), {}, losses=None)
    return runner._transport.record


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("zb1p", 1), ("dualpipe_v", 2)])
def test_a_stage_that_does_not_split_runs_its_whole_backward_at_once(schedule, stages_per_rank):
    """Contract 23: as with activation checkpointing, which would compute the activations again in both parts."""
    check_training(2, schedule, stages_per_rank, packs_for(schedule, 2)[:2], splits=False, make=Checkpointed)
    check_training(2, schedule, stages_per_rank, packs_for(schedule, 2)[:2], make=Checkpointed)
    counts = {splits: run_on_ranks(2, recompute_job, schedule, 2 * stages_per_rank, splits) for splits in (False, True)}
    assert counts[False] == [[2 * 4] * stages_per_rank] * 2, "once forwards, once backwards"
    assert all(count >= 2 * 4 for rank in counts[True] for count in rank)


class Checkpointed(Part):
    """Counts how often it computes."""

    count = 0

    def forward(self, inputs, shared):
        return checkpoint(self.counted, inputs, shared, use_reentrant=False)

    def counted(self, inputs, shared):
        self.count += 1
        return super().forward(inputs, shared)


def recompute_job(schedule, num_stages, splits):
    runner, modules = build_runner(build_context(pp=2), schedule, num_stages, splits=splits, make=Checkpointed)
    runner.run_pack(pack_of(2, 2, 2, 2), Fit(), {}, losses=None)
    return [module.count for module in modules.values()]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_packs_add_up_without_being_scaled(schedule):
    """B115: two packs of four microbatches before an update are one of eight."""
    stages_per_rank = 2 if schedule == "zbv" else 1
    sizes = (2, 1, 3, 2, 2, 4, 1, 3)
    by_rank = run_on_ranks(2, accumulate_job, schedule, 2 * stages_per_rank, sizes)
    runner, modules = one_process(2 * stages_per_rank)
    runner.run_pack(pack_of(*sizes), Fit(), {}, losses=None)
    for name, gradient in gradients(modules, 1).items():
        torch.testing.assert_close({**by_rank[0], **by_rank[1]}[name], gradient, rtol=1e-11, atol=1e-13)


def accumulate_job(schedule, num_stages, sizes):
    runner, modules = build_runner(build_context(pp=2), schedule, num_stages)
    for first in (0, 4):
        runner.run_pack(pack_of(*sizes[first : first + 4], first=first), Fit(), {}, losses=None)
    return gradients(modules, 1)


class Watched(Part):
    """Says which of the activations of its microbatches are alive, by what one node of each graph saves."""

    def __init__(self, index, num_stages):
        super().__init__(index, num_stages)
        self.tokens = []

    def forward(self, inputs, shared):
        token = Token()
        self.tokens.append(weakref.ref(token))
        return super().forward(inputs, {"bias": Saves.apply(self.w[0] * 0 + shared["bias"], token)})

    def num_alive(self):
        return sum(token() is not None for token in self.tokens)


class Token:
    pass


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [*EACH_SHAPE, ("interleaved_1f1b", 2), ("dualpipe_v", 2)])
def test_activations_are_freed_as_soon_as_they_are_used_up(schedule, stages_per_rank):
    """As many graphs are alive at a time as the schedule says, and none after the pack."""
    by_rank = run_on_ranks(2, alive_job, schedule, 2 * stages_per_rank)
    for rank in (0, 1):
        peak, after = by_rank[rank]
        assert [peak] == peaks(schedule, stages_per_rank, 2, rank, [(2,) * 8]) and after == 0


def alive_job(schedule, num_stages):
    runner, modules = build_runner(build_context(pp=2), schedule, num_stages, make=Watched)
    seen = []
    for module in modules.values():
        module.register_forward_hook(lambda *_: seen.append(sum(each.num_alive() for each in modules.values())))
    gc.collect()
    gc.disable()
    try:
        runner.run_pack(pack_of(*(2,) * 8), Fit(), {}, losses=None)
        return max(seen), sum(each.num_alive() for each in modules.values())
    finally:
        gc.enable()


class Noisy(Part):
    """Draws numbers, counts its forwards in a buffer, and keeps statistics of batches, whose backward looks at these buffers."""

    def __init__(self, index, num_stages):
        super().__init__(index, num_stages)
        self.register_buffer("count", torch.zeros(()))
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def forward(self, inputs, shared):
        self.count += 1
        key = "x" if self.is_first else "hidden"
        return super().forward(inputs | {key: self.norm(inputs[key])}, {"bias": shared["bias"] + torch.rand(())})


def filler_job(schedule, num_stages, sizes, num_on_all):
    context = build_context(pp=2)
    runner, modules = build_runner(context, schedule, num_stages, make=Noisy)
    torch.manual_seed(7 + context.rank)
    task, told = Fit(), []
    pack = pack_of(*sizes, num_on_all=num_on_all, filler=(3, 1))
    weight = runner.run_pack(pack, task, {}, losses=None, on_microbatch=lambda *given: told.append(given))
    buffers = [buffer.clone() for module in modules.values() for buffer in module.buffers()]
    return gradients(modules, weight or 1), buffers, capture(context.device)["torch"], len(told), len(task.losses)


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("zbv", 2)])
@pytest.mark.parametrize("sizes", [(2, 3), (2, 0, 3), ()])
def test_what_fills_up_leaves_no_trace(schedule, stages_per_rank, sizes):
    """Decision 5: it adds zeros, reaches neither loss nor listeners, and leaves buffers and random streams."""
    counting = tuple(size for size in sizes if size)
    filled = run_on_ranks(2, filler_job, schedule, 2 * stages_per_rank, sizes, 5)
    plain = run_on_ranks(2, filler_job, schedule, 2 * stages_per_rank, counting, None)
    for mine, other in zip(filled, plain, strict=True):
        if not sizes:
            assert not any(gradient.any() for gradient in mine[0].values())
        elif sizes == counting:  # else the seeds of the samples are others
            torch.testing.assert_close(mine[0], other[0], rtol=1e-12, atol=0)
        assert torch.equal(mine[2], other[2]) and mine[4] == other[4]
        if sizes in ((), counting):
            assert all(torch.equal(one, two) for one, two in zip(mine[1], other[1], strict=True))
        assert mine[3] in (0, len(sizes))


def inference_job(schedule, num_stages, sizes):
    runner, _ = build_runner(build_context(pp=2), schedule, num_stages)
    task, metrics, losses = Scored("terms"), {"rows": Mean()}, LossSums()
    runner.evaluate_pack(pack_of(*sizes, num_on_all=len(sizes) + 1), task, metrics, losses)
    outputs = list(runner.predict_pack(pack_of(*sizes), task))
    assert not any(output.requires_grad for output in outputs)
    runner.run_pack(pack_of(2, 2, 2, 2), Fit(), {}, losses=None)
    return losses.values("val"), float(metrics["rows"].compute()), outputs


class Scored(Fit):
    def update_metrics(self, metrics, pipeline_results, state):
        metrics["rows"].update(torch.tensor(float(len(pipeline_results))))


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2), ("dualpipe_v", 2)])
def test_evaluation_and_prediction_run_on_the_layout_that_trains(schedule, stages_per_rank):
    """Contract 25: V-shaped layouts too, one microbatch, more than the schedule of training needs."""
    for sizes in [(3,), (2, 4, 1, 2, 3)]:
        found = run_on_ranks(2, inference_job, schedule, 2 * stages_per_rank, sizes)
        runner, _ = one_process(2 * stages_per_rank)
        task, metrics, losses = Scored("terms"), {"rows": Mean()}, LossSums()
        with torch.no_grad():
            runner.evaluate_pack(pack_of(*sizes), task, metrics, losses)
            outputs = list(runner.predict_pack(pack_of(*sizes), task))
        (mine,) = [rank for rank in found if rank[2]]
        torch.testing.assert_close(mine[0], losses.values("val"), rtol=1e-12, atol=0)
        assert mine[1] == float(metrics["rows"].compute())
        torch.testing.assert_close(mine[2], outputs, rtol=1e-12, atol=0)


class Adding(Part):
    """Every stage adds a loss."""

    context = None

    def forward(self, inputs, shared):
        hidden = inputs["x"] if self.is_first else inputs["hidden"]
        self.context.add_loss("extra", (hidden @ self.w).square().mean(), 0.5)
        return super().forward(inputs, shared)


def added_job(schedule, num_stages, weigh):
    context = build_context(pp=2)
    runner, modules = build_runner(context, schedule, num_stages, make=Adding)
    for module in modules.values():
        module.context = context
    losses = LossSums()
    weight = runner.run_pack(pack_of(2, 3, 0, 1), Fit(weigh), {}, losses=losses)
    return gradients(modules, weight), losses.sums.get("extra", 0.0), losses.weights.get("extra", 0)


@pytest.mark.parametrize("weigh", ["declared", "terms"])
def test_any_stage_adds_losses(weigh):
    """Router losses: they count with the weight of the microbatch wherever they are added."""
    by_rank = run_on_ranks(2, added_job, "zbv", 4, weigh)
    runner, modules = one_process(4, make=Adding)
    for module in modules.values():
        module.context = runner._context
    losses = LossSums()
    weight = runner.run_pack(pack_of(2, 3, 0, 1), Fit(weigh), {}, losses=losses)
    for name, gradient in gradients(modules, weight).items():
        torch.testing.assert_close({**by_rank[0][0], **by_rank[1][0]}[name], gradient, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(by_rank[0][1] + by_rank[1][1], losses.sums["extra"], rtol=1e-12, atol=0)


def sync_job(schedule, num_stages):
    context = build_context(pp=2)
    calls = []
    runner, modules = build_runner(context, schedule, num_stages, begin_microbatch=calls.append)
    for index, module in modules.items():
        module.w.register_post_accumulate_grad_hook(lambda _, index=index: calls.append(index))
    for sizes in [(2, 2, 2, 2), (2, 2, 2, 2, 2)]:
        runner.run_pack(pack_of(*sizes), Fit(), {}, losses=None)
    return calls


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb1p", 2), ("dualpipe_v", 2)])
def test_the_last_gradient_of_each_stage_is_announced(schedule, stages_per_rank):
    """Contract 4: buckets count what comes between True and False, which is the last gradient of one stage."""
    for calls in run_on_ranks(2, sync_job, schedule, 2 * stages_per_rank):
        for num in (4, 5):
            seen = {}
            assert calls.pop(0) is False
            while len(seen) < stages_per_rank or any(count < num for count in seen.values()):
                call = calls.pop(0)
                if call is True:
                    stage = calls.pop(0)
                    assert seen.get(stage, 0) == num - 1 and calls.pop(0) is False
                else:
                    stage = call
                    assert seen.get(stage, 0) < num - 1
                seen[stage] = seen.get(stage, 0) + 1
        assert calls == []


def timeline_job():
    runner, _ = build_runner(build_context(pp=2), "zbv", 4, record=True)
    runner.run_pack(pack_of(2, 2, 2), Fit(), {}, losses=None)
    return runner.timeline(), runner._programs.training(3)


def test_the_times_of_all_ranks_are_recorded():
    for timeline, program in run_on_ranks(2, timeline_job):
        for rank in (0, 1):
            computed = [action for action in program.actions(rank) if action.kind.is_compute]
            assert [span.action for span in timeline.by_rank[rank]] == computed
            spans = timeline.by_rank[rank]
            assert all(a.end <= b.start for a, b in pairwise(spans)) and all(span.start < span.end for span in spans)
        ends = {(span.action.kind, span.action.stage, span.action.microbatch): span for span in timeline.spans}
        for (kind, stage, microbatch), span in ends.items():
            if kind == Kind.FORWARD and stage:
                assert ends[kind, stage - 1, microbatch].end <= span.start, "clocks agree"
