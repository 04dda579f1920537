"""Packing of documents that come one by one: positions to the token, any number of data ranks, randomness, ends."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from tests.data.test_packing import LENGTHS, SETTINGS, documents, joined
from trainer_kit import MeshStrategy
from trainer_kit.data import DataStream, SequencePacking
from trainer_kit.exceptions import ConfigurationError, StateError
from trainer_kit.testing import run_on_ranks

CPU = torch.device("cpu")
BEST_FIT = SequencePacking(6, 0, method="best_fit", buffer_size=3)


def place(data_rank=0, num_data_ranks=1):
    return SimpleNamespace(device=CPU, data_rank=data_rank, num_data_ranks=num_data_ranks, is_main=False)


def open_packed(docs, packing, rank=(0, 1), state=None, batch=(1, None), prefetch=0, **options):
    """A stream whose position goes through JSON."""
    provider = packing.stream(docs, *batch)
    provider.setup(place(*rank), 0)
    stream = DataStream(provider, CPU, seed=0, prefetch_packs=prefetch, **options)
    if state is not None:
        stream.load_state_dict(json.loads(json.dumps(state)))
    return stream


def take(stream, count=10_000):
    """The rows of each pack as [tokens, labels, document ids]."""
    packs = []
    while len(packs) < count and (pack := stream.next()) is not None:
        packs.append([rows for m in pack.microbatches for rows in torch.stack(list(m.values()), 1).tolist()])
    return packs


class Endless:
    """Documents without a length, and none by number."""

    def __init__(self, docs):
        self.docs, self.num_read = docs, 0

    def __iter__(self):
        for document in self.docs:
            self.num_read += 1
            yield document


class WithState(Endless):
    """Goes on from a state, without reading what came before."""

    at, loaded = 0, False

    def __iter__(self):
        start, self.loaded = (self.at if self.loaded else 0), False
        for number in range(start, len(self.docs)):
            self.at, self.num_read = number + 1, self.num_read + 1
            yield self.docs[number]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.loaded = state["at"], True


@settings(max_examples=40, deadline=None)
@given(
    packing=SETTINGS,
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    kind=st.sampled_from([list, Endless, WithState]),
    prefetch=st.sampled_from([0, 2]),
)
def test_a_resume_at_any_row_goes_on_as_if_nothing_had_happened(packing, lengths, kind, prefetch):
    """Contract 17: in the middle of a document too, into the second epoch, for what was fetched ahead; rows are those of the dataset."""
    docs = documents(lengths)
    dataset = packing.dataset(docs)
    epoch = [[torch.stack(list(dataset[i].values())).tolist()] for i in range(len(dataset))]
    for stop in range(2 * len(dataset) + 1):
        first = open_packed(kind(docs), packing, prefetch=prefetch, max_epochs=2)
        assert take(first, stop) == (epoch * 2)[:stop]
        second = open_packed(kind(docs), packing, state=first.state_dict(), prefetch=prefetch, max_epochs=2)
        assert second.state_dict() == first.state_dict(), "saved again at once"
        assert take(second) == (epoch * 2)[stop:]


@settings(max_examples=60, deadline=None)
@given(packing=SETTINGS, lengths=LENGTHS, microbatch=st.integers(1, 2), stop=st.integers(0, 3))
def test_data_ranks_share_the_rows_and_resume_on_another_number_of_them(packing, lengths, microbatch, stop):
    """Contracts 15 to 18: disjoint and complete, equal numbers of packs, one position for all; 2 ranks, then 1, then 3."""
    docs, batch = documents(lengths), (6 * microbatch, microbatch)
    reference = take(open_packed(docs, packing, batch=batch, max_epochs=2))
    state, got = None, []
    for num_ranks, count in [(2, stop), (1, 1), (3, 10_000)]:
        ranks = [open_packed(docs, packing, (rank, num_ranks), state, batch, max_epochs=2) for rank in range(num_ranks)]
        parts = [take(rank, count) for rank in ranks]
        got += [joined(pack) for pack in zip(*parts, strict=True)]
        states = [rank.state_dict() for rank in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert got == reference


def peers_job():
    context = MeshStrategy(tp=2).build()
    provider = BEST_FIT.stream(documents([5, 9, 2, 4, 1, 7]), 2, 1)
    provider.setup(context, 0)
    stream = DataStream(provider, context.device, seed=0, prefetch_packs=1, context=context, max_epochs=1)
    return context.data_rank, take(stream, 2), stream.state_of_all_ranks()


def test_tensor_peers_get_the_same_rows_and_data_ranks_different_ones():
    """Contracts 15 and 16: 4 ranks, dp 2 x tp 2; the position is the same on all of them."""
    found = run_on_ranks(4, peers_job)
    parts = {data_rank: packs for data_rank, packs, _ in found}
    assert all(packs == parts[data_rank] and state == found[0][2] for data_rank, packs, state in found)
    one_process = take(open_packed(documents([5, 9, 2, 4, 1, 7]), BEST_FIT, batch=(2, 1)), 2)
    assert [first + second for first, second in zip(parts[0], parts[1], strict=True)] == one_process


def test_a_rank_without_rows_in_the_last_batch_has_a_filler():
    """Contract 18: two ranks and one row."""
    first, second = (open_packed([[1, 2, 3]], SequencePacking(4, 0), (rank, 2), batch=(2, 1)).next() for rank in range(2))
    assert [first.num_on_all, second.num_on_all] == [1, 1]
    assert first.microbatches == [] and first.filler["input_ids"].tolist() == [[1, 2, 3, 0]]
    assert second.microbatches[0]["input_ids"].tolist() == [[1, 2, 3, 0]] and second.filler is None


def test_documents_with_a_state_are_read_again_only_while_they_are_open():
    docs = documents([9] * 20)
    first = open_packed(WithState(docs), SequencePacking(6, 0))
    take(first, 13)  # 78 tokens: six left of document 8
    data = WithState(docs)
    assert take(open_packed(data, SequencePacking(6, 0), state=first.state_dict()), 1)[0][0][0] == docs[8][6:] + docs[9][:3]
    assert data.num_read == 2


@settings(max_examples=40, deadline=None)
@given(before=SETTINGS, after=SETTINGS, again=SETTINGS, lengths=LENGTHS, stops=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_every_token_comes_once_though_the_settings_change_at_a_resume(before, after, again, lengths, stops):
    """Contract 16, with another row length, method and buffer after each resume."""
    docs, state, tokens = documents(lengths), None, []
    for packing, count in zip((before, after, again), (*stops, 10_000), strict=True):
        if state is not None and state["epoch"] == 1:
            break
        stream = open_packed(docs, packing, state=state, max_epochs=1)
        for pack in take(stream, count):
            tokens += [token for token, _, number in zip(*pack[0], strict=True) if number >= 0]
        state = stream.state_dict()
    assert sorted(tokens) == sorted(joined(docs))


class Noisy:
    """Tokens that are drawn from python's and torch's streams."""

    def __len__(self):
        return 12

    def __getitem__(self, number):
        return torch.tensor([random.randrange(1000), *torch.randint(1000, (3,)).tolist(), number])


class Drawn(Endless):
    def __iter__(self):
        return (Noisy()[number] for number in range(12))


def loader():
    return DataLoader(Noisy(), batch_size=None, shuffle=True)


@pytest.mark.parametrize("make", [loader, lambda: Drawn([])], ids=["loader", "iterable"])
def test_documents_that_draw_random_numbers_are_the_same_when_they_are_read_again(make):
    """Contract 17: order and tokens are a function of seed and epoch, wherever the run's streams are, which stay untouched."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    reference = take(open_packed(make(), BEST_FIT, max_epochs=2))
    assert torch.equal(before, torch.get_rng_state()) and reference[:12] != reference[12:]
    for stop in range(0, len(reference), 3):
        torch.manual_seed(stop)
        random.seed(stop)
        first = open_packed(make(), BEST_FIT, max_epochs=2)
        head = take(first, stop)
        assert head + take(open_packed(make(), BEST_FIT, state=first.state_dict(), prefetch=1, max_epochs=2)) == reference


@pytest.mark.parametrize("lengths", [[4, 4], [4, 3]])
def test_the_last_pack_is_known_as_soon_as_the_documents_say_so(lengths):
    docs = documents(lengths)
    assert [open_packed(docs, SequencePacking(8, 0)).next().is_last for _ in range(2)] == [True, True]
    partial = open_packed(WithState(documents([4, 3])), SequencePacking(8, 0))
    assert partial.next().is_last and partial.state_dict()["position"] == {"epoch": 1}
    unknown = open_packed(Endless(docs), SequencePacking(8, 0), max_epochs=1)
    assert unknown.next().is_last is (None if sum(lengths) == 8 else True)
    assert unknown.next() is None and unknown.reached_max_epochs
    assert unknown.state_dict()["epoch"] == 1


class Failing(Endless):
    fails = True

    def __iter__(self):
        for number, document in enumerate(self.docs):
            if number == 2 and self.fails:
                raise ValueError("document is broken")
            yield document


def test_an_error_of_the_documents_surfaces_and_no_row_is_lost():
    """Contract 18 and B103."""
    docs = Failing(documents([4, 5, 6]))
    stream = open_packed(docs, SequencePacking(4, 0), max_epochs=1)
    head = take(stream, 2)
    with pytest.raises(ValueError, match="document is broken"):
        stream.next()
    docs.fails = False
    assert head + take(stream) == take(open_packed(docs.docs, SequencePacking(4, 0), max_epochs=1))


def test_an_iterator_gives_one_epoch():
    docs = documents([3, 4, 5])
    stream = open_packed(iter(docs), SequencePacking(4, 0))
    assert len(take(stream)) == 3 and stream.next() is None
    middle = open_packed(iter(docs), SequencePacking(4, 0))
    head = take(middle, 1)
    rest = take(open_packed(iter(docs), SequencePacking(4, 0), state=middle.state_dict()))
    assert head + rest == take(open_packed(docs, SequencePacking(4, 0), max_epochs=1))


def test_statistics_and_description():
    provider = SequencePacking(4, 0).stream(documents([3, 4, 2]), 2, 1)
    with pytest.raises(StateError, match="before setup"):
        next(provider.packs(None))
    provider.setup(place(1, 2), 0)
    assert len(list(provider.packs(None))) == 2
    found = provider.statistics
    assert (found.num_rows, found.num_tokens, found.num_documents, found.num_cuts, found.fullness) == (3, 9, 3, 2, 0.75)
    assert provider.describe()["documents"] == "list" and provider.describe()["accumulation"] == 1
    assert provider.hparams() == {"global_batch_size": 2, "microbatch_size": 1, "seq_len": 4, "packing": "greedy"}


@pytest.mark.parametrize(
    ("docs", "words"),
    [
        (TensorDataset(torch.zeros(3)), ["documents= is a map-style dataset", "dataset(documents)"]),
        ("text", ["documents= is a str"]),
        ({"input_ids": [1]}, ["documents= is a dict"]),
        (torch.zeros(3, 4), ["documents= is a Tensor"]),
        (3, ["documents= is a int"]),
    ],
)
def test_what_is_no_iterable_of_documents_is_refused(docs, words):
    with pytest.raises(ConfigurationError) as error:
        SequencePacking(4, 0).stream(docs, 1)
    assert all(word in str(error.value) for word in words)


def test_empty_documents_and_sizes_that_do_not_fit_the_ranks_are_refused():
    with pytest.raises(ConfigurationError, match="PackedStream gave no pack in epoch 0"):
        open_packed([], SequencePacking(4, 0)).next()
    with pytest.raises(ConfigurationError, match="global_batch_size=3"):
        open_packed([[1]], SequencePacking(4, 0), (0, 2), batch=(3, None))
