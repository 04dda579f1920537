"""How the ranks that are alive now find each other in a store that is older than they are, and get a name that no earlier attempt had.

After a restart the store of the launcher's agent still holds what dead ranks wrote, and gloo would take their addresses from it. The
launcher's count of restarts is no name: with several nodes each agent counts its own. So each rank leaves a mark that only it can know,
and rank 0 answers it.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from trainer_kit.exceptions import StateError
from trainer_kit.mesh.calls import name_ranks
from trainer_kit.mesh.stores import poll

if TYPE_CHECKING:
    from torch.distributed import Store

    from trainer_kit.mesh.place import Place


def join_attempt(store: Store, place: Place, timeout: float) -> str:
    """The name of this attempt, the same on all ranks. Raises StateError if they are not all there within `timeout` seconds."""
    mark, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    if place.rank == 0:
        _welcome(store, place.world_size, mark, deadline, timeout)
        return mark
    store.set(f"hello/{place.rank}", mark)
    if not poll(store, [f"welcome/{mark}"], deadline):
        raise StateError(
            f"rank {place.rank} had no answer from rank 0 within {timeout:g} s; see whether all ranks started, or raise setup_timeout"
        )
    name = store.get(f"welcome/{mark}").decode()
    store.set(f"joined/{name}/{place.rank}", "")
    return name


def _welcome(store: Store, world_size: int, name: str, deadline: float, timeout: float) -> None:
    """Rank 0 answers marks until all ranks have joined. One that does not is of a dead rank, whose successor leaves another."""
    answered: dict[int, str] = {}
    waiting, pause = set(range(1, world_size)), 0.0005
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"joined/{name}/{rank}"]):
                waiting.remove(rank)
                store.delete_key(f"joined/{name}/{rank}")
                store.delete_key(f"welcome/{answered[rank]}")
            elif store.check([f"hello/{rank}"]) and answered.get(rank) != (mark := store.get(f"hello/{rank}").decode()):
                answered[rank] = mark
                store.set(f"welcome/{mark}", name)
        if waiting and time.monotonic() > deadline:
            late = name_ranks(sorted(waiting))
            raise StateError(f"{late} of {world_size} did not start within {timeout:g} s; see their output, or raise setup_timeout")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
