"""The key-value store that all ranks reach: where it comes from, and waiting for keys in it.

Keys outlive the processes that wrote them where the launcher's agent hosts the store, so every attempt and every context writes under a
prefix of its own.
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


def agent_hosts_store() -> bool:
    """Whether the launcher's agent runs the store; it then lives through restarts of the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(place: Place, attempt: str, timeout: timedelta) -> Store:
    """A connection to the store at MASTER_ADDR:MASTER_PORT, under a prefix for this attempt; rank 0 runs it if nobody else does.

    Without the prefix, gloo finds the addresses of the ranks of a dead attempt after a restart.
    """
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    is_master = place.rank == 0 and not agent_hosts_store()
    try:
        store = dist.TCPStore(
            address, int(port), None, is_master, timeout=timeout, wait_for_workers=False, multi_tenant=not agent_hosts_store()
        )
    except (ValueError, dist.DistNetworkError) as error:
        doing = "open" if is_master else "reach"
        raise ConfigurationError(
            f"rank {place.rank} could not {doing} the store at MASTER_ADDR={address}, MASTER_PORT={port}: {error}; "
            "usual causes: another run uses the port, or rank 0 did not start"
        ) from error
    return dist.PrefixStore(attempt, store)


def poll(store: Store, keys: Sequence[str], deadline: float, check: Callable[[], None]) -> bool:
    """Wait until all keys are there; False if they are not at `deadline`. `check` is called in between and may raise.

    Asked again and again rather than waited for: a wait holds the connection, ignores Ctrl-C, and prints warnings when its time is up.
    """
    pause = 0.0005
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return False
        check()
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True
