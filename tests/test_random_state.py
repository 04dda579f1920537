"""The random streams of a run: kept apart from the caller's, captured and restored bit by bit."""

import hashlib
import random

import numpy as np
import pytest
import torch

from tests.support import MeanTask, Scalar, quiet_trainer, sgd
from trainer_kit.checkpoint import flatten_state, unflatten_state
from trainer_kit.random_state import RandomStreams, capture, derive_seed, forked, restore, seed_all

CPU = torch.device("cpu")


def draw() -> list[float]:
    """One number of each stream, and one that python and numpy make in pairs."""
    return [random.random(), random.gauss(0, 1), torch.rand(()).item(), np.random.rand(), np.random.randn()]


@pytest.fixture(autouse=True)
def streams():
    with forked(CPU):
        yield


def test_a_derived_seed_is_a_function_of_its_key():
    """The first 63 bits of BLAKE2b over the text of the key: the same in every process, whatever PYTHONHASHSEED is."""
    text = hashlib.blake2b(b"(3, 'module', 'layers.0')", digest_size=8).digest()
    assert derive_seed(3, "module", "layers.0") == int.from_bytes(text, "little") >> 1
    seeds = {
        derive_seed(0, "a"),
        derive_seed("0", "a"),
        derive_seed(1, "a"),
        derive_seed(0, "b"),
        derive_seed(0, "a", 0),
        derive_seed((0, "a")),
    }
    assert len(seeds) == 6 and all(0 <= seed < 2**63 for seed in seeds)


def test_streams_come_back_bit_by_bit():
    """B15: python's, torch's and numpy's, the second half of a pair of normal numbers included."""
    random.gauss(0, 1), np.random.randn()
    state = capture(CPU)
    expected = [draw(), draw()]
    restore(state, CPU)
    assert [draw(), draw()] == expected


def test_a_state_survives_a_checkpoint():
    """B26: it is tensors and plain values, with numpy in use too."""
    random.gauss(0, 1), np.random.randn()
    state = capture(CPU)
    expected = draw()
    restore(unflatten_state(*flatten_state(state)), CPU)
    assert draw() == expected


def test_a_stream_that_the_state_does_not_hold_goes_on():
    state = capture(CPU)
    del state["numpy"]
    before = np.random.get_state()[1].copy()
    restore(state, CPU)
    assert (np.random.get_state()[1] == before).all()


@pytest.mark.parametrize("fails", [False, True])
def test_a_fork_leaves_no_trace(fails):
    seed_all(5, CPU)
    expected = draw()
    seed_all(5, CPU)
    try:
        with forked(CPU):
            draw()
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert draw() == expected


def test_seeding_sets_every_stream_to_that_of_its_library():
    seed_all(7, CPU)
    found = [random.random(), torch.rand(()).item(), np.random.rand()]
    assert found == [
        random.Random(7).random(),
        torch.rand((), generator=torch.Generator().manual_seed(7)).item(),
        np.random.RandomState(7).rand(),
    ]


def test_a_run_has_streams_of_its_own_that_wait_while_it_does_not_step():
    """Contract 42: the caller's streams go on as if the run had not been; the run's go on where it stopped."""
    seed_all(derive_seed(3, "run"), CPU)
    ours = [draw(), draw()]
    seed_all(11, CPU)
    theirs = [draw(), draw()]
    seed_all(11, CPU)
    streams = RandomStreams(3, CPU)
    found = []
    for _ in range(2):
        streams.enter()
        found.append(draw())
        streams.leave()
        found.append(draw())
    assert found[0::2] == ours and found[1::2] == theirs


def test_leaving_twice_is_harmless():
    streams = RandomStreams(3, CPU)
    streams.enter()
    streams.leave()
    seed_all(1, CPU)
    expected = draw()
    seed_all(1, CPU)
    streams.leave()
    assert draw() == expected


def test_saved_inside_and_outside_of_a_fit_is_the_same():
    streams = RandomStreams(3, CPU)
    assert streams.state_dict() == {}
    streams.enter()
    draw()
    inside = streams.state_dict()
    streams.leave()
    seed_all(99, CPU)
    other = RandomStreams(4, CPU)
    other.load_state_dict(streams.state_dict())
    other.enter()
    assert torch.equal(torch.get_rng_state(), inside["torch"]) and list(random.getstate()[1]) == inside["python"]
    other.leave()


def test_loading_an_empty_state_starts_from_the_seed():
    """A checkpoint that was taken before the first step."""
    streams, fresh = RandomStreams(3, CPU), RandomStreams(3, CPU)
    streams.enter()
    draw()
    streams.leave()
    streams.load_state_dict({})
    found = []
    for each in (streams, fresh):
        each.enter()
        found.append(draw())
        each.leave()
    assert found[0] == found[1]


def test_loading_during_a_fit_acts_at_once():
    streams = RandomStreams(3, CPU)
    streams.enter()
    state, expected = streams.state_dict(), draw()
    streams.load_state_dict(state)
    assert draw() == expected
    streams.leave()


def test_a_run_does_not_depend_on_the_callers_streams():
    """Promise 1: the seed setting alone decides."""

    def noise(seed: int, callers: int) -> list[float]:
        seen = []

        class Noisy(MeanTask):
            def compute_loss(self, pipeline_results, state):
                seen.extend(draw())
                return pipeline_results

        seed_all(callers, CPU)
        quiet_trainer(Scalar(), Noisy(), [torch.ones(1)] * 2, seed=seed, optimizer=sgd(0.1)).fit()
        return seen

    assert noise(0, 1) == noise(0, 2) != noise(1, 1)
