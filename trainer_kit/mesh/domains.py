"""The domains: arrangements of all ranks into named mesh dimensions, as pure arithmetic.

Every domain holds the same ranks in the same row-major order and only cuts them into other dimensions, so that one rank's place in one
domain follows from its place in another. Not here: process groups and meshes. Before editing: parameters, checkpoints and gradient
contracts carry the names of these dimensions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer_kit.exceptions import ConfigurationError

if TYPE_CHECKING:
    from trainer_kit.mesh.strategy import MeshStrategy

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp_shard", "cp_replicate", "tp")  # of a strategy; their product is the world


@dataclass(frozen=True, slots=True)
class Domain:
    """Names and sizes of the dimensions, outermost first. Rank r is at the r-th place in row-major order."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks, the same for all domains of a strategy."""
        return math.prod(self.shape)

    def size(self, *dims: str) -> int:
        """The number of ranks along the product of these dimensions."""
        return math.prod(self.shape[self._index(dim)] for dim in dims)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank along each dimension."""
        place = {}
        for dim, size in zip(reversed(self.dims), reversed(self.shape), strict=True):
            rank, place[dim] = divmod(rank, size)
        return {dim: place[dim] for dim in self.dims}

    def coordinate(self, rank: int, *dims: str) -> int:
        """The place of a rank along the product of these dimensions, the last one varying fastest."""
        place, total = self.coordinates(rank), 0
        for dim in dims:
            total = total * self.shape[self._index(dim)] + place[dim]
        return total

    def groups(self, *dims: str) -> Iterator[tuple[int, ...]]:
        """The ranks of each group along the product of these dimensions, in ascending order; every rank is in exactly one."""
        along = {self._index(dim) for dim in dims}
        strides = [math.prod(self.shape[index + 1 :]) for index in range(len(self.shape))]
        inside = _offsets([(self.shape[index], strides[index]) for index in sorted(along)])
        for start in _offsets([(self.shape[index], strides[index]) for index in range(len(self.shape)) if index not in along]):
            yield tuple(start + offset for offset in inside)

    def _index(self, dim: str) -> int:
        if dim not in self.dims:
            raise ConfigurationError(f"the domain {self.name!r} has no dimension {dim!r}; its dimensions are {', '.join(self.dims)}")
        return self.dims.index(dim)


def _offsets(axes: Sequence[tuple[int, int]]) -> list[int]:
    """Row-major offsets of the places along axes of (size, stride)."""
    return [sum(place) for place in itertools.product(*(range(0, size * stride, stride) for size, stride in axes))]


def domains_of(strategy: MeshStrategy) -> dict[str, Domain]:
    """The domains by name; every degree must be given. Raises ConfigurationError if `ep` does not divide the ranks of a pipeline stage."""
    d, all_sizes = strategy, tuple(getattr(strategy, name) for name in DEGREES)
    replicate, shard, expert = _expert_sizes(d)
    found = (
        Domain("regular", DEGREES, all_sizes),
        Domain(
            "dense",
            ("pp", "dp_replicate", "dp_cp_shard", "cp_replicate", "tp"),
            (d.pp, d.dp_replicate, d.dp_shard * d.cp_shard, d.cp_replicate, d.tp),
        ),
        Domain("expert", ("pp", "ep_replicate", "ep_shard", "ep"), (d.pp, replicate, shard, expert)),
        Domain("batch", ("pp", "dp", "cp", "tp"), (d.pp, d.dp_replicate * d.dp_shard, d.cp_shard * d.cp_replicate, d.tp)),
        Domain("flat", ("world",), (math.prod(all_sizes),)),
    )
    return {domain.name: domain for domain in found}


def _expert_sizes(degrees: MeshStrategy) -> tuple[int, int, int]:
    """How the ranks of a stage are cut for experts: `ep` innermost, replicas kept where that goes, the rest shards by FSDP."""
    inner = degrees.dp_shard * degrees.cp_shard * degrees.cp_replicate * degrees.tp
    if inner % degrees.ep == 0:
        return degrees.dp_replicate, inner // degrees.ep, degrees.ep
    per_stage = degrees.dp_replicate * inner
    if per_stage % degrees.ep:
        product = " x ".join(f"{name} {getattr(degrees, name)}" for name in DEGREES if name != "pp")
        raise ConfigurationError(
            f"ep={degrees.ep} of MeshStrategy does not divide the {per_stage} ranks of a pipeline stage ({product}); change one of them"
        )
    return 1, per_stage // degrees.ep, degrees.ep
