"""Losses on logits that are cut over the classes, against torch on whole ones."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.parallel.common import make_mesh
from trainer_kit.mesh.layout import layout_of
from trainer_kit.parallel.vocabulary_ops import enable_vocabulary_ops
from trainer_kit.testing import run_on_ranks
from trainer_kit.torch_private import whole_tensor

N, V, T = 4, 7, 3


def cut(logits, dim):
    """The part of this rank as a leaf, and the DTensor around it."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = make_mesh(tp=dist.get_world_size())
    local = distribute_tensor(logits, mesh, [Shard(dim)], src_data_rank=None).to_local().clone().requires_grad_()
    return local, DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=logits.shape, stride=logits.stride())


def difference_job(shape, dim, function):
    """The largest difference of the values and of the gradients of the logits, as `function(logits)` gives them; relative above 1."""
    enable_vocabulary_ops()
    logits = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = function(logits)
    start = torch.rand(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    expected.backward(start)
    local, whole = cut(logits.detach(), dim)
    found = whole_tensor(function(whole))
    found.backward(start)
    box = layout_of(whole).box
    return relative(found, expected), relative(local.grad, logits.grad[box])


def relative(found, expected):
    differences = (found - expected).abs() / expected.abs().clamp(min=1)
    return max([0.0, *differences.flatten().tolist()])


TARGET = torch.tensor([0, 6, -100, 3])
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0, 1.0, 4.0], dtype=torch.float64)


def of_rows(logits, **options):
    return F.cross_entropy(logits, TARGET, **options)


def mean(logits):
    return of_rows(logits)


def total(logits):
    return of_rows(logits, reduction="sum")


def each(logits):
    return of_rows(logits, reduction="none")


def weighted(logits):
    return of_rows(logits, weight=WEIGHT)


def a_class_ignored(logits):
    """The first class of the first rank is ignored, and so is no other."""
    return F.cross_entropy(logits, torch.tensor([0, 6, 4, 3]), ignore_index=0)


def one_row(logits):
    return F.cross_entropy(logits[1], torch.tensor(6))


def classes_in_the_middle(logits):
    return F.cross_entropy(logits, torch.tensor([[0, 6, 2]] * 3 + [[-100, 1, 4]]))


def log_probabilities(logits):
    """What cross-entropy is not made of: the gradient reaches every class."""
    return F.log_softmax(logits, -1).square().sum()


@pytest.mark.parametrize("function", [mean, total, each, weighted, a_class_ignored, one_row, log_probabilities], ids=lambda f: f.__name__)
def test_losses_are_those_of_whole_logits(function):
    """Uneven classes (4 and 3), positions and classes that do not count, the mean over what counts."""
    for found in run_on_ranks(2, difference_job, (N, V), 1, function):
        assert max(found) < 1e-14


def test_classes_before_the_positions():
    """Logits (B, V, T), as a convolution gives them."""
    assert max(max(found) for found in run_on_ranks(2, difference_job, (N, V, T), 1, classes_in_the_middle)) < 1e-14


def small(logits):
    return F.cross_entropy(logits, torch.tensor([0, 2, -100, 1]))


def test_more_ranks_than_classes():
    """Contract 14: three classes on four ranks, the last of which has none."""
    assert max(max(found) for found in run_on_ranks(4, difference_job, (N, 3), 1, small)) < 1e-14


def all_ignored_job():
    enable_vocabulary_ops()
    _, logits = cut(torch.randn(2, V), 1)
    return whole_tensor(F.cross_entropy(logits, torch.tensor([-100, -100]))).item(), whole_tensor(
        F.cross_entropy(logits, torch.tensor([-100, -100]), reduction="sum")
    ).item()


def test_nothing_that_counts():
    """As torch: the mean over nothing is nan, the sum 0."""
    for mean, total in run_on_ranks(2, all_ignored_job):
        assert mean != mean and total == 0.0


def wrong_target_job():
    enable_vocabulary_ops()
    _, logits = cut(torch.randn(2, V), 1)
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(logits, torch.tensor([0, V]))


def test_a_target_that_is_no_class_is_an_error_on_every_rank():
    run_on_ranks(2, wrong_target_job)


def batch_cut_job():
    """Logits cut over the samples, with the same operators: nothing of DTensor's own use is lost."""
    enable_vocabulary_ops()
    logits = torch.randn(N, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, whole = cut(logits, 0)
    assert whole.log_softmax(-1).placements == whole.placements
    a = (whole_tensor(whole.log_softmax(-1)) - logits.log_softmax(-1)).abs().max().item()
    return a, abs(whole_tensor(F.cross_entropy(whole, TARGET)).item() - F.cross_entropy(logits, TARGET).item())


def test_logits_that_are_cut_over_the_samples():
    for found in run_on_ranks(2, batch_cut_job):
        assert max(found) < 1e-14
