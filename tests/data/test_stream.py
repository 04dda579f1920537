"""DataStream: epochs, lookahead, errors, and providers of one's own."""

from __future__ import annotations

import logging
import random
import traceback

import pytest
import torch

from trainer_kit.data import AutoDataProvider, DataProvider, Pack
from trainer_kit.exceptions import ConfigurationError


class Lists(DataProvider):
    """Plain lists of microbatches, with noise, three per epoch; notes what it was asked for."""

    def __init__(self):
        self.positions = []

    def packs(self, position):
        self.positions.append(position)
        for i in range(3):
            yield [torch.tensor([i + random.random() / 2], dtype=torch.float64)]


class Documents(DataProvider):
    """Positions of its own, whose last one does not say that the epoch is over, and no numbers of epochs."""

    def packs(self, position):
        for line in range((position or {}).get("line", 0), 3):
            yield Pack([torch.tensor([line])], position={"line": line + 1})


class Fixed(DataProvider):
    def __init__(self, *packs):
        self.given = packs

    def packs(self, position):
        return iter(self.given)


class FailsOnce:
    """Sample 2 can be read at the second try only."""

    failures = 1

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2 and self.failures:
            self.failures -= 1
            raise OSError("disk is gone")
        return index


class Noisy:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index + torch.rand(()).item() / 2


class Counted:
    def __init__(self):
        self.read = 0

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.read += 1
        return index


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_lookahead_has_depth_packs_under_way_and_stops_at_the_end(open_stream, depth):
    data = Counted()
    stream = open_stream(AutoDataProvider(data, 1), prefetch=depth, max_epochs=1)
    assert data.read == 0
    for step in range(6):
        stream.next()
        assert data.read == min(6, step + 1 + depth)
    assert stream.next() is None


def test_fetching_ahead_changes_no_random_number(open_stream, take):
    """Contract 17: the same augmentation for every depth above 0, and the run's streams stay untouched."""
    torch.manual_seed(0)
    before = torch.get_rng_state(), random.getstate()
    noise = [take(open_stream(AutoDataProvider(Noisy(), 2, shuffle=True), prefetch=depth, max_epochs=2)) for depth in (1, 2, 3)]
    assert noise[0] == noise[1] == noise[2]
    assert len({x for pack in noise[0] for x in pack}) == 12
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_error_is_raised_when_its_pack_is_due_and_can_be_tried_again(open_stream, take, depth):
    """B103 and contract 18: nothing is lost, nothing comes twice, the traceback is that of the dataset."""
    stream = open_stream(AutoDataProvider(FailsOnce(), 1), prefetch=depth, max_epochs=1)
    assert take(stream, 2) == [[0], [1]]
    with pytest.raises(OSError, match="disk is gone") as error:
        stream.next()
    assert "in __getitem__" in "".join(traceback.format_exception(error.value))
    assert take(stream) == [[2], [3]]


def test_ctrl_c_while_fetching_ahead_is_raised_at_once_and_loses_nothing(open_stream, take):
    def collate(samples):
        if samples == [1] and interrupts:
            raise interrupts.pop()
        return torch.tensor(samples)

    interrupts = [KeyboardInterrupt()]
    stream = open_stream(AutoDataProvider(range(3), 1, collate_fn=collate), prefetch=1, max_epochs=1)
    with pytest.raises(KeyboardInterrupt):
        stream.next()
    assert take(stream) == [[0], [1], [2]]


@pytest.mark.parametrize("depth", [0, 2])
def test_plain_lists_are_counted_and_resumed_by_skipping(open_stream, take, caplog, depth):
    provider = Lists()
    reference_stream = open_stream(provider, prefetch=depth, max_epochs=3)
    random.seed(0)
    reference = take(reference_stream)
    assert [int(p[0]) for p in reference] == [0, 1, 2] * 3
    assert provider.positions == [None, {"epoch": 1}, {"epoch": 2}]
    random.seed(0)
    first = open_stream(Lists(), prefetch=depth, max_epochs=3)
    head, state, streams = take(first, 5), first.state_dict(), random.getstate()
    assert state == {"epoch": 1, "packs": 2, "position": None}
    with caplog.at_level(logging.WARNING):
        second = open_stream(Lists(), prefetch=depth, max_epochs=3, state=state)
        random.setstate(streams)
        assert head + take(second) == reference
    assert caplog.text.count("dropping 2 packs") == 1


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("stop", range(7))
def test_a_provider_that_does_not_count_epochs_gets_them_counted(open_stream, depth, stop):
    """B13 and contract 17, with positions whose end of an epoch shows only when nothing follows."""

    def read(stream):
        return [(pack.epoch, pack.microbatches[0].item()) for pack in iter(stream.next, None)]

    first = open_stream(Documents(), prefetch=depth, max_epochs=2)
    head = [(pack.epoch, pack.microbatches[0].item()) for pack in (first.next() for _ in range(stop))]
    second = open_stream(Documents(), prefetch=depth, max_epochs=2, state=first.state_dict())
    assert second.epoch == first.epoch
    assert head + read(second) == [(epoch, line) for epoch in (0, 1) for line in (0, 1, 2)]


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5])
def test_overfitting_cycles_through_the_first_packs(open_stream, take, stop):
    provider = AutoDataProvider(Noisy(), 2, shuffle=True)
    reference = take(open_stream(provider, overfit_packs=2, max_epochs=3))
    assert reference == reference[:2] * 3
    first = open_stream(provider, overfit_packs=2, max_epochs=3)
    head = take(first, stop)
    torch.manual_seed(99)
    assert head + take(open_stream(provider, overfit_packs=2, max_epochs=3, prefetch=1, state=first.state_dict())) == reference


def test_overfitting_on_more_packs_than_there_are_takes_all(open_stream, take):
    stream = open_stream(AutoDataProvider(range(3), 1), overfit_packs=10, max_epochs=2)
    assert take(stream) == [[0], [1], [2]] * 2


@pytest.mark.parametrize(
    ("provider", "words"),
    [
        (Fixed(), ["Fixed gave no pack in epoch 0"]),
        (Fixed([]), ["Fixed.packs", "without microbatches"]),
        (Fixed(Pack([], 0)), ["Fixed.packs", "without microbatches"]),
        (Fixed((torch.zeros(1), torch.zeros(1))), ["Fixed.packs", "tuple", "[microbatch]"]),
        (Fixed(torch.zeros(1)), ["Fixed.packs", "Tensor"]),
    ],
)
@pytest.mark.parametrize("overfit", [0, 1])
def test_providers_that_give_no_packs_are_named(open_stream, provider, words, overfit):
    with pytest.raises(ConfigurationError) as error:
        open_stream(provider, overfit_packs=overfit).next()
    assert all(word in str(error.value) for word in words)


def test_a_provider_without_packs_method_is_named(open_stream):
    with pytest.raises(NotImplementedError, match="DataProvider must define packs"):
        open_stream(DataProvider()).next()


def test_a_cpu_stream_hands_out_the_very_objects_of_the_provider(open_stream):
    """Contract 19: nothing is rebuilt where nothing has to move."""
    batch = {"x": torch.zeros(2), "names": ["a", "b"]}
    assert open_stream([batch]).next().microbatches[0] is batch


@pytest.mark.parametrize("depth", [0, 2])
def test_only_tensors_move_to_a_device(open_stream, depth):
    """Contract 19, on the meta device, which needs no hardware."""
    name = object()
    stream = open_stream([{"x": torch.zeros(2), "deep": [(torch.zeros(1), name)], "id": 3}], prefetch=depth, device=torch.device("meta"))
    batch = stream.next().microbatches[0]
    assert batch["x"].device.type == batch["deep"][0][0].device.type == "meta"
    assert batch["deep"][0][1] is name and batch["id"] == 3
