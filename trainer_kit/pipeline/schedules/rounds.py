"""Rounds: the groups of microbatches that go through all stages of a rank before the next group does.

Shared by the looped schedules; knows only numbers.
"""

from __future__ import annotations

from itertools import pairwise


def rounds(num_ranks: int, num_microbatches: int) -> list[range]:
    """The microbatches of each round: as many rounds as have at least `num_ranks` microbatches each, sizes as equal as possible.

    A round shorter than the number of ranks would leave a bubble when it passes from the last rank to the first. Larger rounds come
    first: then no backward is due before its forward, however the rest falls.
    """
    number = max(1, num_microbatches // num_ranks)
    size, longer = divmod(num_microbatches, number)
    starts = [index * size + min(index, longer) for index in range(number + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
