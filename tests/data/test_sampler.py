"""The order of samples and its cuts: permutations, disjoint and complete parts."""

from __future__ import annotations

import pytest
import torch

from trainer_kit.data.sampler import global_order, index_list, num_global_batches, pack_spans


def test_the_order_is_a_permutation_that_depends_on_seed_and_epoch_alone():
    """Contract 16: a function of (seed, epoch), reshuffled each epoch; the run's random streams are not used."""
    before = torch.get_rng_state()
    orders = [global_order(50, seed=seed, epoch=epoch, shuffle=True).tolist() for seed, epoch in [(0, 0), (0, 1), (1, 0), (0, 0)]]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] == orders[3]
    assert len({tuple(order) for order in orders}) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unshuffled_order_takes_no_memory():
    order = global_order(10**15, seed=0, epoch=3, shuffle=False)
    assert index_list(order, (10**14, 10**14 + 3)) == [10**14, 10**14 + 1, 10**14 + 2]


@pytest.mark.parametrize("num_data_ranks", [1, 2, 4])
@pytest.mark.parametrize("start", [0, 8, 5])
@pytest.mark.parametrize("num_samples", [24, 21, 3])
def test_ranks_are_disjoint_and_complete_and_see_the_same_global_batches(num_samples, start, num_data_ranks):
    """Contracts 15, 16 and 17: from any position, on any number of data ranks, every sample left is there once, in the same step."""
    packs = [
        list(pack_spans(num_samples, global_batch_size=8, microbatch_size=2, data_rank=r, num_data_ranks=num_data_ranks, start=start))
        for r in range(num_data_ranks)
    ]
    assert len({len(of_rank) for of_rank in packs}) == 1
    steps = []
    for of_step in zip(*packs, strict=True):
        assert len({after for _, after in of_step}) == 1
        sizes = [sum(b - a for a, b in spans) for spans, _ in of_step]
        assert max(sizes) - min(sizes) <= 1
        assert all(0 < b - a <= 2 for spans, _ in of_step for a, b in spans)
        steps.append([i for spans, _ in of_step for a, b in spans for i in range(a, b)])
    assert steps == [list(range(b, min(b + 8, num_samples))) for b in range(start, num_samples, 8)]


def test_drop_last_leaves_out_the_short_batch():
    spans = list(pack_spans(10, global_batch_size=4, microbatch_size=2, drop_last=True))
    assert spans == [([(0, 2), (2, 4)], 4), ([(4, 6), (6, 8)], 8)]
    assert (num_global_batches(10, 4, True), num_global_batches(10, 4, False)) == (2, 3)
