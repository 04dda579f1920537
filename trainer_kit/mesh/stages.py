"""Which stages a rank hosts: the layout, a part of every schedule.

Ranks here are places in the pipeline, 0 to num_ranks - 1, not ranks of the world; stages are numbered in the order of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from trainer_kit.exceptions import ConfigurationError

Shape = Literal["loop", "v"]


@dataclass(frozen=True)
class StageLayout:
    """`"loop"`: rank r hosts r, r + num_ranks, ...; `"v"`: the stages run down the ranks and up again, so that two stages per rank put
    the first and the last one on rank 0."""

    shape: Shape = "loop"
    num_ranks: int = 1
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        for name in ("num_ranks", "stages_per_rank"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigurationError(f"{name}={value} of a pipeline layout, expected 1 or more")

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(self._ranks())

    def _ranks(self) -> Iterator[int]:
        for turn in range(self.stages_per_rank):
            backwards = self.shape == "v" and turn % 2 == 1
            yield from reversed(range(self.num_ranks)) if backwards else range(self.num_ranks)

    def rank_of(self, stage: int) -> int:
        return self.ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the model."""
        return tuple(stage for stage, host in enumerate(self.ranks) if host == rank)
