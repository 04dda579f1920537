"""The key-value store that all ranks reach: where it comes from, and waiting for keys in it.

Keys outlive the processes that wrote them where the launcher's agent hosts the store, so every attempt (`attempt.py`) and every context
writes under a prefix of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from trainer_kit.exceptions import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed import Store

    from trainer_kit.mesh.place import Place


# Stores that this process runs, until its end: other ranks may come back for the next run before this one has left the last.
_hosted: dict[tuple[str, str], Store] = {}


def agent_hosts_store() -> bool:
    """Whether the launcher's agent runs the store; it then lives through restarts of the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(place: Place, timeout: timedelta) -> Store:
    """A connection to the store at MASTER_ADDR:MASTER_PORT; rank 0 runs it if nobody else does."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    shared = agent_hosts_store()
    hosts = place.rank == 0 and not shared
    try:
        store = dist.TCPStore(address, int(port), None, hosts, timeout=timeout, wait_for_workers=False, multi_tenant=not shared)
    except (ValueError, dist.DistNetworkError) as error:
        doing = "open" if hosts else "reach"
        raise ConfigurationError(
            f"rank {place.rank} could not {doing} the store at MASTER_ADDR={address}, MASTER_PORT={port}: {error}; "
            "usual causes: another run uses the port, or rank 0 did not start"
        ) from error
    if hosts:
        _hosted[address, port] = store
    return store


def poll(store: Store, keys: Sequence[str], deadline: float, check: Callable[[], None] | None = None) -> bool:
    """Wait until all keys are there; False if they are not at `deadline`. `check` is called in between and may raise.

    Asked again and again rather than waited for: a wait holds the connection, ignores Ctrl-C, and prints warnings when its time is up.
    """
    pause = 0.0005
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return False
        if check is not None:
            check()
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True
