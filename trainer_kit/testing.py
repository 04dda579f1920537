"""`run_on_ranks`: a function on several gloo ranks of this machine, in milliseconds, because the ranks stay from call to call.

For tests of models, tasks and callbacks on a mesh; works with pytest and without. Not for training: see `trainer_kit.launch`.
Before editing: whenever it is not certain that nothing of a job is left in a rank, the ranks are killed and the next job gets new ones.
"""

from __future__ import annotations

import atexit
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import IO, Any

from trainer_kit.exceptions import ConfigurationError, StateError
from trainer_kit.ranks.calls import Call, make_call
from trainer_kit.ranks.child import inside_rank
from trainer_kit.ranks.collecting import collect
from trainer_kit.ranks.environment import ADDRESS, rank_environment
from trainer_kit.ranks.living import DUMP_STACKS, Job, Surroundings, describe_filters
from trainer_kit.ranks.outcomes import Hung, Outcome, Raised, Returned, results
from trainer_kit.ranks.processes import Rank, Template, import_path

_LEAVE_TIMEOUT = 3.0  # seconds for the ranks to take down their group after an error
_DUMP_TIMEOUT = 1.0  # seconds for hanging ranks to say where they are
_MAX_OUTPUT = 20_000  # bytes of what a rank printed, from the end
_MAX_JOBS = 100  # with one process group: the groups that jobs add to it hold threads and sockets


def run_on_ranks(num_ranks: int, job: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """The results of `job(*args)` by rank, from `num_ranks` gloo ranks of this machine.

    job: a function at the top level of a module. In a rank the default process group exists and the launcher's variables are set, so
    `MeshStrategy(...).build()` and `Trainer(...)` work. Every job begins with the same random state, the defaults of torch, one thread,
    and the environment, folder and warning filters of the caller. Arguments and results are pickled, tensors by value.
    timeout: seconds for the job.

    Raises StateError if a rank raised, died or did not come back in time: with the first error and its traceback, where the other ranks
    hung, and what was printed; its `__cause__` is the rank's error. Raises ConfigurationError for a job that can't be sent.
    """
    if num_ranks < 1:
        raise ConfigurationError(f"run_on_ranks got num_ranks={num_ranks}; expected at least 1")
    if inside_rank():
        raise StateError(
            'run_on_ranks was called in a rank. Usual cause: a script that calls it without `if __name__ == "__main__":`; '
            "ranks import the script to find the job"
        )
    return _pool().run(num_ranks, make_call("run_on_ranks", job, args), timeout)


class Pool:
    """Ranks that stay, for one job at a time. `run_on_ranks` uses one for the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._template: Template | None = None
        self._ranks: list[Rank] = []
        self._outputs: list[IO[bytes]] = []
        self._num_ranks = 0  # in the process group of the last job; 0: the next job needs a new group
        self._num_jobs = 0  # with this group
        self._store: Any = None

    def run(self, num_ranks: int, call: Call, timeout: float) -> list[Any]:
        """See `run_on_ranks`."""
        with self._lock:
            try:
                self._prepare(num_ranks)
                outcomes = self._ask(call, num_ranks, timeout)
                printed = {number: self._printed(number)[-_MAX_OUTPUT:].decode(errors="replace") for number in outcomes}
                outcomes = self._with_stacks(outcomes)
                self._trust(outcomes)
            except BaseException:  # Ctrl-C, for one: the ranks are in the middle of a job
                self._kill()
                raise
        return results(call.qualname, outcomes, printed)

    def _prepare(self, num_ranks: int) -> None:
        """Enough living ranks, and a store for a new process group if they need one."""
        if any(not rank.is_alive() for rank in self._ranks):
            self._kill()
        if num_ranks != self._num_ranks or self._num_jobs == _MAX_JOBS:
            self._leave_group()
        if self._template is None or not self._template.is_alive():
            self._template = Template(os.environ | {"OMP_NUM_THREADS": "1"})
        while len(self._ranks) < num_ranks:
            self._outputs.append(tempfile.TemporaryFile())  # noqa: SIM115  # closed with its rank
            self._ranks.append(self._template.fork("trainer_kit.ranks.living:serve", self._outputs[-1].fileno()))
        self._num_jobs += 1
        if num_ranks != self._num_ranks:
            from torch.distributed import TCPStore

            self._store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)  # with no key of an earlier group in it
            self._num_ranks, self._num_jobs = num_ranks, 1

    def _ask(self, call: Call | None, num_ranks: int, timeout: float) -> dict[int, Outcome]:
        """Send a call to the first ranks and wait. None: they leave their process group."""
        ranks = dict(enumerate(self._ranks[:num_ranks]))
        folder, path, filters = os.getcwd(), import_path(), describe_filters()
        for number, rank in ranks.items():
            os.ftruncate(self._outputs[number].fileno(), 0)
            os.lseek(self._outputs[number].fileno(), 0, os.SEEK_SET)  # for the rank too: it is the same open file
            environment = rank_environment(os.environ, number, num_ranks, self._store.port)
            here = Surroundings(environment, folder, path, filters)
            rank.send(pickle.dumps(Job(call, number, num_ranks, self._store.port, here)))
        return collect(ranks, timeout)

    def _trust(self, outcomes: dict[int, Outcome]) -> None:
        """Decide what the next job can use again."""
        if any(not isinstance(outcome, Returned | Raised) for outcome in outcomes.values()):
            self._kill()
        elif any(not isinstance(outcome, Returned) or not outcome.intact for outcome in outcomes.values()):
            self._leave_group()

    def _leave_group(self) -> None:
        """All ranks take down their groups, or are ended if they can't: a collective that a job left half done would hang the next one."""
        if self._num_ranks:
            left = self._ask(None, len(self._ranks), _LEAVE_TIMEOUT)
            self._num_ranks = 0
            if not all(isinstance(outcome, Returned) for outcome in left.values()):
                self._kill()

    def _with_stacks(self, outcomes: dict[int, Outcome]) -> dict[int, Outcome]:
        """With where the hanging ranks are, as their fault handlers print it."""
        hung = {number: outcome for number, outcome in outcomes.items() if isinstance(outcome, Hung)}
        if not hung or self._template is None:
            return outcomes
        starts = {number: len(self._printed(number)) for number in hung}
        self._template.signal([self._ranks[number] for number in hung], DUMP_STACKS)
        stacks: dict[int, bytes] = {}
        until = time.monotonic() + _DUMP_TIMEOUT
        while time.monotonic() < until and not (stacks and all(b"most recent call first" in stack for stack in stacks.values())):
            time.sleep(0.1)
            stacks = {number: self._printed(number)[start:] for number, start in starts.items()}
        return outcomes | {number: replace(outcome, stack=stacks[number].decode(errors="replace")) for number, outcome in hung.items()}

    def _printed(self, number: int) -> bytes:
        output = self._outputs[number].fileno()
        return os.pread(output, os.fstat(output).st_size, 0)

    def _kill(self) -> None:
        """End the ranks; the next job starts new ones."""
        ranks, outputs = self._ranks, self._outputs
        self._ranks, self._outputs, self._num_ranks = [], [], 0
        if self._template is not None:
            self._template.kill(ranks)
        for rank in ranks:
            rank.close()
        for output in outputs:
            output.close()

    def close(self) -> None:
        """End everything that was started. A further job starts anew."""
        with self._lock:
            template, self._template = self._template, None
            if template is not None:
                template.close()
            self._kill()


_pools: dict[int, Pool] = {}  # by process: one that is forked from this one must not use its ranks


def _pool() -> Pool:
    if os.getpid() not in _pools:
        _pools[os.getpid()] = Pool()
    return _pools[os.getpid()]


@atexit.register
def _close() -> None:
    if os.getpid() in _pools:
        _pools[os.getpid()].close()
