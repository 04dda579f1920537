"""Pipelines on a mesh with data ranks: FSDP stages, replicas in buckets, data ranks with unequal packs; values from one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.parallel.common import CountCollectives
from tests.pipeline.stages import Fit, Part, build_context, gradients, one_process, pack_of
from trainer_kit import ForwardInputs, Task
from trainer_kit.data import Pack
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.gradients import Gradients
from trainer_kit.parallel import FSDPSync, fsdp_units, parallelize_fsdp, parallelize_hsdp, parallelize_replicate, parallelize_tensor
from trainer_kit.parameters import ParameterTable
from trainer_kit.pipeline import LossSums, split_backward, stage
from trainer_kit.pipeline.building import ProgramCache
from trainer_kit.pipeline.runtime import PipelineRunner
from trainer_kit.pipeline.sharded_stage import ShardedStage
from trainer_kit.pipeline.stage import Stage
from trainer_kit.testing import run_on_ranks
from trainer_kit.torch_private import whole_tensor

PACKS = [  # microbatches of the two data ranks
    ((3, 2, 2, 4), (2, 2, 1, 3)),
    ((2, 2, 2, 2, 2), (3, 3)),
    ((), (2, 2, 3, 1)),
    ((2, 0, 2, 0), (2, 0, 4, 4)),
]


class Mesh:
    """A runner and gradients on a mesh of two pipeline ranks and two others. how: "pack", "nested pack", "microbatch", "hsdp pack",
    "replicate" or "tensor"."""

    def __init__(self, schedule, stages_per_rank, how, frozen=()):
        degree = {"replicate": "dp_replicate", "hsdp pack": "dp_replicate", "tensor": "tp"}.get(how, "dp_shard")
        self.context = build_context(pp=2, **{degree: 2})
        group = self.context.group("regular", "pp")
        num_stages, pack = 2 * stages_per_rank, "pack" in how
        cache = ProgramCache(schedule, 2, stages_per_rank=stages_per_rank, sharded_stages=range(num_stages) if pack else ())
        self.context.stage_layout = cache.layout
        self.modules, stages = {}, []
        for index in cache.layout.stages_of(group.rank()):
            module = Part(index, num_stages).requires_grad_(index not in frozen)
            self.distribute(module, how)
            units = fsdp_units(module)
            self.modules[index] = module
            sync = FSDPSync(units, "microbatch") if how == "microbatch" else None
            stages.append(Stage(index, module, module, sharded=ShardedStage(units) if pack else None, sync=sync))
        self.runner = PipelineRunner(stages, self.context, cache, group, first_trainable=len(frozen))
        self.rows = [row for module in self.modules.values() for row in ParameterTable([module]).trainable()]
        self.names = [f"{index}.{row.name}" for index, module in self.modules.items() for row in ParameterTable([module]).trainable()]
        self.gradients = Gradients(self.rows, context=self.context, sync=self.runner.fsdp_sync)
        self.runner.begin_microbatch = self.gradients.begin_microbatch

    def distribute(self, module, how):
        mesh = self.context.mesh_for("dense")
        if how == "replicate":
            parallelize_replicate(module, mesh["dp_replicate"])
        elif how == "tensor":
            parallelize_tensor(module, mesh["tp"], {"a": "column", "b": "row"})
        elif how == "hsdp pack":
            parallelize_hsdp(module, mesh["dp_replicate", "dp_cp_shard"])
        else:
            for unit in [module.a, module.b, module] if how in ("nested pack", "microbatch") else [module]:
                parallelize_fsdp(unit, mesh["dp_cp_shard"])

    def run(self, by_rank):
        """The mean gradients of a step, whole, by name."""
        mine, rank = by_rank[self.context.data_rank], self.context.data_rank
        pack = pack_of(*mine, first=100 * rank, num_on_all=max(map(len, by_rank)), filler=None if mine else (2, 1))
        weight = self.runner.run_pack(pack, Fit(), {}, losses=None)
        self.gradients.finish(weight)
        found = {name: whole_tensor(row.parameter.grad).clone() for name, row in zip(self.names, self.rows, strict=True)}
        self.gradients.zero()
        return found, float(weight)


def train_job(schedule, stages_per_rank, how):
    mesh = Mesh(schedule, stages_per_rank, how)
    return [mesh.run(by_rank) for by_rank in PACKS]


def expected_of(stages_per_rank, by_rank):
    runner, modules = one_process(2 * stages_per_rank)
    first, second = pack_of(*by_rank[0]), pack_of(*by_rank[1], first=100)
    weight = runner.run_pack(Pack([*first.microbatches, *second.microbatches]), Fit(), {}, losses=None)
    return gradients(modules, weight), weight


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "how"),
    [
        ("zbv", 2, "nested pack"), ("dualpipe_v", 2, "pack"), ("zb1p", 1, "hsdp pack"), ("interleaved_1f1b", 2, "microbatch"),
        ("zbv", 2, "replicate"),
    ],
)  # fmt: skip
def test_gradients_are_those_of_one_process(schedule, stages_per_rank, how):
    """Contracts 1, 3, 4, 22 and 23: FSDP stages, one unit each or one per layer, and replicas whose buckets hold several stages; data ranks
    with packs of other lengths, with none, and with microbatches of weight 0."""
    by_rank = run_on_ranks(4, train_job, schedule, stages_per_rank, how)
    for step, parts in enumerate(PACKS):
        expected, weight = expected_of(stages_per_rank, parts)
        for pipeline in ((0, 2), (1, 3)):
            found = {name: gradient for rank in pipeline for name, gradient in by_rank[rank][step][0].items()}
            assert set(found) == set(expected) and [by_rank[rank][step][1] for rank in pipeline] == [weight] * 2
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-12)


def frozen_job(schedule, how):
    mesh = Mesh(schedule, 2, how, frozen=(0, 1))
    return [mesh.run(by_rank)[0] for by_rank in PACKS[:2]]


@pytest.mark.parametrize(("schedule", "how"), [("zbv", "pack"), ("interleaved_1f1b", "microbatch")])
def test_fsdp_stages_that_are_frozen(schedule, how):
    """Contract 13: the first half of the model."""
    by_rank = run_on_ranks(4, frozen_job, schedule, how)
    for step in (0, 1):
        expected, _ = expected_of(2, PACKS[step])
        found = {name: gradient for rank in (0, 2) for name, gradient in by_rank[rank][step].items()}
        assert set(found) == {name for name in expected if name[0] in "23"}
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-11, atol=1e-12)


def evaluate_job(schedule, how):
    mesh = Mesh(schedule, 2, how)
    rank, losses = mesh.context.data_rank, LossSums()
    for _ in range(2):
        losses = LossSums()
        mesh.runner.evaluate_pack(pack_of(*(3, 2, 1)[rank:], first=100 * rank, num_on_all=3), Fit(), {}, losses)
        mesh.run(PACKS[0])
        with torch.no_grad():
            for row in mesh.rows:
                row.local.mul_(1.5)
    outputs = list(mesh.runner.predict_pack(pack_of(2), Fit()))
    return losses.sums, outputs


@pytest.mark.parametrize(("schedule", "how"), [("zbv", "pack"), ("interleaved_1f1b", "microbatch")])
def test_evaluation_and_prediction_use_the_parameters_as_they_are(schedule, how):
    """Contract 25: with FSDP stages, between steps, after updates."""
    by_rank = run_on_ranks(4, evaluate_job, schedule, how)
    runner, modules = one_process(4)
    with torch.no_grad():
        for factor in (1.5, 1.5):
            losses = LossSums()
            first, second = pack_of(3, 2, 1), pack_of(2, 1, first=100)
            runner.evaluate_pack(Pack([*first.microbatches, *second.microbatches]), Fit(), {}, losses)
            for module in modules.values():
                for parameter in module.parameters():
                    parameter.mul_(factor)
        outputs = list(runner.predict_pack(pack_of(2), Fit()))
    total = sum(rank[0][""] for rank in by_rank if rank[0])
    torch.testing.assert_close(total, losses.sums[""], rtol=1e-12, atol=0)
    assert [len(rank[1]) for rank in by_rank] == ([1, 1, 0, 0] if schedule == "zbv" else [0, 0, 1, 1])
    torch.testing.assert_close(next(rank[1] for rank in by_rank if rank[1]), outputs, rtol=1e-12, atol=0)


def tensor_job(schedule):
    mesh = Mesh(schedule, 2, "tensor")
    return [mesh.run((sizes,)) for sizes in ((3, 2, 2, 4), (2, 0, 2, 2))]


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_1f1b"])
def test_tensor_parallel_stages(schedule):
    """Contracts 1 and 23: DTensors in stages, whose backwards contain collectives; tensor peers count once."""
    by_rank = run_on_ranks(4, tensor_job, schedule)
    for step, sizes in enumerate([(3, 2, 2, 4), (2, 0, 2, 2)]):
        expected, weight = expected_of(2, (sizes, ()))
        for pipeline in ((0, 2), (1, 3)):
            found = {name: gradient for rank in pipeline for name, gradient in by_rank[rank][step][0].items()}
            assert [by_rank[rank][step][1] for rank in pipeline] == [weight] * 2
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-12)


def calls_job(schedule, stages_per_rank):
    mesh = Mesh(schedule, stages_per_rank, "pack")
    mesh.run(PACKS[0])
    with CountCollectives() as collectives, count_flops() as flops:
        mesh.runner.run_pack(pack_of(2, 2, 2), Fit(), {}, losses=None)
    return collectives.calls, flops


class count_flops:
    """Matrix products of each part of a backward."""

    def __enter__(self):
        self.found = {"inputs": 0, "weights": 0, "whole": 0}
        self.before = split_backward.SplitBackward.of_inputs, split_backward.SplitBackward.of_weights, stage.run_backward
        split_backward.SplitBackward.of_inputs = self.counting("inputs", self.before[0])
        split_backward.SplitBackward.of_weights = self.counting("weights", self.before[1])
        stage.run_backward = self.counting("whole", self.before[2])
        return self.found

    def counting(self, name, function):
        def count(*args):
            with FlopCounterMode(display=False) as counter:
                result = function(*args)
            self.found[name] += counter.get_total_flops()
            return result

        return count

    def __exit__(self, *_):
        split_backward.SplitBackward.of_inputs, split_backward.SplitBackward.of_weights, stage.run_backward = self.before


def test_fsdp_stages_gather_and_reduce_once_and_the_split_is_real():
    """Contracts 23 and 44b: one all-gather and one reduce-scatter per unit and pack; products of both parts add up to one backward."""
    split, whole = (run_on_ranks(4, calls_job, schedule, 2) for schedule in ("zb1p", "interleaved_1f1b"))
    for (calls, flops), (other_calls, other_flops) in zip(split, whole, strict=True):
        assert calls["all_gather"] == other_calls["all_gather"] == 2
        assert calls["reduce_scatter"] == other_calls["reduce_scatter"] == 2
        assert flops["inputs"] + flops["weights"] + flops["whole"] == other_flops["whole"] > 0
    # Stages 1 to 3 split in the middle; the first one has no inputs to go back to, so all of it is in the part of the weights.
    assert split[3][1]["inputs"] == split[3][1]["weights"] > 0
    assert split[0][1]["inputs"] * 5 == split[0][1]["weights"] * 2, "stage 2 as well as three quarters of stage 0"


class Narrow(nn.Module):
    """Computes in bf16, where 256 and 1 are 256."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, inputs, shared):
        return (inputs * self.w).float()

    def stage_transfer_spec(self, inputs, boundary):
        return torch.empty(inputs.shape, device="meta")


class Sum(Task):
    def build_forward_inputs(self, batch):
        return ForwardInputs(inputs=torch.full((1, 4), batch), weight=1)

    def compute_loss(self, pipeline_results, state):
        return pipeline_results.sum()


def narrow_job(policy_reduces):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    context = build_context(pp=2, dp_shard=2)
    group = context.group("regular", "pp")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32 if policy_reduces else None)
    cache = ProgramCache("zb1p", 2, sharded_stages=(0, 1))
    module = Narrow() if policy_reduces else Narrow().bfloat16()
    parallelize_fsdp(module, context.mesh_for("dense")["dp_cp_shard"], policy=policy)
    runner = PipelineRunner([Stage(group.rank(), module, module, sharded=ShardedStage(fsdp_units(module)))], context, cache, group)
    gradients = Gradients(ParameterTable([module]).trainable(), context=context, sync=runner.fsdp_sync, grad_dtype=torch.float32)
    runner.begin_microbatch = gradients.begin_microbatch
    weight = runner.run_pack(Pack([1.0, 256.0, 1.0], num_on_all=3), Sum(), {}, losses=None)
    gradients.finish(1 if weight else 0)
    return whole_tensor(module.w.grad)


@pytest.mark.parametrize("policy_reduces", [True, False])
def test_gradients_are_collected_in_the_dtype_of_the_reduction(policy_reduces):
    """Contract 5: computed in bf16, summed over the microbatches in fp32, which FSDP itself does not see to in a backward of weights."""
    for gradient in run_on_ranks(4, narrow_job, policy_reduces):
        assert gradient.dtype == torch.float32 and gradient.tolist() == [2 * 258.0] * 4


def abandon_job(how):
    """Every rank fails, in a late forward on the first rank of a pipeline; the next step is as if nothing had been."""
    mesh = Mesh("zb1p" if how == "pack" else "interleaved_1f1b", 2, how)
    left = [None] * (3 if 0 in mesh.modules else 2)

    def fail(*_):
        left.pop()
        if not left:
            raise ZeroDivisionError

    handles = [module.register_forward_hook(fail) for module in mesh.modules.values()]
    with pytest.raises(ZeroDivisionError):
        mesh.run(PACKS[0])
    mesh.gradients.zero()
    for handle in handles:
        handle.remove()
    return [mesh.run(by_rank) for by_rank in PACKS[:2]]


@pytest.mark.parametrize("how", ["pack", "microbatch", "replicate"])
def test_a_step_that_failed_leaves_nothing_in_fsdp_units_and_buckets(how):
    """Contract 24."""
    by_rank = run_on_ranks(4, abandon_job, how, timeout=20.0)
    for step in (0, 1):
        expected, _ = expected_of(2, PACKS[step])
        for name, gradient in {**by_rank[0][step][0], **by_rank[2][step][0]}.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-11, atol=1e-12)


def refused_job():
    with pytest.raises(ConfigurationError, match="set fsdp_sync='pack' of MeshStrategy") as caught:
        Mesh("zb1p", 2, "microbatch")
    return str(caught.value)


def test_a_schedule_that_splits_needs_one_reduction_per_pack():
    """Contract 23."""
    assert all("'zb1p' computes gradients of weights apart" in text for text in run_on_ranks(4, refused_job))
