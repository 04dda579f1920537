"""`World`: what a run of several ranks holds open, from the process group to the store, and how it starts and ends."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.attempt import join_attempt
from trainer_kit.mesh.domains import Domain
from trainer_kit.mesh.failure import FailureWatch
from trainer_kit.mesh.groups import groups_under
from trainer_kit.mesh.hangs import explain_hang
from trainer_kit.mesh.host import GroupChannel, WorldChannel
from trainer_kit.mesh.meshes import Meshes
from trainer_kit.mesh.place import Place
from trainer_kit.mesh.stores import agent_hosts_store, open_store
from trainer_kit.mesh.timeouts import Timeouts
from trainer_kit.torch_private import abort_process_groups, default_store, forget_meshes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store


@dataclass
class _Started:
    """A default process group that was started here. It goes with the last of the worlds that use it."""

    group: ProcessGroup
    num_worlds: int = 0
    failed: bool = False  # whether a world of it ended by an error: a collective may be half done


_started: _Started | None = None  # the newest one


class World:
    """The ranks of a run. Making one is a collective; closing it is none.

    setup, step: seconds that a collective may take. backend: of torch.distributed; None: gloo, on accelerators next to their own.
    """

    def __init__(self, place: Place, domains: dict[str, Domain], device_type: str, backend: str | None, setup: float, step: float) -> None:
        import torch.distributed as dist

        timeout = timedelta(seconds=setup)
        is_new = not dist.is_initialized()
        if is_new:
            start_process_group(place, device_type, backend, timeout)
        elif backend is not None:
            _check_backend(backend)
        default = dist.group.WORLD
        assert default is not None
        self._started = _join(default, is_new)
        self._is_open = True
        groups = groups_under(default, timeout)
        host = groups.for_host("host")
        self.meshes = Meshes(domains, groups, device_type)
        self.timeouts = Timeouts(groups, default, setup, step, borrowed=not is_new)
        store = _own_store(place, host)
        self.failures = FailureWatch(
            store,
            place.rank,
            place.world_size,
            hosts_store=place.rank == 0 and not agent_hosts_store(),
            explain=explain_hang,
        )
        self.host = WorldChannel(host, store, functools.partial(groups.for_host, "background"), self.failures)

    def close(self) -> None:
        """Destroy the process groups if they were started here and no other world uses them, else leave them as they were.

        Repeated calls do nothing.
        """
        import torch.distributed as dist

        if not self._is_open:
            return
        self._is_open = False
        started = self._started
        if started is not None:
            started.num_worlds -= 1
            started.failed |= self.failures.failed
        if not dist.is_initialized() or (started is not None and (started.num_worlds or dist.group.WORLD is not started.group)):
            return
        if started is None:
            self.timeouts.give_back()
            return
        if started.failed:
            abort_process_groups()
        else:
            dist.destroy_process_group()
        forget_meshes()  # a mesh of the same shape in a new world has other groups


def _join(default: ProcessGroup, is_new: bool) -> _Started | None:
    """One world more that uses the default group; None if that was not started here."""
    global _started
    if is_new:
        _started = _Started(default)
    elif _started is None or _started.group is not default:
        return None
    _started.num_worlds += 1
    return _started


def start_process_group(place: Place, device_type: str, backend: str | None, timeout: timedelta) -> None:
    """Make the default process group from the launcher's environment."""
    import torch.distributed as dist

    if backend is None:  # host-side collectives need gloo next to what the device has
        default = dist.get_default_backend_for_device(device_type)
        backend = default if device_type == "cpu" else f"cpu:gloo,{device_type}:{default}"
    store = dist.PrefixStore("trainer_kit", open_store(place, timeout))
    store = dist.PrefixStore(join_attempt(store, place, timeout.total_seconds()), store)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)


def _check_backend(backend: str) -> None:
    """A backend that is asked for must be that of the process group that is there."""
    import torch.distributed as dist

    there = dist.get_backend_config()
    if backend not in (there, dist.get_backend()) and str(dist.BackendConfig(dist.Backend(backend))) != there:
        raise ConfigurationError(
            f"backend={backend!r} of MeshStrategy, but the default process group, which was made before, has {there!r}; leave backend out"
        )


def _own_store(place: Place, host: ProcessGroup) -> Store:
    """The default group's store under a prefix that no other context has; rank 0 chooses it."""
    import torch.distributed as dist

    store = dist.PrefixStore("trainer_kit", default_store())
    number = GroupChannel(host).broadcast(store.add("contexts", 1) if place.rank == 0 else 0)
    return dist.PrefixStore(f"context-{number}", store)
