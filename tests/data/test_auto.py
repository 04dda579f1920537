"""AutoDataProvider: packs of a dataset, and the errors of data and sizes that do not fit."""

from __future__ import annotations

import dataclasses
import logging
import traceback
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.data.samples import Ids
from trainer_kit.data import AutoDataProvider, as_provider
from trainer_kit.exceptions import ConfigurationError, StateError


class Batched(Ids):
    """Gives many samples at once."""

    def __getitems__(self, indices):
        return [-i for i in indices]


class NoLength(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Fails(Ids):
    def __getitem__(self, index):
        if index == 5:
            raise ValueError("sample is broken")
        return index


def test_each_epoch_has_every_sample_once_in_a_new_order(open_stream, take):
    """Contract 16."""
    stream = open_stream(AutoDataProvider(Ids(10), 4, 2, shuffle=True), max_epochs=3)
    packs = take(stream)
    assert [len(p) for p in packs] == [4, 4, 2] * 3
    epochs = [[x for pack in packs[i : i + 3] for x in pack] for i in (0, 3, 6)]
    assert all(sorted(e) == list(range(10)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert take(open_stream(AutoDataProvider(Ids(10), 4, 1, shuffle=True), max_epochs=3)) == packs, "microbatches change no sample"


def test_packs_know_their_epoch_and_whether_they_are_the_last(open_stream):
    stream = open_stream(AutoDataProvider(Ids(5), 4, 2), max_epochs=2)
    packs = [stream.next() for _ in range(4)]
    assert [(p.epoch, p.is_last, [m.tolist() for m in p.microbatches]) for p in packs] == [
        (0, False, [[0, 1], [2, 3]]),
        (0, True, [[4]]),
        (1, False, [[0, 1], [2, 3]]),
        (1, True, [[4]]),
    ]
    assert stream.next() is None and stream.next() is None


def test_drop_last(open_stream, take):
    assert take(open_stream(AutoDataProvider(Ids(10), 4, drop_last=True), max_epochs=2)) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_tensor_datasets_are_read_at_once_with_the_result_of_default_collate(open_stream, shuffle):
    data = TensorDataset(torch.arange(12.0).reshape(6, 2).t().contiguous().t(), torch.arange(6), torch.rand(6, 0))
    fast = open_stream(AutoDataProvider(data, 4, shuffle=shuffle)).next().microbatches[0]
    slow = open_stream(AutoDataProvider(data, 4, shuffle=shuffle, collate_fn=torch.utils.data.default_collate)).next().microbatches[0]
    assert type(fast) is type(slow) is list
    assert all(torch.equal(a, b) and a.dtype is b.dtype and a.stride() == b.stride() for a, b in zip(fast, slow, strict=True))
    fast[0].zero_()
    assert data.tensors[0][1:].ne(0).all(), "a microbatch shares no memory with the dataset"


def test_batches_equal_those_of_a_data_loader(open_stream, take):
    loader = DataLoader(Ids(7), batch_size=3)
    assert take(open_stream(AutoDataProvider(Ids(7), 3), max_epochs=1)) == [b.tolist() for b in loader]


def test_get_items_collate_fn_and_factories_are_used(open_stream, take):
    made = []

    def factory():
        made.append(Batched(4))
        return made[-1]

    provider = AutoDataProvider(factory, 2, collate_fn=lambda samples: torch.tensor(samples) * 10)
    assert made == []
    assert take(open_stream(provider, max_epochs=2)) == [[0, -10], [-20, -30]] * 2
    open_stream(provider)
    assert len(made) == 1, "a second setup keeps the dataset"
    assert take(open_stream(AutoDataProvider(lambda: Ids(2), 2), max_epochs=1)) == [[0, 1]]


def test_samples_of_any_kind(open_stream):
    """Contract 19."""

    @dataclasses.dataclass
    class Sample:
        x: torch.Tensor
        name: str

    samples = [Sample(torch.ones(1), "a"), Sample(torch.ones(1), "b")]
    pack = open_stream(AutoDataProvider(samples, 2, collate_fn=lambda s: {"samples": s, "meta": ("text", None, 3)})).next()
    assert pack.microbatches[0]["samples"] == samples and pack.microbatches[0]["meta"] == ("text", None, 3)


def test_describe_has_the_batch_arithmetic(context):
    provider = AutoDataProvider(Ids(100), 12, 2)
    context.num_data_ranks = 2
    provider.setup(context, 0)
    described = provider.describe()
    assert (described["global_batch_size"], described["microbatch_size"], described["accumulation"]) == (12, 2, 3)
    assert (described["num_packs"], described["dataset_size"]) == (9, 100)
    assert provider.hparams()["global_batch_size"] == 12


@pytest.mark.parametrize(
    ("size", "micro", "ranks", "numbers"),
    [(6, None, 4, ["6", "4"]), (2, None, 4, ["2", "4"]), (8, 16, 1, ["8", "16"]), (8, 2, 3, ["8", "2", "3"]), (6, 4, 1, ["6", "4"])],
)
def test_sizes_that_do_not_divide_are_refused_with_all_numbers(context, size, micro, ranks, numbers):
    """B142."""
    context.num_data_ranks = ranks
    with pytest.raises(ValueError, match="global_batch_size") as error:
        AutoDataProvider(Ids(100), size, micro).setup(context, 0)
    assert all(number in str(error.value) for number in numbers)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AutoDataProvider(Ids(0), 4), ["empty", "dataset="]),
        (lambda: AutoDataProvider(Ids(3), 4, drop_last=True), ["3", "4", "drop_last"]),
        (lambda: AutoDataProvider(Ids(3), 0), ["global_batch_size", "0"]),
        (lambda: AutoDataProvider(Ids(3), 2.5), ["global_batch_size", "2.5"]),
        (lambda: AutoDataProvider(Ids(3), True), ["global_batch_size", "True"]),
        (lambda: AutoDataProvider(Ids(3), 2, -1), ["microbatch_size", "-1"]),
        (lambda: AutoDataProvider(Ids(3), 2, num_workers=-1), ["num_workers", "-1"]),
        (lambda: AutoDataProvider(Ids(3), 2, prefetch_factor=0), ["prefetch_factor", "0"]),
        (lambda: AutoDataProvider(Ids(3), 2, collate_fn="stack"), ["collate_fn", "stack"]),
        (lambda: AutoDataProvider(NoLength(), 2), ["NoLength", "data=iterable"]),
        (lambda: AutoDataProvider(NoLength, 2), ["NoLength", "data=iterable"]),
        (lambda: AutoDataProvider(iter([1]), 2), ["list_iterator", "data=iterable"]),
        (lambda: AutoDataProvider({"train": Ids(3), "test": Ids(3)}, 2), ["train", "test", "mapping"]),
        (lambda: as_provider(AutoDataProvider(Ids(3), 2), accumulate=4), ["accumulate=4", "global_batch_size"]),
    ],
)
def test_bad_data_and_settings_are_refused_before_the_first_step(context, make, words):
    with pytest.raises(ConfigurationError) as error:
        make().setup(context, 0)
    assert all(word in str(error.value) for word in words)


def test_packs_before_setup_are_an_error():
    with pytest.raises(StateError, match="setup"):
        next(AutoDataProvider(Ids(3), 2).packs(None))


def test_errors_keep_their_traceback_and_name_the_samples(open_stream):
    """B103 without workers: the error of the dataset itself, and which samples were asked for."""
    stream = open_stream(AutoDataProvider(Fails(8), 4, 2))
    assert stream.next() is not None
    with pytest.raises(ValueError, match="sample is broken") as error:
        stream.next()
    text = "".join(traceback.format_exception(error.value))
    assert "in __getitem__" in text and "[4, 5]" in text

    def collate(samples):
        raise KeyError("no x")

    with pytest.raises(KeyError, match="no x") as error:
        open_stream(AutoDataProvider(Ids(8), 4, 2, collate_fn=collate)).next()
    text = "".join(traceback.format_exception(error.value))
    assert "in collate" in text and "[0, 1]" in text


def test_settings_without_effect_are_reported(context, caplog):
    with caplog.at_level(logging.WARNING):
        AutoDataProvider(Ids(4), 2, pin_memory=True, persistent_workers=False).setup(context, 0)
    assert "pin_memory=True has no effect" in caplog.text and "num_workers=" in caplog.text


def test_data_ranks_hold_different_samples_of_the_same_step():
    """Contracts 15 and 16: ranks with one data rank number get the same pack, the others the rest of the global batch."""
    device, got = torch.device("cpu"), []
    for rank in (0, 0, 1):
        provider = AutoDataProvider(Ids(16), 8, 2, shuffle=True)
        provider.setup(SimpleNamespace(device=device, data_rank=rank, num_data_ranks=2, is_main=rank == 0), 3)
        got.append([torch.cat(p.microbatches).tolist() for p in provider.packs(None)])
    assert got[0] == got[1]
    assert sorted(x for pack in got[0] + got[2] for x in pack) == list(range(16))
