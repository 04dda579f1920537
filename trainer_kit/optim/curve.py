"""The closed formulas behind a schedule: which piece an update lies in, and its factor there. Plain numbers, no torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from trainer_kit.exceptions import ConfigurationError

Kind = Literal["linear", "cosine", "polynomial", "exponential", "constant"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The updates `first <= index < end`, on the way from the factor `start` to the factor `to`."""

    kind: Kind
    start: float
    to: float
    first: int
    end: int
    power: float = 1.0

    def factor(self, index: int) -> float:
        """The factor of an update in this piece; exactly `to` in its last one."""
        if index == self.end - 1 or self.kind == "constant":
            return self.to
        progress = (index - self.first + 1) / (self.end - self.first)
        if self.kind == "exponential":
            return self.start * (self.to / self.start) ** progress
        if self.kind == "linear":
            return self.start + (self.to - self.start) * progress
        left = (1 + math.cos(math.pi * progress)) / 2 if self.kind == "cosine" else (1 - progress) ** self.power
        return self.to + (self.start - self.to) * left


@dataclass(frozen=True)
class Curve:
    """Pieces that follow each other without gaps, the first from update 0; after the last one its value stays."""

    pieces: tuple[Piece, ...]

    @cached_property
    def _ends(self) -> list[int]:
        return [piece.end for piece in self.pieces]

    @property
    def num_updates(self) -> int:
        return self.pieces[-1].end

    def factor(self, index: int) -> float:
        """The factor of the update `index`, from 0."""
        if index < 0:
            raise ConfigurationError(f"update_index={index}, expected 0 for the first update or more")
        position = bisect_right(self._ends, index)
        return self.pieces[position].factor(index) if position < len(self.pieces) else self.pieces[-1].to
