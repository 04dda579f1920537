"""Data on several ranks: parts of the global batch, equal packs for peers, ends and positions that hold on all ranks."""

from __future__ import annotations

import contextlib
import json
import logging
import random
from types import SimpleNamespace

import pytest
import torch

from tests.data.samples import Ids
from trainer_kit import MeshStrategy
from trainer_kit.data import AutoDataProvider, DataProvider, DataStream, Pack, as_provider
from trainer_kit.data.ranks import checksum
from trainer_kit.data.sampler import on_all_ranks, pack_spans
from trainer_kit.exceptions import ConfigurationError, StateError
from trainer_kit.random_state import RandomStreams
from trainer_kit.testing import run_on_ranks


class Noisy(Ids):
    def __getitem__(self, index):
        return torch.tensor(index + torch.rand(()).item() / 4 + random.random() / 4, dtype=torch.float64)


class Parts(DataProvider):
    """Rank r has `lengths[r]` packs per epoch, pack i of epoch e being 100 r + 10 i + e. `form`: "lists", "positions", or "all" that a pack
    can say."""

    def __init__(self, lengths, form="lists", fails_at=None):
        self.lengths, self.form, self.fails_at, self.given = lengths, form, fails_at, []

    def setup(self, context, seed):
        self.rank, self.length = context.data_rank, self.lengths[context.data_rank]

    def num_packs(self):
        return self.length

    def packs_left(self, position):
        return self.length - (position or {}).get("line", 0)

    def packs(self, position):
        epoch = (position or {}).get("epoch", 0)
        assert (position or {}).get("rank", self.rank) == self.rank, "that is the position of another rank"
        for index in range((position or {}).get("line", 0), self.length):
            if self.fails_at == (self.rank, index):
                self.fails_at = None
                raise ValueError("sample is broken")
            microbatches = [torch.tensor([100 * self.rank + 10 * index + epoch])] * (1 + self.rank)
            after, is_last = {"epoch": epoch, "line": index + 1, "rank": self.rank}, index + 1 == self.length
            self.given.append(index)
            if self.form == "lists":
                yield microbatches
            elif self.form == "positions":
                yield Pack(microbatches, epoch, after)
            else:
                yield Pack(microbatches, epoch, {"epoch": epoch + 1} if is_last else after, is_last)

    def close(self):
        pass


class ByRank(Parts):
    """Splits by the wrong number."""

    def setup(self, context, seed):
        self.rank, self.length = context.rank, 3


class Lines(logging.Handler):
    """Keeps what was logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def logged():
    handler, logger = Lines(), logging.getLogger("trainer_kit.data")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def open_stream(data, strategy=None, *, seed=0, prefetch=0, state=None, context=None, **options):
    context = context or (strategy or MeshStrategy()).build()
    provider = as_provider(data)
    provider.setup(context, seed)
    stream = DataStream(provider, context.device, seed=seed, prefetch_packs=prefetch, context=context, **options)
    if state is not None:
        stream.load_state_dict(json.loads(json.dumps(state)))
    return stream, context


def values(pack):
    return torch.cat([torch.as_tensor(m) for m in pack.microbatches]).tolist() if pack.microbatches else []


def take(stream, count=1000):
    return [values(pack) for pack in iter(stream.next, None)] if count == 1000 else [values(stream.next()) for _ in range(count)]


def epochs_job(size, batch, tp):
    stream, context = open_stream(AutoDataProvider(Ids(size), batch, 1, shuffle=True), MeshStrategy(tp=tp), max_epochs=2)
    found = [(pack.epoch, values(pack), pack.num_on_all, pack.filler is not None, pack.is_last) for pack in iter(stream.next, None)]
    return context.data_rank, context.tensor_rank, found


def test_tensor_peers_get_the_same_ids_and_data_ranks_different_ones():
    """Contracts 15 and 16, B102 and B105: 4 ranks, dp 2 x tp 2, 9 ids in batches of 4: the last one has a single sample."""
    by_place = {(data, tensor): packs for data, tensor, packs in run_on_ranks(4, epochs_job, 9, 4, 2)}
    assert by_place[0, 0] == by_place[0, 1] and by_place[1, 0] == by_place[1, 1]
    epochs = []
    for epoch in (0, 1):
        order = []
        for (at, a, _, _, _), (_, b, _, _, _) in zip(by_place[0, 0], by_place[1, 0], strict=True):
            order += a + b if at == epoch else []
        assert sorted(order) == list(range(9)), "every sample counts once per epoch"
        epochs.append(order)
    assert epochs[0] != epochs[1]
    one_process = open_stream(AutoDataProvider(Ids(9), 4, 1, shuffle=True), max_epochs=2)[0]
    assert epochs[0] + epochs[1] == [i for pack in take(one_process) for i in pack], "the order is that of one process"
    assert [(len(ids), num, filler) for _, ids, num, filler, _ in by_place[0, 0]] == [(2, 2, False), (2, 2, False), (0, 1, True)] * 2
    assert [(len(ids), num, filler) for _, ids, num, filler, _ in by_place[1, 0]] == [(2, 2, False), (2, 2, False), (1, 1, False)] * 2
    assert [last for *_, last in by_place[0, 0]] == [False, False, True] * 2


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("micro", [1, 2])
def test_every_rank_knows_how_many_microbatches_the_others_have(num_ranks, micro):
    """Against the spans of all ranks, for every size of the last batch."""
    size = num_ranks * micro * 2
    for num_samples in range(1, size + 1):
        parts = [
            next(pack_spans(num_samples, global_batch_size=size, microbatch_size=micro, data_rank=rank, num_data_ranks=num_ranks))[0]
            for rank in range(num_ranks)
        ]
        most, filler = on_all_ranks(0, num_samples, microbatch_size=micro, num_data_ranks=num_ranks)
        assert most == max(map(len, parts))
        assert 0 == filler[0] < filler[1] <= min(micro, num_samples)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("rank", [0, 1])
def test_workers_read_the_same_part_and_filler(rank):
    found = []
    for num_workers in (0, 1):
        provider = AutoDataProvider(Ids(9), 4, 1, shuffle=True, num_workers=num_workers)
        provider.setup(SimpleNamespace(device=torch.device("cpu"), data_rank=rank, num_data_ranks=2, is_main=rank == 0), 0)
        packs = list(provider.packs(None))
        found.append([([m.tolist() for m in p.microbatches], p.num_on_all, p.filler is None or p.filler.tolist()) for p in packs])
        provider.close()
    assert found[0] == found[1] and (found[0][2][2] is True) == (rank == 1)


def noise_job(prefetch):
    context = MeshStrategy(tp=2).build()
    streams = RandomStreams(0, context.device, context.data_rank, context.num_data_ranks)
    streams.enter()
    stream, _ = open_stream(AutoDataProvider(Noisy(8), 4), prefetch=prefetch, max_epochs=1, context=context)
    found = [v % 1 for pack in take(stream) for v in pack]
    streams.leave()
    return found


@pytest.mark.parametrize("prefetch", [0, 1])
def test_augmentation_is_that_of_the_data_rank(prefetch):
    """Contract 15: peers draw the same numbers, and data ranks different ones."""
    noise = run_on_ranks(4, noise_job, prefetch)
    assert noise[0] == noise[1] and noise[2] == noise[3] and not set(noise[0]) & set(noise[2])


def test_one_data_rank_draws_as_one_process():
    device, drawn = torch.device("cpu"), []
    for place in ((), (0, 1), (0, 2), (1, 2)):
        streams = RandomStreams(3, device, *place)
        streams.enter()
        drawn.append(torch.rand(()).item())
        streams.leave()
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3


def test_streams_that_start_anew_depend_on_the_step_and_the_rank():
    device, drawn = torch.device("cpu"), []
    before = torch.get_rng_state()
    for step, place in ((5, (0, 2)), (5, (0, 2)), (6, (0, 2)), (5, (1, 2))):
        streams = RandomStreams(3, device, *place)
        streams.start_anew(step)
        saved = streams.state_dict()
        streams.enter()
        drawn.append(torch.rand(()).item())
        streams.leave()
        again = RandomStreams(3, device, *place)
        again.load_state_dict(saved)
        again.enter()
        assert torch.rand(()).item() == drawn[-1], "saved before the first step"
        again.leave()
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3
    assert torch.equal(torch.get_rng_state(), before)


def uneven_job(form, prefetch):
    with logged() as lines:
        parts = Parts([3, 2], form)
        stream, context = open_stream(parts, prefetch=prefetch, max_epochs=2)
        assert (stream.num_packs(), stream.packs_left()) == (2, 4)
        packs, places = [], [stream.state_dict()]
        for pack in iter(stream.next, None):
            packs.append((pack.epoch, values(pack), pack.num_on_all, pack.is_last))
            places.append(stream.state_dict())
        assert stream.next() is None and stream.reached_max_epochs
    if form == "all":
        assert parts.given == [0, 1, 0, 1], "nothing is read that is known to be left out"
        assert places[2] == {"epoch": 1, "packs": 0, "position": {"epoch": 1}}
    for stop, place in enumerate(places):
        again, _ = open_stream(Parts([3, 2], form), prefetch=2 - prefetch, max_epochs=2, state=None, context=context)
        again.load_state_dict(_all_states(place, context))
        if form == "all":
            assert again.packs_left() == 4 - stop
        assert [(p.epoch, values(p), p.num_on_all, p.is_last) for p in iter(again.next, None)] == packs[stop:]
    return packs, lines


def _all_states(state, context):
    return json.loads(json.dumps({"ranks": [theirs for _, theirs in context.host.exchange((context.data_rank, state))]}))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("form", ["lists", "positions", "all"])
def test_unequal_streams_end_together(form, prefetch):
    """Contracts 17 and 18, B99: rank 0 has 3 packs and rank 1 has 2: both make 2 steps per epoch, said once; and every place resumes."""
    (first, lines), (second, others) = run_on_ranks(2, uneven_job, form, prefetch)
    last = {"lists": [None, None], "positions": [None, None], "all": [False, True]}[form]
    assert first == [(e, [10 * i + e], 2, last[i]) for e in (0, 1) for i in (0, 1)]
    assert second == [(e, [100 + 10 * i + e] * 2, 2, last[i]) for e in (0, 1) for i in (0, 1)]
    (said,) = [line for line in lines if "ended first" in line]
    assert "data rank 1" in said and "data rank 0 had more" in said
    assert [line for line in others if "ended first" in line] == []


def error_job(prefetch):
    stream, _ = open_stream(Parts([3, 3], fails_at=(1, 1)), prefetch=prefetch, max_epochs=1)
    found = [values(stream.next())]
    try:
        stream.next()
    except (ValueError, StateError) as error:
        found.append(f"{type(error).__name__}: {error}")
    return found + take(stream)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_error_on_one_rank_is_raised_when_its_pack_is_due_and_known_to_the_others(prefetch):
    """B103 and contract 18 on ranks: nothing hangs, nothing is lost, and the next call goes on."""
    first, second = run_on_ranks(2, error_job, prefetch)
    assert second[1] == "ValueError: sample is broken"
    assert "rank 1 could not fetch its next pack from Parts: ValueError: sample is broken" in first[1]
    assert first[2:] == [[10], [20]] and second[2:] == [[110] * 2, [120] * 2]


def fill_up_job():
    stream, _ = open_stream(Parts([3, 1]), max_epochs=1, fill_up=True)
    return [(values(pack), pack.num_on_all, None if pack.filler is None else pack.filler.tolist()) for pack in iter(stream.next, None)]


def test_a_pass_over_all_data_is_filled_up_on_the_shorter_rank():
    """Contract 16: an evaluation sees every sample once, on streams of any length."""
    first, second = run_on_ranks(2, fill_up_job)
    assert first == [([0], 2, None), ([10], 1, None), ([20], 1, None)]
    assert second == [([100, 100], 2, None), ([], 1, [100]), ([], 1, [100])]


def position_job(state, count):
    stream, _ = open_stream(AutoDataProvider(Ids(14), 4, 1, shuffle=True), max_epochs=2, state=state)
    found = take(stream, count)
    return found, stream.state_of_all_ranks()


def test_a_position_holds_for_any_number_of_data_ranks():
    """Contract 17: 3 packs on 2 ranks, 2 packs on one, the rest on 4, and across the end of an epoch: each at its exact sample."""
    reference = take(open_stream(AutoDataProvider(Ids(14), 4, 1, shuffle=True), max_epochs=2)[0])
    two = run_on_ranks(2, position_job, None, 3)
    got = [a + b for a, b in zip(*(packs for packs, _ in two), strict=True)]
    assert two[0][1] == two[1][1]
    one, state = position_job(two[0][1], 2)
    four = run_on_ranks(4, position_job, state, 1000)
    got += one + [[i for part in parts for i in part] for parts in zip(*(packs for packs, _ in four), strict=True)]
    assert got == reference


def own_positions_job(count):
    stream, _ = open_stream(Parts([3, 3], "positions"), max_epochs=2)
    take(stream, count)
    return stream.state_of_all_ranks()


def resume_job(state):
    with logged() as lines:
        stream, _ = open_stream(Parts([3, 3], "positions"), max_epochs=2, state=state)
        return take(stream), lines


def test_positions_of_ranks_resume_on_as_many_and_are_told_when_the_number_changed(caplog):
    """Decision 14: a provider without a global position keeps one per data rank."""
    states = run_on_ranks(2, own_positions_job, 4)
    assert states[0] == states[1] and len(states[0]["ranks"]) == 2
    on_two = run_on_ranks(2, resume_job, states[0])
    assert [packs for packs, _ in on_two] == [[[11], [21]], [[111] * 2, [121] * 2]] and not on_two[0][1]
    with caplog.at_level(logging.WARNING):
        one = open_stream(Parts([3], "positions"), max_epochs=2, state=states[0])[0]
    assert take(one) == [[1], [11], [21]]
    assert "saved on 2 data rank(s) and now there are 1" in caplog.text and "global_position" in caplog.text
    alone = open_stream(Parts([3], "positions"), max_epochs=2)[0]
    take(alone, 4)
    (packs, lines), _ = run_on_ranks(2, resume_job, alone.state_of_all_ranks())
    assert packs == [[1], [11], [21]] and "saved on 1 data rank(s) and now there are 2" in lines[0]


def disagreement_job(kind):
    context = MeshStrategy(tp=2 if kind == "peers" else 1).build()
    data = ByRank([]) if kind == "peers" else AutoDataProvider(Ids(9 + context.rank), 4, shuffle=True)
    stream, _ = open_stream(data, context=context)
    try:
        stream.next()
    except ConfigurationError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("peers", ["[0, 1]", "data rank 0", "ByRank", "shapes", "context.data_rank"]),
        ("size", ["rank 0 at", "rank 1 at", "'dataset_size': 9", "'dataset_size': 10"]),
    ],
)
def test_ranks_that_do_not_agree_are_named_at_the_first_pack(kind, words):
    """Contract 15: peers that read different data, and datasets of different sizes, end the run on every rank."""
    for said in run_on_ranks(2, disagreement_job, kind):
        assert all(word in said for word in words), said


def iterable_job():
    stream, context = open_stream([torch.tensor([0]), torch.tensor([1])], MeshStrategy(tp=2), max_epochs=2)
    return context.tensor_rank, take(stream)


def test_an_iterable_is_read_whole_by_every_peer_of_the_only_data_rank():
    """B100 and contract 15."""
    assert run_on_ranks(2, iterable_job) == [(rank, [[0], [1]] * 2) for rank in (0, 1)]


def overfit_job(known):
    data = AutoDataProvider(Ids(5), 2, shuffle=True) if known else Parts([3, 1])
    stream, _ = open_stream(data, overfit_packs=3, max_epochs=2)
    return [(pack.epoch, values(pack), pack.num_on_all, pack.filler is None) for pack in iter(stream.next, None)]


@pytest.mark.parametrize("known", [True, False])
def test_overfitting_repeats_the_part_of_each_rank(known):
    first, second = run_on_ranks(2, overfit_job, known)
    if known:
        assert sorted(i for _, ids, _, _ in first[:3] + second[:3] for i in ids) == list(range(5))
        assert [ids for _, ids, _, _ in first[:3]] == [ids for _, ids, _, _ in first[3:]] and first[2][1:] == ([], 1, False)
    else:
        assert first == [(0, [0], 2, True), (1, [0], 2, True)] and second == [(0, [100, 100], 2, True), (1, [100, 100], 2, True)]


def test_fillers_move_to_the_device_with_their_pack():
    class WithFiller(DataProvider):
        def packs(self, position):
            yield Pack([], filler={"x": torch.zeros(2)})
            yield Pack([torch.zeros(1)], filler=torch.zeros(3))

    provider = WithFiller()
    stream = DataStream(provider, torch.device("meta"), seed=0, prefetch_packs=1)
    first, second = stream.next(), stream.next()
    assert first.microbatches == [] and first.filler["x"].device.type == "meta"
    assert [m.shape for m in second.microbatches] == [(1,)] and second.filler.shape == (3,) and second.filler.device.type == "meta"


def test_checksums_see_every_bit_and_every_plain_value():
    x = torch.arange(6.0)
    tree = {"x": x, "names": ["a", ("b", 1)], "empty": torch.zeros(0, 2), "none": None}
    assert checksum(tree) == checksum({"x": x.clone(), "names": ["a", ("b", 1)], "empty": torch.zeros(0, 2), "none": None})
    others = [
        {**tree, "x": x.reshape(2, 3)},
        {**tree, "x": x.flip(0)},
        {**tree, "x": x.double()},
        {**tree, "names": ["a", ("b", 2)]},
        {**tree, "empty": torch.zeros(2, 0)},
    ]
    assert len({checksum(other) for other in [tree, *others]}) == 6
    assert checksum(x.reshape(2, 3).t()) == checksum(x.reshape(2, 3).t().contiguous())
