"""States of schedulers as plain values, and back with the types of the live state."""

from collections import Counter, OrderedDict, defaultdict

import numpy as np
import torch

from trainer_kit.optim.plain_state import comparable, restored_like, to_plain


def same(a, b):
    return type(a) is type(b) and a == b


def test_subclasses_of_plain_types_become_plain():
    assert same(to_plain(Counter([2, 2, 5])), {2: 2, 5: 1})
    assert same(to_plain(OrderedDict(a=(1, [2]))), {"a": (1, [2])})
    assert same(to_plain({3, 1, 2}), [1, 2, 3])
    assert same(to_plain(np.float64(0.5)), 0.5) and same(to_plain(np.int64(3)), 3) and same(to_plain(True), True)
    thing = object()
    assert to_plain(thing) is thing  # left to the checkpoint, which refuses it by name


def test_the_live_value_says_what_comes_back():
    live = {
        "milestones": Counter([1]),
        "seen": {1},
        "rates": defaultdict(list),
        "nested": [{"inner": Counter()}, (frozenset(), 1)],
        "lr": None,
    }
    state = {
        "milestones": Counter([4, 4]),
        "seen": {7, 8},
        "rates": defaultdict(list, a=[1]),
        "nested": [{"inner": Counter("b")}, (frozenset([2]), 3)],
        "lr": 0.5,
        "new": [1],
    }
    restored = restored_like(live, to_plain(state))
    assert restored == state
    assert restored["milestones"][99] == 0 and restored["rates"]["z"] == []
    assert type(restored["nested"][0]["inner"]) is Counter and type(restored["nested"][1][0]) is frozenset
    assert live["milestones"] == Counter([1]) and live["rates"] == {}


def test_comparable_states_have_no_tensors():
    assert comparable({"lr": [torch.tensor(0.5)], "shape": (1, torch.tensor([1, 2]))}) == {"lr": [0.5], "shape": [1, [1, 2]]}
