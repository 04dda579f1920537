"""Cuts a sequence into portions, where doing all at once would take too much memory and one by one too many calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def portions(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Runs of items, in order, whose sizes are at most `limit` together; a larger item comes alone."""
    portion: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if portion and total + size > limit:
            yield portion
            portion, total = [], 0
        portion.append(item)
        total += size
    if portion:
        yield portion
