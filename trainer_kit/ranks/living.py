"""The rank's side of `trainer_kit.testing`: a loop that does one job after the other, each from the same starting point.

Nothing of one job may reach the next: random state, environment, folder, warning filters and defaults of torch are set for each. The
process group stays, which makes jobs fast, until the parent says otherwise.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import operator
import os
import pickle
import random
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from trainer_kit.ranks.calls import Call, Place, find, load, place_of
from trainer_kit.ranks.environment import ADDRESS
from trainer_kit.ranks.outcomes import Raised, Returned, raised
from trainer_kit.torch_private import forget_meshes

Filter = tuple[str, Any, tuple[Place, str], Any, int]  # as in warnings.filters, with the place and name of the category
DUMP_STACKS = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # nobody else uses it
_CONNECT_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Surroundings:
    """What a job finds: environment, folder, path of imports, warning filters (`describe_filters`)."""

    environment: Mapping[str, str]
    folder: str
    path: list[str]
    filters: Sequence[Filter]


@dataclass(frozen=True)
class Job:
    """One call on rank `rank` of `num_ranks`. call: None leaves the process group and does nothing else."""

    call: Call | None
    rank: int
    num_ranks: int
    port: int
    surroundings: Surroundings


class _Group:
    """The default process group of this rank. It stays from job to job until the parent asks all ranks to leave it."""

    def __init__(self) -> None:
        self._world: Any = None

    def enter(self, job: Job) -> None:
        """Make it, with the other ranks of the job, if there is none."""
        if self._world is None:
            store = dist.TCPStore(ADDRESS, job.port, is_master=False, timeout=_CONNECT_TIMEOUT)
            dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.num_ranks)
            self._world = dist.group.WORLD

    def is_intact(self) -> bool:
        """Whether the job left it as it was."""
        return dist.is_initialized() and dist.group.WORLD is self._world

    def leave(self) -> None:
        """Destroy it, with all other groups and what torch remembers of them."""
        self._world = None
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        gc.collect()  # meshes and groups of earlier jobs that sit in cycles hold threads and sockets


def serve(connection: Connection) -> None:
    """Do jobs until the parent closes the connection."""
    faulthandler.enable(2)
    faulthandler.register(DUMP_STACKS, 2)
    group = _Group()
    while True:
        try:
            data = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            os._exit(0)  # without waiting for threads and groups that jobs left behind
        answer = pickle.dumps(_do(pickle.loads(data), group))
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(answer)


def _do(job: Job, group: _Group) -> Returned | Raised:
    try:
        if job.call is None:
            group.leave()
            return Returned(b"")
        _settle(job.surroundings)
        group.enter(job)
        function, arguments = find(job.call)
        value = function(*arguments)
        return Returned(pickle.dumps(value), group.is_intact())
    except BaseException as error:  # an exit or interrupt of the job ends the job, not the rank
        return raised(error)


def _settle(here: Surroundings) -> None:
    """The same start for every job."""
    os.chdir(here.folder)
    if os.environ != here.environment:
        os.environ.clear()
        os.environ.update(here.environment)
    sys.path[:] = here.path
    importlib.invalidate_caches()
    restore_filters(here.filters)
    gc.enable()
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def describe_filters() -> list[Filter]:
    """The warning filters of this process, for another one; without those of pytest, whose categories would import it there."""
    described = []
    for action, message, category, module, line in warnings.filters:
        assert isinstance(category, type)
        if not category.__module__.startswith(("pytest", "_pytest")):
            described.append((action, message, (place_of(sys.modules[category.__module__]), category.__qualname__), module, line))
    return described


def restore_filters(described: Sequence[Filter]) -> None:
    """Make the filters those that were described."""
    filters = [
        (action, message, operator.attrgetter(name)(load(place)), module, line)
        for action, message, (place, name), module, line in described
    ]
    warnings.resetwarnings()  # makes warnings that were shown once count as new
    warnings.filters[:] = filters  # type: ignore[index]
