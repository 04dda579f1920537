"""Weights over ranks, against closed forms: whatever a rank has, the total is that of all loss ranks, or all ranks say what is wrong."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from tests.support import MeanTask, Scalar
from trainer_kit import ForwardInputs, Loss, MeshStrategy, Task
from trainer_kit.data import Pack
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.pipeline import LossSums, SequentialRunner
from trainer_kit.pipeline.loss_terms import SharedWeights, TermWeights
from trainer_kit.pipeline.rank_weights import RankWeights
from trainer_kit.testing import run_on_ranks


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


class Weighed(Task):
    """A microbatch is (samples, names of terms); the loss of a term is the mean, its weight the number of samples. `weigh` as in MeanTask,
    or "terms"."""

    def __init__(self, weigh):
        self.weigh = weigh

    def build_forward_inputs(self, batch):
        samples, names = batch
        weight = {"declared": len(samples), "terms": {name: len(samples) for name in names}}.get(self.weigh)
        return ForwardInputs(inputs=samples, state=batch, weight=weight)

    def compute_loss(self, pipeline_results, state):
        samples, names = state
        if self.weigh == "terms":
            return {name: factor * pipeline_results for name, factor in zip(names, (1, 10, 100), strict=False)}
        return {"returned": Loss(pipeline_results, len(samples)), "tensor": Loss(pipeline_results, torch.tensor(len(samples)))}.get(
            self.weigh, pipeline_results
        )


def microbatches(*samples, names=("a", "b")):
    return [(s, names) for s in samples]


FILLER = (t(5), ("a", "b"))


def gradient_job(weigh, packs_by_rank, strategy=None):
    """The mean gradient of w by pack, all-reduced by hand over the data ranks, and the weight by which it was divided."""
    import torch.distributed as dist

    context = (strategy or MeshStrategy()).build()
    model, found = Scalar(1.0), []
    runner = SequentialRunner(lambda inputs, shared: model(inputs), context)
    for parts in packs_by_rank:
        part = parts[context.data_rank]
        pack = Pack(part, filler=None if part else FILLER)
        weight = runner.run_pack(pack, Weighed(weigh), {}, losses=None)
        gradient = torch.zeros(()) if model.w.grad is None else model.w.grad
        if context.data_group is not None:
            dist.all_reduce(gradient, group=context.data_group)
        found.append((float(gradient) / (weight or 1), float(weight)))
        model.w.grad = None
    return found


PACKS = [
    (microbatches(t(4)), microbatches(t(0, 0, 0))),  # 1, the naive mean of means is 2
    (microbatches(t(4), t(2)), microbatches(t(0, 0))),  # unequal numbers of microbatches: 1.5
    ([], microbatches(t(3, 5))),  # a rank without any: 4
    (microbatches(t()), microbatches(t(2, 2))),  # B07: a mean over nothing is nan and weighs 0
    (microbatches(t()), []),  # nothing counts anywhere
    (microbatches(t(4)), microbatches(t(0, 0, 0))),
]
EXPECTED = [(1.0, 4.0), (1.5, 4.0), (4.0, 2.0), (2.0, 2.0), (0.0, 0.0), (1.0, 4.0)]


@pytest.mark.parametrize("first", [0, 2, 4])
@pytest.mark.parametrize("weigh", ["declared", "returned", "tensor"])
def test_gradients_are_divided_by_the_weight_of_all_ranks(weigh, first):
    """Contracts 1 and 2, B02, B07: also if the first pack of the run leaves a rank, or all of them, without a microbatch that counts."""
    for found in run_on_ranks(2, gradient_job, weigh, PACKS[first:]):
        assert found == EXPECTED[first:]


def test_three_ranks_of_which_two_have_nothing():
    packs = [([], microbatches(t(1)), []), (microbatches(t(1)), microbatches(t(4)), microbatches(t(7)))]
    for found in run_on_ranks(3, gradient_job, "returned", packs):
        assert found == [(1.0, 1.0), (4.0, 3.0)]


TERM_PACKS = [
    (microbatches(t(1)), microbatches(t(2, 3, 6))),
    ([], microbatches(t(2, 3, 7), names=("a", "c"))),  # a name that one rank learns from the other
    (microbatches(t(4), names=("c", "a")), microbatches(t(2, 0), names=("b",))),
    (microbatches(t(), t(2)), microbatches(t(4, 4, 4), names=("a",))),
]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_each_term_is_the_mean_over_its_own_weights_on_all_ranks(first):
    """Contracts 1 and 2, B10: term by term in closed form, whatever names a rank has; those of the first pack are not all."""
    expected = []
    for parts in TERM_PACKS:
        sums, weights = {}, {}
        for samples, names in [microbatch for part in parts for microbatch in part]:
            for name, factor in zip(names, (1, 10, 100), strict=False):
                sums[name] = sums.get(name, 0) + factor * float(samples.sum())
                weights[name] = weights.get(name, 0) + len(samples)
        expected.append(sum(sums[name] / weights[name] for name in sums if weights[name]))
    for found in run_on_ranks(2, gradient_job, "terms", TERM_PACKS[first:]):
        assert [gradient for gradient, _ in found] == pytest.approx(expected[first:], rel=1e-6)


def test_tensor_peers_count_once():
    """Contract 1: tp 2 x dp 2 gives the weights of dp 2, and tp 2 alone those of one process, without a word between the ranks."""
    for found in run_on_ranks(4, gradient_job, "declared", PACKS, MeshStrategy(tp=2)):
        assert found == EXPECTED
    alone = [(part,) for part, _ in PACKS if part]
    for found in run_on_ranks(2, gradient_job, "returned", alone, MeshStrategy(tp=2)):
        assert found == gradient_job("returned", alone)


def mixed_job(first):
    context = MeshStrategy().build()
    model, calls = Scalar(1.0), []
    runner = SequentialRunner(lambda inputs, shared: calls.append(inputs) or model(inputs), context)
    said = []
    for step in range(2):
        differs = step == 1 or first
        others = "none" if first == "returned" else "terms"
        weigh = others if differs and context.rank else "declared"
        try:
            runner.run_pack(Pack(microbatches(t(1, 2))), Weighed(weigh), {}, losses=None)
        except ConfigurationError as error:
            said.append((step, str(error)))
        assert len(calls) == (0 if first else step + 1), "ranks that do not fit do not begin"
    return said


@pytest.mark.parametrize("first", ["terms", "returned", ""])
def test_weights_that_are_declared_otherwise_on_another_rank_are_an_error_on_all(first):
    """Contract 1: in the first step before any other collective, later at the end of the step at the latest; never a hang."""
    for said in run_on_ranks(2, mixed_job, first):
        assert [step for step, _ in said] == ([0, 1] if first else [1])
        assert all("on 1 rank" in text and "same way on every rank" in text for _, text in said)


def sizes_job(sizes):
    context = MeshStrategy().build()
    model = Scalar(1.0)
    runner = SequentialRunner(lambda inputs, shared: model(inputs), context)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            weight = runner.run_pack(Pack([torch.ones(sizes[context.rank])]), MeanTask("none"), {}, losses=None)
    return weight, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("sizes", "count"), [([2, 2], 0), ([2, 3], 1)])
def test_microbatches_of_other_sizes_on_other_ranks_warn_without_weights(sizes, count):
    for rank, (weight, said) in enumerate(run_on_ranks(2, sizes_job, sizes)):
        assert weight == 2 and len(said) == (count if rank == 0 else 0)  # once per run
        assert all("weight= of ForwardInputs" in text and "others" in text for text in said)


def device_job():
    """A tensor stands for one on an accelerator, which `checked_weight` leaves there."""
    context = MeshStrategy().build()
    totals, found = RankWeights(context), []
    for weights in (
        [SharedWeights([torch.tensor(2), torch.tensor(3)]), SharedWeights([])],
        [SharedWeights([5]), SharedWeights([torch.tensor(0.5)])],
        [TermWeights([{"a": torch.tensor(2.0), "b": 1}]), TermWeights([{"b": torch.tensor(3.0)}])],
    ):
        totals.begin(weights[context.rank])
        totals.before_backward()
        found.append(totals.finish([]))
    mine = weights[context.rank]
    returned = SharedWeights([None])
    totals.begin(returned)
    returned.total = [torch.tensor(4), 0.25][context.rank]
    return [*map(float, found), float(totals.finish([]))], {name: float(total) for name, total in mine.totals.items()}


def test_weights_on_a_device_are_added_up_there():
    """Contract 44: their sum is a tensor, which nobody reads; other ranks may have numbers, or nothing."""
    for totals, by_term in run_on_ranks(2, device_job):
        assert totals == [5.0, 5.5, 2.0, 4.25]
        assert by_term == {"a": 2.0, "b": 4.0}


class Router(Scalar):
    """Adds a penalty that no weight is declared for."""

    context = None

    def forward(self, c):
        self.context.add_loss("router", 4 * self.w, coefficient=0.5)
        return super().forward(c)


def added_job():
    import torch.distributed as dist

    context = MeshStrategy(tp=2).build()
    model, losses = Router(1.0), LossSums()
    model.context = context
    runner = SequentialRunner(lambda inputs, shared: model(inputs), context)
    part = [microbatches(t(3, 3)), microbatches(t(2), names=("b",))][context.data_rank]
    weight = runner.run_pack(Pack(part), Weighed("terms"), {}, losses=losses)
    dist.all_reduce(model.w.grad, group=context.data_group)
    return float(model.w.grad / weight), losses.weights


def test_added_losses_of_tensor_peers_count_once():
    """4 ranks, dp 2 x tp 2. What is added counts with the weight of the main term, a: 2 on data rank 0, nothing on the other, which has
    none. So the gradient is 3 for a, (2 * 30 + 2) / 3 for b and 0.5 * 4 for the router."""
    found = run_on_ranks(4, added_job)
    assert found[0] == found[1] and found[2] == found[3]
    assert found[0][0] == found[2][0] == pytest.approx(3 + 62 / 3 + 2, rel=1e-6)
    assert found[0][1] == {"a": 2, "b": 2, "router": 2} and found[2][1] == {"b": 1, "router": 0}


def pack_of_three_job():
    """B05: 3 microbatches per epoch on each of 2 ranks, in packs of 2; w falls by the mean gradient 1 in every step."""
    from trainer_kit.data import AutoDataProvider, DataStream

    context = MeshStrategy().build()
    provider = AutoDataProvider(torch.ones(6), 4, 1)
    provider.setup(context, 0)
    stream = DataStream(provider, context.device, seed=0, prefetch_packs=0, max_epochs=2, context=context)
    model = Scalar(0.0)
    runner = SequentialRunner(lambda inputs, shared: model(inputs), context)
    return [runner.run_pack(copy.copy(pack), MeanTask(), {}, losses=None) for pack in iter(stream.next, None)], float(model.w.grad)


def test_a_short_last_pack_counts_with_what_all_ranks_have():
    """B05: the weights are 4, 2, 4, 2; what is summed on each rank is its half."""
    assert run_on_ranks(2, pack_of_three_job) == [([4.0, 2.0, 4.0, 2.0], 6.0)] * 2


def test_an_empty_mapping_of_weights_is_refused():
    class Empty(MeanTask):
        def build_forward_inputs(self, batch):
            return ForwardInputs(inputs=batch, weight={})

    runner = SequentialRunner(lambda inputs, shared: inputs, MeshStrategy(device="cpu").build())
    with pytest.raises(ConfigurationError, match="empty mapping"):
        runner.run_pack(Pack([t(1)]), Empty(), {}, losses=None)
