"""Worker processes: same data for any number of them, none left behind, errors in sight."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from trainer_kit.data import AutoDataProvider

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Noisy:
    """Random augmentation from all three streams, as python floats."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index + (random.random() + torch.rand(()).item() + numpy.random.rand()) / 4


class Fails:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("sample is broken")
        return index


class ProcessIds:
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return os.getpid()


def test_augmentation_depends_on_the_position_alone_and_persistent_workers_leave(open_stream, take):
    """B106, contracts 17 and 18: 1 and 2 workers, persistent or not, straight or resumed; the run's streams stay untouched."""
    before = torch.get_rng_state(), random.getstate()
    straight = open_stream(AutoDataProvider(Noisy(), 4, 2, shuffle=True, num_workers=2), max_epochs=2)
    reference = take(straight)
    assert len(multiprocessing.active_children()) == 2
    straight.close()
    assert multiprocessing.active_children() == []
    assert len({x for pack in reference for x in pack}) == 20
    other = AutoDataProvider(Noisy(), 4, 2, shuffle=True, num_workers=1, persistent_workers=False)
    first = open_stream(other, prefetch=1, max_epochs=2)
    head = take(first, 4)
    first.close()
    rest = take(open_stream(other, max_epochs=2, state=first.state_dict()))
    assert head + rest == reference
    assert multiprocessing.active_children() == [], "workers that do not persist leave with the epoch"
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_error_of_a_worker_comes_when_its_pack_is_due(open_stream, take, prefetch):
    """B103 and contract 18: packs before it are seen once, the text has the worker's own traceback and the samples."""
    stream = open_stream(AutoDataProvider(Fails(), 2, num_workers=2), prefetch=prefetch)
    assert take(stream, 2) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="sample is broken") as error:
        stream.next()
    assert "in __getitem__" in str(error.value) and "[4, 5]" in str(error.value)
    assert multiprocessing.active_children() == []


# torch does not close the file of a tensor of which it had received only a part
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("data", [AutoDataProvider(ProcessIds(), 1, num_workers=1), DataLoader(ProcessIds(), num_workers=1)])
def test_a_killed_worker_is_an_error(open_stream, data):
    """B106: killed after the second pack."""
    stream = open_stream(data)
    for _ in range(2):
        pid = stream.next().microbatches[0].item()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=str(pid)):
        for _ in range(10):
            stream.next()
    stream.close()
    assert multiprocessing.active_children() == []


def test_persistent_workers_of_a_users_loader_leave_at_the_end_and_come_back(open_stream, take):
    """B106, with a DataLoader that its owner iterates afterwards."""
    loader = DataLoader(range(4), batch_size=2, num_workers=1, persistent_workers=True)
    stream = open_stream(loader, max_epochs=2)
    assert take(stream, 3) == [[0, 1], [2, 3], [0, 1]]
    stream.close()
    assert multiprocessing.active_children() == []
    assert take(stream) == [[2, 3]]
    stream.close()
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    open_stream(loader).close()


def test_a_worker_ignores_an_interrupt(open_stream):
    """A terminal sends Ctrl-C to every process of its foreground group; the trainer's own decides what it means."""
    for data in (AutoDataProvider(ProcessIds(), 1, num_workers=1), DataLoader(ProcessIds(), num_workers=1)):
        stream = open_stream(data)
        pid = stream.next().microbatches[0].item()
        os.kill(pid, signal.SIGINT)
        assert [stream.next().microbatches[0].item() for _ in range(20)] == [pid] * 20
        stream.close()


def test_a_users_loader_keeps_its_own_start_of_a_worker(open_stream, take):
    """It runs too, and workers that the user starts afterwards are as without us."""
    def start(worker_id):
        os.environ["STARTED_BY"] = f"worker {worker_id}"

    class Started:
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return os.environ.get("STARTED_BY") == "worker 0", signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    loader = DataLoader(Started(), num_workers=1, worker_init_fn=start)
    ((started, ignores),) = open_stream(loader).next().microbatches
    assert started.item() and ignores.item()
    assert loader.worker_init_fn is start
    ((started, ignores),) = list(loader)
    assert started.item() and not ignores.item()
