"""Process groups by their ranks: each is made once per default process group and shared by all domains and contexts in this process.

Groups cost connections and threads, and a made one cannot be given back alone, so they are kept as long as the default group lives.
Before editing: making a group is a collective of the world, so all ranks must ask for the same groups in the same order.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from trainer_kit.mesh.domains import Domain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BACKGROUND_TIMEOUT = timedelta(hours=2)  # of saves that run while training goes on
Key = tuple[str, tuple[int, ...]]


@dataclass
class GroupCache:
    """The groups that this rank is in, by (purpose, ranks), all made under one default group."""

    timeout: timedelta
    _groups: dict[Key, ProcessGroup] = field(default_factory=dict)

    def in_step(self) -> list[ProcessGroup]:
        """The groups that the main thread uses in a step: not that of background saves, which take their time."""
        return [group for (purpose, _), group in self._groups.items() if purpose != "background"]

    def along(self, domain: Domain, *dims: str) -> ProcessGroup:
        """This rank's group over the product of these dimensions. The world's is the default group itself."""
        import torch.distributed as dist

        rank, world_size = dist.get_rank(), dist.get_world_size()
        if domain.size(*dims) == world_size:
            return dist.group.WORLD  # type: ignore[return-value]
        if domain.size(*dims) == 1:
            return self._alone(rank)
        everyone = list(domain.groups(*dims))
        mine = next(ranks for ranks in everyone if rank in ranks)
        if ("mesh", mine) not in self._groups:
            for ranks in everyone:  # torch numbers groups by the calls of all ranks, so each makes those of the others too
                group = dist.new_group(list(ranks), timeout=self.timeout, group_desc=f"{domain.name}:{'x'.join(dims)}")
                if ranks == mine:
                    self._groups["mesh", mine] = group
        return self._groups["mesh", mine]

    def _alone(self, rank: int) -> ProcessGroup:
        """A group of this rank, for mesh dimensions of size 1; nobody else takes part in making it."""
        import torch.distributed as dist

        if ("mesh", (rank,)) not in self._groups:
            group = dist.new_group([rank], timeout=self.timeout, use_local_synchronization=True, group_desc="one rank")
            self._groups["mesh", (rank,)] = group
        return self._groups["mesh", (rank,)]

    def for_host(self, purpose: Literal["host", "background"]) -> ProcessGroup:
        """A gloo group of the whole world that nothing else uses."""
        import torch.distributed as dist

        everyone = tuple(range(dist.get_world_size()))
        if (purpose, everyone) not in self._groups:
            timeout = self.timeout if purpose == "host" else BACKGROUND_TIMEOUT
            self._groups[purpose, everyone] = dist.new_group(list(everyone), timeout=timeout, backend="gloo", group_desc=purpose)
        return self._groups[purpose, everyone]


_caches: weakref.WeakKeyDictionary[ProcessGroup, GroupCache] = weakref.WeakKeyDictionary()


def groups_under(default: ProcessGroup, timeout: timedelta) -> GroupCache:
    """The groups made so far under a default process group; they die with it. New ones get this timeout."""
    cache = _caches.setdefault(default, GroupCache(timeout))
    cache.timeout = timeout
    return cache
