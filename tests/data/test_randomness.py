"""fork_random: keyed inside, nothing outside."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from trainer_kit.data import fork_random


def draw():
    return random.random(), random.gauss(0, 1), torch.rand(()).item(), numpy.random.rand(), numpy.random.randn()


def draw_after(*between):
    random.seed(1)
    torch.manual_seed(1)
    numpy.random.seed(1)
    first = draw()  # leaves second normals behind in python's and numpy's caches
    for key in between:
        with fork_random(*key):
            draw()
    return first, draw()


def test_streams_go_on_as_if_the_block_had_not_run():
    assert draw_after(("a",), ("b",)) == draw_after()


def test_the_block_draws_by_its_key_alone():
    drawn = []
    for key in [(0, "x", 1), (0, "x", 2), (1, "x", 1), (0, "x", 1)]:
        torch.rand(3)
        with fork_random(*key):
            drawn.append(draw())
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3


def test_an_error_in_the_block_restores_too():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="inside"), fork_random("key"):
        torch.rand(1)
        raise ValueError("inside")
    assert torch.equal(torch.get_rng_state(), before)
