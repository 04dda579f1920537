"""Exact positions: whatever is fetched ahead, however often a run is resumed."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from tests.data.samples import Ids
from trainer_kit.data import AutoDataProvider, DataStream
from trainer_kit.exceptions import CheckpointError

forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Noisy(Ids):
    """Adds noise from python's and torch's streams."""

    def __getitem__(self, index):
        return torch.tensor([index + random.random() / 4 + torch.rand(()).item() / 4], dtype=torch.float64)


def provider(size=10, batch=2, **options):
    return AutoDataProvider(Ids(size), batch, shuffle=True, **options)


def test_stopped_in_the_second_epoch_the_ids_go_on_as_if_nothing_had_happened(open_stream, take):
    """B11: 10 ids, batch 2, 3 epochs, stopped after global batch 7."""
    reference = take(open_stream(provider(), max_epochs=3))
    assert len(reference) == 15
    first = open_stream(provider(), max_epochs=3)
    head = take(first, 7)
    rest = take(open_stream(provider(), max_epochs=3, state=first.state_dict()))
    assert head + rest == reference


@forks
@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_again_and_again(open_stream, take, workers):
    """B13: stop at 3, resume, save at once, resume, stop at 5, resume."""
    reference = take(open_stream(provider(), max_epochs=2))
    first = open_stream(provider(num_workers=workers), max_epochs=2)
    got = take(first, 3)
    at_once = open_stream(provider(), max_epochs=2, state=first.state_dict())
    assert at_once.state_dict() == first.state_dict()
    second = open_stream(provider(num_workers=workers), max_epochs=2, state=at_once.state_dict())
    got += take(second, 2)
    first.close()
    second.close()
    got += take(open_stream(provider(num_workers=workers), max_epochs=2, state=second.state_dict()))
    assert got == reference


def test_a_resume_shortens_only_its_own_epoch(open_stream):
    """B14: 4 batches per epoch, resumed at batch 2 of epoch 1 of 3."""
    first = open_stream(provider(8), max_epochs=3)
    for _ in range(2):
        first.next()
    second, seen = open_stream(provider(8), max_epochs=3, state=first.state_dict()), [0, 0, 0]
    while (pack := second.next()) is not None:
        seen[pack.epoch] += 1
    assert seen == [2, 4, 4]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_augmentation_and_dropout_are_those_of_the_uninterrupted_run(open_stream, prefetch):
    """B15: 6 steps against 3 + 3, with noise in the dataset and in the model, the run's streams saved and restored."""

    def steps(stream, count):
        return [torch.cat([torch.cat(stream.next().microbatches), torch.rand(2, 1, dtype=torch.float64)]) for _ in range(count)]

    def stream(state=None):
        return open_stream(AutoDataProvider(Noisy(10), 4, 2, shuffle=True), prefetch=prefetch, state=state)

    torch.manual_seed(0)
    random.seed(0)
    straight = steps(stream(), 6)
    torch.manual_seed(0)
    random.seed(0)
    interrupted = stream()
    halves = steps(interrupted, 3)
    saved = interrupted.state_dict(), torch.get_rng_state(), random.getstate()
    torch.manual_seed(99)
    random.seed(99)
    resumed = stream(saved[0])
    torch.set_rng_state(saved[1])
    random.setstate(saved[2])
    halves += steps(resumed, 3)
    assert all(torch.equal(a, b) for a, b in zip(straight, halves, strict=True))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("stop", range(8))
def test_the_position_belongs_to_the_pack_last_handed_out(open_stream, take, prefetch, stop):
    """Contract 17: for any depth of prefetch; before the first pack, at an epoch's end and at the end of the data, too."""
    reference = take(open_stream(provider(7, 2), max_epochs=2))
    first = open_stream(provider(7, 2), prefetch=prefetch, max_epochs=2)
    head = take(first, stop)
    assert first.epoch == max(0, stop - 1) // 4
    second = open_stream(provider(7, 2), prefetch=3 - prefetch, max_epochs=2, state=first.state_dict())
    assert second.epoch == first.epoch
    assert head + take(second) == reference


@forks
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_the_position_is_exact_with_workers(open_stream, take, prefetch):
    """Contract 17, with two workers that read ahead, stopped at an epoch's end."""
    reference = take(open_stream(provider(8, 2), max_epochs=2))
    first = open_stream(provider(8, 2, num_workers=2), prefetch=prefetch, max_epochs=2)
    head = take(first, 4)
    assert head + take(open_stream(provider(8, 2), max_epochs=2, state=first.state_dict())) == reference


def test_what_was_skipped_is_not_loaded(open_stream):
    """Contract 17: counted calls of __getitem__."""
    first = open_stream(provider())
    for _ in range(3):
        first.next()
    data = Ids(10)
    second = open_stream(AutoDataProvider(data, 2, shuffle=True), state=first.state_dict())
    second.next()
    assert len(data.asked) == 2


def test_another_batch_size_goes_on_at_the_same_sample(open_stream, take):
    """Contract 17: the position counts samples."""
    reference = take(open_stream(provider(12, 2), max_epochs=1))
    first = open_stream(provider(12, 2), max_epochs=1)
    head = take(first, 2)
    rest = take(open_stream(provider(12, 4), max_epochs=1, state=first.state_dict()))
    assert [x for p in head + rest for x in p] == [x for p in reference for x in p]
    assert [len(p) for p in rest] == [4, 4]


def test_other_data_or_another_seed_is_said(open_stream, caplog):
    first = open_stream(provider(10))
    first.next()
    with caplog.at_level(logging.WARNING):
        open_stream(provider(12), seed=1, state=first.state_dict()).next()
    assert "dataset_size=10 and now it is 12" in caplog.text and "seed=0 and now it is 1" in caplog.text
    shrunk = open_stream(provider(1, 1), state=first.state_dict()).next()
    assert shrunk.epoch == 1, "a place behind the end of smaller data is the start of the next epoch"


def test_a_stream_goes_on_after_close(open_stream, take):
    stream = open_stream(provider(), prefetch=2, max_epochs=2)
    got = take(stream, 4)
    stream.close()
    assert got + take(stream) == take(open_stream(provider(), max_epochs=2))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_loading_a_place_rewinds_a_running_stream(open_stream, take, prefetch):
    stream = open_stream(provider(), prefetch=prefetch, max_epochs=2)
    take(stream, 2)
    state = stream.state_dict()
    rest = take(stream)
    stream.load_state_dict(state)
    assert take(stream) == rest


def test_a_foreign_state_is_refused(open_stream):
    with pytest.raises(CheckpointError, match="samples"):
        open_stream(provider(), state={"samples": 3})
    assert isinstance(open_stream(provider()), DataStream)
