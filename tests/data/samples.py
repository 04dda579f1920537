"""A dataset that the data tests share, also in the jobs of ranks."""

from __future__ import annotations


class Ids:
    """Sample i is the number i; notes which ones were asked for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index
