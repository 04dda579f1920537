"""`distribute_layers`: even cuts, what comes before and after, costs, the best cut of all, and errors."""

import itertools
import random
import time

import pytest

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.model import distribute_layers


def sizes(*arguments, **options):
    """How many layers each stage gets; the layers are consecutive, and all of them."""
    stages = distribute_layers(*arguments, **options)
    assert [layer for stage in stages for layer in stage] == list(range(arguments[0]))
    return [len(stage) for stage in stages]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(8, 1, [8]), (8, 2, [4, 4]), (8, 4, [2, 2, 2, 2]), (3, 3, [1, 1, 1]), (1, 1, [1]), (7, 2, {3, 4}), (10, 4, {2, 3}), (61, 16, {3, 4})],
)
def test_equal_layers_are_cut_as_evenly_as_can_be(num_layers, num_stages, expected):
    """Numbers of layers differ by one at most."""
    found = sizes(num_layers, num_stages)
    assert (found if isinstance(expected, list) else set(found)) == expected and len(found) == num_stages


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(0, 0, [4, 4, 4, 4]), (1, 1, [4, 5, 4, 4]), (2, 2, [3, 5, 5, 3]), (4, 0, [1, 5, 5, 5]), (0, 3, [5, 5, 4, 2]), (100, 0, [1, 5, 5, 5])],
)
def test_embedding_and_head_count_as_layers(before, after, expected):
    """The stage with most to do decides how long a step takes, so its sum is what must be small; each stage keeps a layer."""
    found = sizes(16 if (before, after) != (1, 1) else 17, 4, before=before, after=after)
    costs = [size + before * (not index) + after * (index == 3) for index, size in enumerate(found)]
    wanted = [size + before * (not index) + after * (index == 3) for index, size in enumerate(expected)]
    assert max(costs) == max(wanted) and sorted(costs) == sorted(wanted), found


def test_costs_are_those_of_the_layers():
    """One expensive layer is alone, wherever it is."""
    assert sizes(5, 2, costs=[1, 1, 1, 1, 4]) == [4, 1]
    assert sizes(5, 3, costs=[1, 1, 9, 1, 1]) == [2, 1, 2]
    assert sizes(4, 2, costs=[0.5, 0.5, 0.5, 0.5], before=1.0) == [1, 3]


def test_no_other_cut_is_better():
    """All cuts of small models: the largest sum of a stage is the smallest that there is, and of those cuts it is the most even one."""
    drawn = random.Random(0)
    for _ in range(300):
        num_layers = drawn.randint(1, 8)
        num_stages = drawn.randint(1, num_layers)
        costs = [drawn.choice([0, 1, 1, 2, 3, 5]) for _ in range(num_layers)]
        before, after = drawn.choice([0, 0, 1, 4]), drawn.choice([0, 0, 2, 7])

        def sums(cuts, costs=costs, before=before, after=after, num_layers=num_layers):
            bounds = [0, *cuts, num_layers]
            found = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
            found[0] += before
            found[-1] += after
            return max(found), sum(value**2 for value in found)

        best = min(sums(cuts) for cuts in itertools.combinations(range(1, num_layers), num_stages - 1))
        found = list(itertools.accumulate(sizes(num_layers, num_stages, before=before, after=after, costs=costs)))[:-1]
        assert sums(found) == best, (costs, before, after, num_stages, found)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((3, 4), {}, r"num_layers=3 cannot be cut into num_stages=4.*stages_per_rank"),
        ((0, 1), {}, r"num_layers=0"),
        ((4, 0), {}, r"num_stages=0"),
        ((4, 2), {"costs": [1, 2, 3]}, r"3 costs for 4 layers"),
        ((2, 2), {"costs": [1, -2]}, r"none below 0"),
        ((2, 2), {"before": -1}, r"before=-1"),
        ((2, 2), {"after": -1}, r"after=-1"),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments, options, words):
    with pytest.raises(ConfigurationError, match=words):
        distribute_layers(*arguments, **options)


def test_large_models_are_cut_at_once():
    """Every stage's constructor asks: 256 layers in 64 stages take well below a second."""
    start = time.process_time()
    assert set(sizes(256, 64, before=0.5, after=2)) <= {1, 2, 3, 4, 5}
    assert time.process_time() - start < 3.0
