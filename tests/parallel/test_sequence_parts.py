"""Sequences cut over ranks and joined again."""

import pytest
import torch
import torch.distributed as dist

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.parallel.sequence_parts import document_positions, gather_parts, join_parts, part_positions, split_parts, take_part
from trainer_kit.testing import run_on_ranks


def test_a_rank_has_an_early_and_a_late_chunk():
    assert [part_positions(8, rank, 2).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [part_positions(8, rank, 4).tolist() for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert part_positions(6, 0, 1).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_all_parts_see_as_many_keys(num_ranks):
    """The sum of what a causal mask shows to the queries of a rank."""
    seen = {(part_positions(24, rank, num_ranks) + 1).sum().item() for rank in range(num_ranks)}
    assert seen == {24 * 25 // 2 // num_ranks}


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_are_taken_and_joined_along_a_dim(dim):
    x = torch.randn(12, 12, 12)
    parts = split_parts(x, 3, dim=dim)
    for rank in range(3):
        expected = x.index_select(dim, part_positions(12, rank, 3))
        assert torch.equal(take_part(x, rank, 3, dim=dim), expected) and torch.equal(parts[rank], expected)
    assert torch.equal(join_parts(parts, dim=dim), x)


def test_the_gradient_of_a_part_goes_to_its_places():
    x = torch.zeros(1, 8, requires_grad=True)
    take_part(x, 1, 2).backward(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert x.grad.tolist() == [[0, 0, 1, 2, 3, 4, 0, 0]]


def gather_job():
    x = torch.arange(16).view(2, 8)
    rank = dist.get_rank()
    logits = take_part(x, rank, 2).unsqueeze(-1).float().requires_grad_()
    found = gather_parts(logits, dist.group.WORLD)
    return gather_parts(take_part(x, rank, 2), dist.group.WORLD), found.squeeze(-1), found.requires_grad


def test_every_rank_gets_the_whole_sequence_back():
    for ids, logits, wants_gradient in run_on_ranks(2, gather_job):
        assert ids.tolist() == logits.tolist() == torch.arange(16).view(2, 8).tolist()
        assert not wants_gradient


def test_a_sequence_that_cannot_be_cut_says_what_to_change():
    message = r"10 positions cannot be cut over cp=2 ranks; expected a multiple of 2 \* cp = 4. Pad or pack the rows to 12"
    with pytest.raises(ConfigurationError, match=message):
        part_positions(10, 0, 2)
    with pytest.raises(ConfigurationError, match=message):
        take_part(torch.zeros(1, 10), 0, 2)


def test_positions_start_again_with_each_document():
    ids = torch.tensor([[5, 5, 5, 2, 9, 9], [0, 0, 1, 1, 0, 0]])
    assert document_positions(ids).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 0, 1]]
    assert document_positions(ids).dtype == torch.int64
