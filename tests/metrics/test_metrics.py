"""Metrics: exact sums, weights, emptiness, states, and what they must not do (hold a graph, wait for the device)."""

import math
import random

import pytest
import torch

from trainer_kit.exceptions import CheckpointError, ConfigurationError
from trainer_kit.metrics import Accuracy, Last, Max, Mean, Metric, Min, Perplexity, Sum, WeightedMean, check_metric
from trainer_kit.model.torch_init import OperationMode

VALUES = [torch.tensor([1.5, -2.0, 7.0]), torch.tensor([[0.25], [3.0]]), torch.tensor(10.0)]
FLAT = [1.5, -2.0, 7.0, 0.25, 3.0, 10.0]


@pytest.mark.parametrize(
    ("metric", "expected"),
    [(Sum(), 19.75), (Mean(), 19.75 / 6), (Max(), 10.0), (Min(), -2.0), (Last(), 10.0)],
    ids=lambda value: type(value).__name__,
)
def test_values_over_several_updates(metric, expected):
    for values in VALUES:
        metric.update(values)
    assert float(metric.compute()) == expected


def test_sum_of_many_small_float32_values_is_that_of_fsum():
    generator = random.Random(0)
    values = torch.tensor([generator.random() for _ in range(50_000)], dtype=torch.float32)
    total, mean = Sum(), Mean()
    for part in values.split(97):
        total.update(part)
        mean.update(part)
    exact = math.fsum(values.tolist())
    assert float(total.compute()) == pytest.approx(exact, rel=1e-15)
    assert float(mean.compute()) == pytest.approx(exact / 50_000, rel=1e-15)


def test_integers_beyond_float_precision_are_exact():
    total = Sum()
    total.update(2**53)
    for _ in range(3):
        total.update(torch.tensor([1], dtype=torch.int32))
    assert total.compute().dtype == torch.int64
    assert int(total.compute()) == 2**53 + 3

    counted = Sum()
    counted.update(torch.tensor(2**24, dtype=torch.int64))
    counted.update(torch.tensor([True, True, False]))
    assert int(counted.compute()) == 2**24 + 2


def test_integers_and_floats_in_one_sum():
    total = Sum()
    total.update(3)
    total.update(torch.tensor(0.5, dtype=torch.bfloat16))
    assert float(total.compute()) == 3.5


def test_host_numbers_keep_their_digits():
    """An integer state and a float would meet in float32, torch's default."""
    metric = WeightedMean()
    metric.update(2**24 + 1, 1)
    metric.update(torch.tensor(3, dtype=torch.int64), 0.1)
    metric.update(torch.tensor(2**24 + 1), 1.1)
    expected = ((2**24 + 1) * 2.1 + 0.3) / 2.2
    assert float(metric.compute()) == pytest.approx(expected, rel=1e-15)
    largest = Max()
    largest.update(0.1)
    largest.update(-5)
    assert float(largest.compute()) == 0.1


def test_weighted_mean_does_not_depend_on_the_cut():
    """Contract 2."""
    losses, weights = torch.tensor([1.0, 3.0, 5.0, 9.0]), torch.tensor([1, 3, 0, 4])
    expected = (1 * 1 + 3 * 3 + 9 * 4) / 8
    for cut in ([4], [1, 3], [2, 1, 1]):
        metric = WeightedMean()
        for loss, weight in zip(losses.split(cut), weights.split(cut), strict=True):
            metric.update(loss, weight)
        assert float(metric.compute()) == expected


@pytest.mark.parametrize("weight", [4, 4.0, torch.tensor(4), torch.tensor(4.0)], ids=repr)
def test_host_and_device_weights(weight):
    metric = WeightedMean()
    metric.update(torch.tensor(2.0), weight)
    metric.update(torch.tensor(5.0), 2)
    assert float(metric.compute()) == 3.0


def test_one_weight_counts_for_each_value():
    metric = WeightedMean()
    metric.update(torch.tensor([1.0, 2.0, 3.0]), 2)
    metric.update(torch.tensor(10.0), 6)
    assert float(metric.compute()) == (2 * 6.0 + 60.0) / 12


def test_weights_and_means_of_unequal_ranks_combine_by_sums():
    """B67: sizes 1 and 3 with means 4 and 0 give 1, from the states alone."""
    one, three = WeightedMean(), WeightedMean()
    one.update(torch.tensor(4.0), 1)
    three.update(torch.tensor(0.0), 3)
    assert set(WeightedMean.reductions.values()) == {"sum"}
    both = WeightedMean()
    both.load_state_dict({name: one.state_dict()[name] + three.state_dict()[name] for name in WeightedMean.reductions})
    assert float(both.compute()) == 1.0


def test_nan_is_not_hidden_but_weight_zero_counts_as_nothing():
    """B64; contract 2 (empty microbatches)."""
    metric = WeightedMean()
    metric.update(torch.tensor(math.nan), 0)
    metric.update(torch.tensor(2.0), 5)
    assert float(metric.compute()) == 2.0
    metric.update(torch.tensor(math.nan), 1)
    assert math.isnan(float(metric.compute()))
    for extreme in (Max(), Min()):
        extreme.update(torch.tensor([1.0, math.nan]))
        extreme.update(torch.tensor(2.0))
        assert math.isnan(float(extreme.compute()))


def test_perplexity_is_the_exponential_of_the_mean_loss_per_token():
    metric = Perplexity()
    metric.update(torch.tensor(1.0), 10)
    metric.update(torch.tensor(4.0), torch.tensor(5))
    assert float(metric.compute()) == pytest.approx(math.exp(2.0), rel=1e-12)


def test_accuracy_of_scores_and_of_labels():
    scores = torch.tensor([[[0.1, 0.9], [0.8, 0.2]], [[0.3, 0.7], [0.4, 0.6]]])
    targets = torch.tensor([[1, 1], [1, -100]])
    by_score, by_label, by_dim = Accuracy(), Accuracy(), Accuracy(dim=1)
    by_score.update(scores, targets)
    by_label.update(scores.argmax(-1), targets)
    by_dim.update(scores.movedim(-1, 1), targets)
    for metric in (by_score, by_label):
        assert float(metric.compute()) == pytest.approx(2 / 3)
    # (2, 2, 2) with the classes in dim 1: the same scores, moved
    assert float(by_dim.compute()) == pytest.approx(2 / 3)
    with pytest.raises(ConfigurationError, match=r"Accuracy\(dim="):
        Accuracy().update(torch.zeros(4, 3), torch.zeros(5, dtype=torch.int64))


ALL = [Sum, Mean, Max, Min, Last, WeightedMean, Perplexity, Accuracy]


def _update(metric, value=0.5):
    if isinstance(metric, Accuracy):
        metric.update(torch.tensor([[value, 1 - value], [value, 0.1]]), torch.tensor([0, 0]))
    elif isinstance(metric, WeightedMean):
        metric.update(torch.tensor(value), 3)
    else:
        metric.update(torch.tensor([value, 2.0]))


@pytest.mark.parametrize("kind", ALL)
def test_empty_is_nan_and_reset_is_empty(kind):
    metric = kind()
    assert math.isnan(metric.compute())
    assert metric.state_dict() == {}
    _update(metric)
    assert not math.isnan(metric.compute())
    metric.reset()
    assert math.isnan(metric.compute())


@pytest.mark.parametrize("kind", [Sum, Mean, Max, Min, Last])
def test_no_elements_are_no_update(kind):
    metric = kind()
    metric.update(torch.empty(0))
    assert math.isnan(metric.compute())


@pytest.mark.parametrize("kind", ALL)
def test_a_metric_in_progress_goes_on_from_its_state(kind):
    whole, first, second = kind(), kind(), kind()
    _update(whole, 0.75)
    _update(first, 0.75)
    saved = first.state_dict()
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    assert set(saved) == set(kind.reductions)
    assert all(type(t) is torch.Tensor and t.dtype in (torch.float64, torch.int64) for t in saved.values())
    _update(first, 0.125)
    assert all(torch.equal(saved[name], kept[name]) for name in saved), "a saved state changed with a later update"
    second.load_state_dict(saved)
    for metric in (whole, second):
        _update(metric, 0.25)
    assert torch.equal(second.compute(), whole.compute())
    assert second.compute().dtype == whole.compute().dtype


def test_a_foreign_state_is_refused():
    with pytest.raises(CheckpointError, match="WeightedMean"):
        WeightedMean().load_state_dict({"value": torch.tensor(1.0)})


@pytest.mark.parametrize("kind", [Sum, Mean, Max, Min, Last, WeightedMean])
def test_no_graph_is_held(kind):
    """Contract 44: logged values hold no graph."""
    metric = kind()
    value = torch.tensor(2.0, requires_grad=True) * 3
    metric.update(value, 1) if kind is WeightedMean else metric.update(value)
    assert all(t.grad_fn is None and not t.requires_grad for t in metric.state_dict().values())
    assert not metric.compute().requires_grad


@pytest.mark.parametrize("kind", [Sum, Mean, Max, Min, Last])
def test_a_metric_does_not_change_with_the_tensor_it_was_given(kind):
    metric = kind()
    for _ in range(2):
        value = torch.tensor([1.0], dtype=torch.float64)[0]
        metric.update(value)
        value.fill_(9.0)
    assert float(metric.compute()) == (2.0 if kind is Sum else 1.0)


@pytest.mark.parametrize("kind", ALL)
def test_nothing_waits_for_the_device(kind):
    """Contract 44, B66: no value is read on the host, none is copied from it."""

    class NoWait(OperationMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "lift_fresh"), func
            return func(*args, **(kwargs or {}))

    metric = kind()
    value, targets = torch.tensor([[0.5, 0.75]]), torch.tensor([1])
    with NoWait():
        for _ in range(2):
            if kind is Accuracy:
                metric.update(value, targets)
            elif issubclass(kind, WeightedMean):
                metric.update(value, 3)
            else:
                metric.update(value)
        metric.compute()


def test_complex_values_are_refused():
    with pytest.raises(ConfigurationError, match="complex"):
        Mean().update(torch.tensor(1j))


def test_a_state_has_no_dim():
    """It would be found on ranks, at the first record."""

    class PerClass(Metric):
        reductions = {"count": "sum"}

        def update(self, values):
            self.accumulate("count", values)

    with pytest.raises(ConfigurationError, match=r"shape \(3,\) in 'count'"):
        PerClass().update(torch.ones(3))


def test_what_counts_as_a_metric():
    class Foreign:  # such as one of torchmetrics
        def update(self, *args): ...
        def compute(self): ...
        def reset(self): ...

    check_metric("a", Mean())
    check_metric("b", Foreign())
    with pytest.raises(ConfigurationError, match=r"'c'.*Mean\(\)"):
        check_metric("c", Mean)
    with pytest.raises(ConfigurationError, match=r"'d'.*no update, compute, reset"):
        check_metric("d", object())
