"""Iterables and DataLoaders of microbatches."""

from __future__ import annotations

import copy
import logging
import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from trainer_kit.data import IterableDataProvider, as_provider
from trainer_kit.exceptions import ConfigurationError, StateError, UnsupportedError


class Batches:
    """Four microbatches, of unknown number."""

    def __iter__(self):
        return (torch.tensor([i]) for i in range(4))


class Shuffled:
    """A shuffle buffer that draws from python's stream between microbatches, and noise from torch's."""

    def __iter__(self):
        left = list(range(10))
        while left:
            yield torch.tensor([left.pop(random.randrange(len(left))) + torch.rand(()).item() / 2], dtype=torch.float64)


class WithState:
    """Four microbatches, and a state that says where it is."""

    def __init__(self):
        self.at, self.loaded, self.read = 0, False, 0

    def __iter__(self):
        start, self.loaded = (self.at if self.loaded else 0), False
        for i in range(start, 4):
            self.at, self.read = i + 1, self.read + 1
            yield torch.tensor([i + torch.rand(()).item() / 2], dtype=torch.float64)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.loaded = state["at"], True


class WrongLength(Batches):
    def __len__(self):
        return 2


class Epochs:
    """Notes the epochs it is told."""

    def __init__(self, size=4):
        self.size, self.told = size, []

    def set_epoch(self, epoch):
        self.told.append(epoch)

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(range(self.size))

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def shuffled_loader(**options):
    return DataLoader(torch.arange(12), batch_size=2, shuffle=True, **options)


def flat(packs):
    return [x for pack in packs for x in pack]


def test_an_iterable_without_length_is_iterated_again_and_again(open_stream):
    """B100: 4 microbatches without __len__, 10 steps, epochs end after 4 and 8."""
    stream = open_stream(Batches())
    packs = [stream.next() for _ in range(10)]
    assert [p.epoch for p in packs] == [0] * 4 + [1] * 4 + [2] * 2
    assert as_provider(Batches()).num_packs() is None
    assert as_provider([1, 2, 3], accumulate=2).num_packs() == 2
    assert as_provider(DataLoader(Stream())).num_packs() is None


def test_a_short_last_pack_is_used(open_stream):
    for data in (Batches(), list(Batches())):
        stream = open_stream(data, accumulate=3, max_epochs=2)
        packs = [stream.next() for _ in range(4)]
        assert [[m.item() for m in p.microbatches] for p in packs] == [[0, 1, 2], [3]] * 2
        assert [bool(p.is_last) for p in packs] == [False, True] * 2
        assert stream.next() is None


def test_a_length_tells_the_last_pack_and_is_not_trusted(open_stream, take, caplog):
    packs = open_stream([torch.zeros(1)] * 2)
    assert [packs.next().is_last for _ in range(4)] == [False, True] * 2
    with caplog.at_level(logging.WARNING):
        assert take(open_stream(WrongLength(), max_epochs=1)) == [[0], [1], [2], [3]]
    assert "promised 2" in caplog.text


def test_the_stream_ends_with_its_data(open_stream, take):
    """B99 on one rank: 3 batches are 3 steps, then there is no more."""
    assert take(open_stream([torch.tensor([i]) for i in range(3)], max_epochs=1)) == [[0], [1], [2]]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iterator_gives_one_epoch_and_says_so(open_stream, take, caplog, prefetch):
    stream = open_stream(iter(Batches()), prefetch=prefetch)
    with caplog.at_level(logging.WARNING):
        assert take(stream) == [[0], [1], [2], [3]]
        assert stream.next() is None
    assert caplog.text.count("can be gone through 1 time(s)") == 1


def test_an_iterator_resumes_by_skipping_and_can_not_go_back(open_stream, take):
    first = open_stream(iter(Batches()), prefetch=1)
    assert take(first, 2) == [[0], [1]]
    first.close()
    assert take(first, 1) == [[2]], "the same iterator goes on"
    assert take(open_stream(iter(Batches()), state=first.state_dict())) == [[3]]
    first.load_state_dict({"epoch": 0, "packs": 1, "position": {"epoch": 0, "microbatches": 1}})
    with pytest.raises(StateError, match="given 4 microbatches"):
        first.next()


@pytest.mark.parametrize("make", [shuffled_loader, Shuffled, WithState, Batches])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("stop", [0, 1, 4, 6, 9])
def test_resumed_data_is_that_of_the_uninterrupted_run(open_stream, take, make, prefetch, stop):
    """B15 and contract 17 for iterables: order and noise, from any place, with the run's streams being somewhere else."""
    torch.manual_seed(0)
    reference = take(open_stream(make(), accumulate=2, prefetch=prefetch), 12)
    torch.manual_seed(0)
    first = open_stream(make(), accumulate=2, prefetch=prefetch)
    head = take(first, stop)
    state, streams = copy.deepcopy(first.state_dict()), torch.get_rng_state()
    random.seed(99)
    second = open_stream(make(), accumulate=2, prefetch=prefetch, state=state)
    torch.set_rng_state(streams)
    assert head + take(second, 12 - stop) == reference


def test_the_order_of_a_loader_is_a_function_of_seed_and_epoch(open_stream, take):
    """Contract 16 and B102: reshuffled each epoch, the same for every state of the run's streams, which stay untouched."""
    orders = []
    for seed, generator in [(0, None), (0, None), (1, None), (0, torch.Generator()), (0, torch.Generator())]:
        torch.manual_seed(len(orders))
        before = torch.get_rng_state()
        orders.append(take(open_stream(shuffled_loader(generator=generator), seed=seed, max_epochs=2)))
        assert torch.equal(torch.get_rng_state(), before)
    for order in orders:
        epochs = flat(order[:6]), flat(order[6:])
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12)) and epochs[0] != epochs[1]
    assert orders[0] == orders[1] and orders[3] == orders[4] and orders[0] != orders[2]


def test_set_epoch_is_called_wherever_it_is(open_stream, take):
    """B102: sampler, batch_sampler, its sampler and the dataset; once per epoch, in a resumed run with the right number."""
    sampler, inner, data, nested = Epochs(), Epochs(), Epochs(), Epochs()
    nested.dataset = Epochs()
    take(open_stream(DataLoader(data, sampler=sampler), max_epochs=2))
    take(open_stream(DataLoader(nested, batch_sampler=BatchSampler(inner, 2, False)), max_epochs=2))
    own = Epochs()
    take(open_stream(own, max_epochs=2, state={"epoch": 1, "packs": 0, "position": None}), 0)
    stream = open_stream([torch.zeros(1)])
    assert stream.next() is not None
    assert [e.told for e in (sampler, inner, data, nested, nested.dataset)] == [[0, 1]] * 5


def test_a_distributed_sampler_reshuffles_each_epoch(open_stream, take):
    """B102: each rank's part differs between epochs, and both ranks together are the dataset."""
    parts = []
    for rank in range(2):
        sampler = DistributedSampler(range(8), num_replicas=2, rank=rank, shuffle=True)
        packs = take(open_stream(DataLoader(range(8), batch_sampler=BatchSampler(sampler, 2, False)), max_epochs=2))
        parts.append((flat(packs[:2]), flat(packs[2:])))
    assert all(first != second for first, second in parts)
    assert all(sorted(parts[0][e] + parts[1][e]) == list(range(8)) for e in (0, 1))


def test_an_object_with_state_is_not_skipped_through(open_stream, take):
    first = open_stream(WithState(), prefetch=1)
    take(first, 2)
    data = WithState()
    second = open_stream(data, state=first.state_dict())
    assert [int(x[0]) for x in take(second, 4)] == [2, 3, 0, 1]
    assert data.read == 4


def test_skipping_is_said(open_stream, caplog):
    stream = open_stream(Batches(), state={"epoch": 0, "packs": 3, "position": {"epoch": 0, "microbatches": 3}})
    with caplog.at_level(logging.WARNING):
        assert stream.next().microbatches[0].item() == 3
    assert "dropping 3 microbatches" in caplog.text


def test_a_weighted_or_custom_sampler_resumes_exactly(open_stream, take):
    """Contract 17: whatever the sampler draws, and whenever."""

    class Draws:
        def __iter__(self):
            pool = list(range(8))
            random.shuffle(pool)
            while pool:
                yield pool.pop(random.randrange(len(pool)))

    for make in (lambda: RandomSampler(range(8), replacement=True, num_samples=8), Draws):
        reference = take(open_stream(DataLoader(range(8), batch_size=2, sampler=make()), max_epochs=2))
        first = open_stream(DataLoader(range(8), batch_size=2, sampler=make()), max_epochs=2)
        head = take(first, 6)
        random.seed(5)
        rest = take(open_stream(DataLoader(range(8), batch_size=2, sampler=make()), max_epochs=2, state=first.state_dict()))
        assert head + rest == reference


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (TensorDataset(torch.zeros(3)), ["TensorDataset", "AutoDataProvider"]),
        ({"x": torch.zeros(3)}, ["dict", "DataLoader"]),
        (torch.zeros(3), ["Tensor", "DataLoader"]),
        ("text", ["str"]),
        (3, ["int"]),
        (lambda: iter([]), ["function", "__iter__"]),
    ],
)
def test_what_is_no_iterable_of_microbatches_is_refused(data, words):
    with pytest.raises(ConfigurationError) as error:
        as_provider(data)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True])
def test_accumulate_is_a_positive_integer(accumulate):
    with pytest.raises(ConfigurationError, match="accumulate"):
        IterableDataProvider([1], accumulate)


def test_empty_data_and_several_data_ranks_are_refused(open_stream, context):
    with pytest.raises(ConfigurationError, match=r"IterableDataProvider gave no pack in epoch 0"):
        open_stream([]).next()
    context.num_data_ranks = 2
    with pytest.raises(UnsupportedError, match="2 data ranks"):
        as_provider([1]).setup(context, 0)
