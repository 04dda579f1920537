"""Lockstep: forwards that contain collectives, on ranks with different numbers of microbatches. FSDP by torch, values from one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_kit import AutoDataProvider, ForwardInputs, Loss, MeshStrategy, Task
from trainer_kit.data import DataProvider, DataStream, Pack
from trainer_kit.exceptions import ConfigurationError, ModelError
from trainer_kit.mesh.context import AddedLoss
from trainer_kit.metrics import Mean
from trainer_kit.pipeline import LossSums, SequentialRunner
from trainer_kit.pipeline.zero_pass import ends_of, not_reached
from trainer_kit.random_state import capture
from trainer_kit.testing import run_on_ranks


class Net(nn.Module):
    """Two outputs, and a part that only adds a loss; counts its calls in a buffer that it changes, one that it replaces, and batch
    statistics. `noise` draws numbers."""

    context = None

    def __init__(self, noise=0.0):
        super().__init__()
        self.body, self.main, self.aux, self.extra = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 2), nn.Linear(4, 1)
        self.norm, self.noise = nn.BatchNorm1d(4, affine=False), nn.Dropout(noise)
        self.register_buffer("changed", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x):
        self.changed += 1
        self.replaced = self.replaced + 1
        hidden = torch.tanh(self.body(self.noise(x)))
        if self.training:
            self.norm(hidden.detach())
        if self.context is not None:
            self.context.add_loss("extra", self.extra(hidden).square().mean(), 0.5)
        return {"main": self.main(hidden), "aux": self.aux(hidden), "text": "x"}

    def buffers_by_name(self):
        return {name: buffer.tolist() for name, buffer in self.named_buffers()}


class Fit(Task):
    """A batch is (x, how many of its rows count); the loss is a mean over those. `weigh`: "declared", "returned", or "terms", with an
    auxiliary term for each number of rows, which is nan and does not count where there are only two."""

    def __init__(self, weigh="declared"):
        self.weigh, self.calls, self.updates = weigh, [], 0

    def build_forward_inputs(self, batch):
        x, count = batch
        weight = {"declared": count, "terms": {"main": count, f"aux{len(x)}": len(x) if len(x) > 2 else 0}}.get(self.weigh)
        return ForwardInputs(inputs=x, state=batch, weight=weight)

    def compute_loss(self, pipeline_results, state):
        x, count = state
        self.calls.append(len(x))
        main = pipeline_results["main"][:count].square().mean()
        if self.weigh == "returned":
            return Loss(main, count)
        aux = pipeline_results["aux"].square().mean()
        return main if self.weigh == "declared" else {"main": main, f"aux{len(x)}": aux if len(x) > 2 else aux * float("nan")}

    def metrics(self):
        return {"rows": Mean()}

    def update_metrics(self, metrics, pipeline_results, state):
        self.updates += 1

    def process_outputs(self, pipeline_results, state):
        return pipeline_results["main"]


def make_model(noise=0.0):
    torch.manual_seed(0)
    return Net(noise).double()


def rows(first, count, counting=None):
    x = torch.sin(torch.arange(first, first + 3 * count, dtype=torch.float64)).reshape(count, 3)
    return x, count if counting is None else counting


def shard(model, context):
    """FSDP on every layer, reduced by sum."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = context.mesh_for("dense")["dp_cp_shard"]
    for layer in (model.body, model.main, model.aux, model.extra, model):
        fully_shard(layer, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def gradients(model, weight):
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name] = None if gradient is None else (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient) / weight
    return found


PARTS = [  # microbatches of rank 0 and rank 1: unequal numbers, one that does not count, none at all
    ([rows(0, 3), rows(9, 2), rows(15, 3)], [rows(40, 2)]),
    ([rows(0, 3), rows(9, 2, 0)], [rows(40, 2, 0), rows(60, 4)]),
    ([], [rows(40, 2), rows(60, 5)]),
    ([rows(0, 2, 0)], [rows(40, 4)]),
]
FILLER = rows(90, 2)


def train_job(weigh):
    context = MeshStrategy(dp_shard=2).build()
    model = shard(make_model(), context)
    model.context = context
    runs, found = [], []
    runner = SequentialRunner(
        lambda inputs, shared: model(inputs), context, lockstep=True, begin_microbatch=runs.append, modules=[model]
    )
    for parts in PARTS:
        task, mine, events = Fit(weigh), parts[context.data_rank], []
        pack = Pack(mine, num_on_all=max(map(len, parts)), filler=None if mine else FILLER)

        def listen(index, loss, events=events):
            events.append((index, loss is None))

        weight = runner.run_pack(pack, task, task.metrics(), losses=None, on_microbatch=listen)
        found.append((gradients(model, weight), weight, task.calls, task.updates, events, runs[:]))
        model.zero_grad()
        runs.clear()
    return found


@pytest.mark.parametrize("weigh", ["declared", "returned", "terms"])
def test_gradients_are_those_of_one_process_whatever_a_rank_has(weigh):
    """Contracts 1 and 2, B07, decision 5: FSDP with fillers, microbatches of weight 0, and a term that does not count and is nan."""
    by_rank = run_on_ranks(2, train_job, weigh)
    for step, parts in enumerate(PARTS):
        model = make_model()
        model.context = MeshStrategy(device="cpu").build()
        runner = SequentialRunner(lambda inputs, shared, model=model: model(inputs), model.context)
        weight = runner.run_pack(Pack([*parts[0], *parts[1]]), Fit(weigh), {}, losses=None)
        expected = gradients(model, weight)
        for rank in (0, 1):
            found, total, calls, updates, events, runs = by_rank[rank][step]
            assert total == weight
            for name, gradient in expected.items():
                other = torch.zeros_like(found[name]) if gradient is None else gradient
                torch.testing.assert_close(found[name], other, rtol=1e-9, atol=1e-12)
            nothing = [c == 0 and weigh == "declared" for _, c in parts[rank]]
            if weigh == "terms":
                nothing = [c == 0 and len(x) <= 2 for x, c in parts[rank]]
            assert calls == [len(x) for (x, _), skip in zip(parts[rank], nothing, strict=True) if not skip] and updates == len(calls)
            assert events == list(enumerate(nothing)), "told of microbatches, not of fillers"
            assert runs == [False] * (max(map(len, parts)) - 1) + [True]


def test_ends_of_a_graph_that_no_loss_was_made_from_are_found():
    w = torch.ones(3, requires_grad=True)
    deep = w * 2
    first, second = deep.exp().split([1, 2])
    logits, unused = deep.sum().reshape(1), deep.mean()
    outputs = {"a": logits, "b": [unused, first, second], "text": "x", "ids": torch.arange(2), "whole": w, "constant": torch.ones(1)}
    ends = ends_of(outputs, [AddedLoss("extra", deep.sum(), 1.0)])
    assert len(ends) == 6

    def missing(*losses):
        return [next(i for i, end in enumerate(ends) if end is found) for found in not_reached(losses, ends)]

    assert missing() == [0, 1, 2, 3, 4, 5]
    assert missing(logits.square().sum()) == [1, 2, 3, 4, 5], "nothing is looked at behind an end"
    assert missing((logits + second).sum(), ends[5]) == [1, 2, 4], "the parts of a split are told apart"
    assert missing((logits * unused * first.sum() * second.sum() * ends[5] * w).sum()) == []
    assert not_reached([logits.sum()], []) == []


def trace_job(training):
    context = MeshStrategy(dp_shard=2).build()
    model = shard(make_model(0.5), context).train(training)
    runner = SequentialRunner(lambda inputs, shared: model(inputs), context, lockstep=True, modules=[model])
    torch.manual_seed(5)
    found = []
    for mine in [[rows(0, 3)], [rows(0, 2), rows(9, 2), rows(15, 2)]][context.rank], []:
        before = capture(context.device)["torch"], model.buffers_by_name(), model.changed, model.replaced
        pack = Pack(mine, num_on_all=3, filler=FILLER)
        task, losses = Fit(), LossSums()
        if training:
            runner.run_pack(pack, task, {}, losses=losses)
        else:
            with torch.no_grad():
                runner.evaluate_pack(pack, task, task.metrics(), losses)
                outputs = list(runner.predict_pack(pack, task))
                assert [len(o) for o in outputs] == [len(x) for x, _ in mine]
        same = torch.equal(before[0], capture(context.device)["torch"]), before[1] == model.buffers_by_name(), before[2] is model.changed
        found.append((same, model.changed.item(), model.replaced.item(), losses.weights, len(task.calls)))
    reference = make_model(0.5).train(training)
    torch.manual_seed(5)
    for x, _ in [[rows(0, 3)], [rows(0, 2), rows(9, 2), rows(15, 2)]][context.rank] * (1 if training else 2):
        with torch.no_grad():
            reference(x)
    assert torch.equal(capture(context.device)["torch"], torch.get_rng_state())
    return found, model.buffers_by_name() == reference.buffers_by_name(), model.norm.running_mean, reference.norm.running_mean


@pytest.mark.parametrize("training", [True, False])
def test_fillers_leave_no_trace(training):
    """Decision 5: random state, changed and replaced buffers, batch statistics, losses and metrics are as if fillers had not run."""
    for rank, (found, same_buffers, mean, expected) in enumerate(run_on_ranks(2, trace_job, training)):
        own = 3 if rank else 1
        (_, changed, replaced, weights, calls), (same, still, again, none, no_calls) = found
        passes = own if training else 2 * own
        assert (changed, replaced, calls) == (passes, passes, own) and weights == {"": 6 if rank else 3}
        assert same == (True, True, True) and (still, again, none, no_calls) == (passes, passes, {}, 0)
        torch.testing.assert_close(mean, expected)
        assert same_buffers


def without_lockstep_job():
    context = MeshStrategy().build()
    model, runs = make_model(), []
    runner = SequentialRunner(lambda inputs, shared: model(inputs), context, begin_microbatch=runs.append, modules=[model])
    for parts in PARTS:
        mine = parts[context.data_rank]
        runner.run_pack(Pack(mine, num_on_all=3, filler=None if mine else FILLER), Fit(), {}, losses=None)
        runs.append(int(model.changed))
    return runs


def test_without_lockstep_nothing_is_filled_up_but_the_last_one_is_told():
    """Contract 4: reductions start at the last microbatch of each rank, and a rank that runs none still tells of the end of its pack."""
    first, second = run_on_ranks(2, without_lockstep_job)
    assert first == [False, False, True, 3, True, 4, True, 4, True, 4]
    assert second == [True, 1, True, 2, False, True, 4, True, 5]


class Opaque:
    """An output that nobody can look into."""

    def __init__(self, tensor):
        self.tensor = tensor


class Unseen(Fit):
    def compute_loss(self, pipeline_results, state):
        return pipeline_results.tensor.sum()


def refusals_job():
    context = MeshStrategy().build()
    model, said = make_model(), []
    opaque = SequentialRunner(lambda inputs, shared: Opaque(model(inputs)["main"]), context, lockstep=True)
    plain = SequentialRunner(lambda inputs, shared: model(inputs), context, lockstep=True)
    for runner, task, pack in (
        (opaque, Unseen(), Pack([rows(0, 2)], num_on_all=2)),
        (plain, Fit(), Pack([], num_on_all=1)),
    ):
        try:
            runner.run_pack(pack, task, {}, losses=None)
        except (ModelError, ConfigurationError) as error:
            said.append(str(error))
    return said


def test_what_cannot_be_filled_up_says_why():
    for opaque, empty in run_on_ranks(2, refusals_job):
        assert "no tensor with a graph" in opaque and "dataclass" in opaque
        assert "Pack.filler is None" in empty


class Uneven(DataProvider):
    """Rank 0 has 3 packs of one sample, rank 1 has one of two microbatches."""

    def setup(self, context, seed):
        self.rank = context.data_rank

    def packs(self, position):
        yield from [[rows(40, 2), rows(60, 4)]] if self.rank else [[rows(9 * i, 3)] for i in range(3)]


def evaluate_job(custom):
    context = MeshStrategy(dp_shard=2).build()
    model = shard(make_model(), context).eval()
    runner = SequentialRunner(lambda inputs, shared: model(inputs), context, lockstep=True, modules=[model])
    data = Uneven() if custom else AutoDataProvider([rows(3 * i, 1)[0][0] for i in range(5)], 4, 1, collate_fn=with_count)
    data.setup(context, 0)
    losses, outputs, task = LossSums(), [], Fit()
    with torch.no_grad():
        for each in ("evaluate", "predict"):
            stream = DataStream(data, context.device, seed=0, prefetch_packs=0, max_epochs=1, context=context, fill_up=True)
            for pack in iter(stream.next, None):
                if each == "evaluate":
                    runner.evaluate_pack(pack, task, {}, losses)
                else:
                    outputs += [output.tolist() for output in runner.predict_pack(pack, task)]
    return {name: (float(losses.sums[name]), losses.weights[name]) for name in losses.sums}, outputs


def with_count(samples):
    return torch.stack(samples), len(samples)


@pytest.mark.parametrize("custom", [False, True])
def test_evaluation_and_prediction_see_every_sample_once(custom):
    """Contracts 2 and 25: the sums of the ranks add up to those of one process; only real microbatches have outputs, in order."""
    (sums, outputs), (others, more) = run_on_ranks(2, evaluate_job, custom)
    model, expected, total = make_model().eval(), [], 0.0
    parts = [[rows(0, 1), rows(3, 1)], [rows(6, 1), rows(9, 1), rows(12, 1)]]
    if custom:
        parts = [[rows(9 * i, 3) for i in range(3)], [rows(40, 2), rows(60, 4)]]
    with torch.no_grad():
        for x, count in parts[0] + parts[1]:
            expected.append(model(x)["main"])
            total += count * float(expected[-1].square().mean())
    assert sums[""][0] + others[""][0] == pytest.approx(total, rel=1e-9)
    assert sums[""][1] + others[""][1] == sum(count for part in parts for _, count in part)
    assert [len(outputs), len(more)] == [len(part) for part in parts]
    for found, right in zip(outputs + more, expected, strict=True):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), right)
