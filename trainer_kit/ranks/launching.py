"""The parent's side of `trainer_kit.launch`: starts ranks for one function, waits for them, and leaves nothing running.

The ranks are clean processes that import the function. One that only this process has, because it is from a notebook's cell, runs in
forks of this process.
"""

from __future__ import annotations

import builtins
import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import TCPStore

from trainer_kit.exceptions import ConfigurationError, Interrupted, StateError, UnsupportedError
from trainer_kit.ranks.calls import Call, make_call
from trainer_kit.ranks.child import inside_rank
from trainer_kit.ranks.collecting import Readers, collect, wait_for_end
from trainer_kit.ranks.direct import DirectRanks
from trainer_kit.ranks.environment import ADDRESS, rank_environment
from trainer_kit.ranks.launched import Start, serve
from trainer_kit.ranks.outcomes import Outcome, Returned, results
from trainer_kit.ranks.output import Relay, shares_standard_output
from trainer_kit.ranks.processes import Rank, Template
from trainer_kit.ranks.termination import Termination

_INTERRUPT_GRACE = 5.0  # seconds in which ranks may end a step in order after Ctrl-C
_ERROR_GRACE = 1.5  # seconds in which ranks that have raised may leave by themselves


class Launch:
    """One call of `launch`."""

    def __init__(self, fn: Callable[..., Any], num_processes: int, args: tuple[Any, ...]) -> None:
        _check(num_processes)
        self._num_ranks = num_processes
        self._call = _call(fn, args)
        self._threads = _threads_per_rank(num_processes)
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        self._relay = Relay()
        self._ranks: dict[int, Rank] = {}
        self._starter: Template | DirectRanks
        self._entry: Any
        if self._call is None:
            _refuse_used_accelerator(fn)
            self._starter, self._entry = DirectRanks(), lambda connection: serve(connection, (fn, args))
        else:
            self._starter, self._entry = Template(self._environment), "trainer_kit.ranks.launched:serve"

    def run(self) -> list[Any]:
        """The results by rank. SIGTERM is passed on; if the ranks then end, so does this process, with their words."""
        with Termination(lambda: self._starter.signal(self._ranks.values(), signal.SIGTERM)) as termination:
            try:
                readers = {**self._start(), termination.reader: termination.read}
                return results("launch", self._outcomes(readers), printed={})
            except StateError as error:
                if termination.asked:
                    raise Interrupted(str(error.__cause__ or error)) from error
                raise
            finally:
                self._starter.close()
                self._relay.close()
                for rank in self._ranks.values():
                    rank.close()

    def _start(self) -> Readers:
        self._store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
        self._fork()
        for number, rank in self._ranks.items():
            environment = rank_environment(self._environment, number, self._num_ranks, self._store.port)
            rank.send(pickle.dumps(Start(self._call, environment, self._threads, sys.argv)))
        return self._relay.readers

    def _outcomes(self, readers: Readers) -> dict[int, Outcome]:
        ranks = self._ranks.values()
        try:
            outcomes = collect(self._ranks, None, readers)
            if all(isinstance(outcome, Returned) for outcome in outcomes.values()):
                for rank in ranks:
                    rank.send(b"")  # nobody needs anybody any more
                wait_for_end(ranks, None, readers)  # as long as it takes, such as a checkpoint still being written
            else:
                wait_for_end(ranks, _ERROR_GRACE, readers)
        except KeyboardInterrupt:
            self._starter.signal(ranks, signal.SIGINT)
            wait_for_end(ranks, _INTERRUPT_GRACE, readers)
            raise
        return outcomes

    def _fork(self) -> None:
        inherited = shares_standard_output()
        if inherited:
            sys.stdout.flush()
        for number in range(self._num_ranks):
            output = None if inherited else self._relay.open()
            self._ranks[number] = self._starter.fork(self._entry, output)
            if output is not None:
                os.close(output)


def _check(num_processes: int) -> None:
    if inside_rank() or "WORLD_SIZE" in os.environ:
        raise StateError(
            f"launch was called in a rank (WORLD_SIZE={os.environ.get('WORLD_SIZE')}). In a script started by torchrun, call the function "
            'itself; else the usual cause is a script that calls launch without `if __name__ == "__main__":`, as ranks import the script'
        )
    if not isinstance(num_processes, int) or num_processes < 1:
        raise ConfigurationError(f"launch got num_processes={num_processes!r}; expected a number of at least 1")


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Call | None:
    """How a clean process finds the function; None if only this process has it."""
    is_interactive = "get_ipython" in vars(builtins) or not hasattr(sys.modules["__main__"], "__file__")
    try:
        call = make_call("launch", fn, args)
    except ConfigurationError:
        if not is_interactive:
            raise
        return None
    return None if is_interactive and call.main is not None else call


def _threads_per_rank(num_processes: int) -> int:
    if chosen := os.environ.get("OMP_NUM_THREADS", "").split(",")[0]:
        return int(chosen)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_processes)


def _refuse_used_accelerator(fn: Callable[..., Any]) -> None:
    device = torch.accelerator.current_accelerator()
    if device is not None and getattr(torch.get_device_module(device), "is_initialized", lambda: False)():
        raise UnsupportedError(
            f"launch has to fork this process, because {getattr(fn, '__name__', fn)} is from an interactive session, but this process "
            f"already uses {device.type}, which does not survive a fork. Put the function into a module and import it, or restart the "
            f"kernel and call launch before anything uses the device"
        )
