"""Worker processes that read whole microbatches, on torch's DataLoader.

The one thing to know before editing: a worker gets (random seed, indices) and seeds itself before each microbatch, so that random
augmentation is a function of the position in the run, whatever the number of workers and wherever a run was resumed.
Workers ignore Ctrl-C, which a terminal sends to every process: the one that trains decides what it means.
Workers start with the platform's default method; what is spawned instead of forked needs a dataset and collate_fn that can be pickled.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer_kit.data.microbatches import Indices, MicrobatchReader
from trainer_kit.data.randomness import seed_host
from trainer_kit.torch_private import raise_for_dead_worker, shut_down_loader

Key = tuple[int, Indices]


class _KeyedReader(Dataset[Any]):
    """What a worker holds: looks up a microbatch by its key."""

    def __init__(self, reader: MicrobatchReader) -> None:
        self._reader = reader

    def __getitem__(self, key: Key) -> Any:
        seed, indices = key
        seed_host(seed)
        return self._reader.read(indices)


class _Keys(Sampler[Key]):
    """The keys of the coming epoch; changed between epochs, because persistent workers keep their loader."""

    def __init__(self) -> None:
        self.coming: Iterable[Key] = ()

    def __iter__(self) -> Iterator[Key]:
        return iter(self.coming)


def _unchanged(microbatch: Any) -> Any:
    return microbatch


class IgnoreInterrupts:
    """A `worker_init_fn` that makes a worker ignore Ctrl-C, and then calls another one."""

    def __init__(self, then: Callable[[int], None] | None = None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._then is not None:
            self._then(worker_id)


@contextmanager
def started_workers_ignore_interrupts(loader: DataLoader[Any]) -> Iterator[None]:
    """The workers that a user's loader starts in the block ignore Ctrl-C; afterwards the loader is as it was."""
    given = loader.worker_init_fn
    loader.worker_init_fn = IgnoreInterrupts(given)
    try:
        yield
    finally:
        loader.worker_init_fn = given


class WorkerPool:
    """Worker processes, started at the first fetch, and again after a failure or `close`."""

    def __init__(self, reader: MicrobatchReader, *, num_workers: int, prefetch_factor: int, persistent: bool, pin_memory: bool) -> None:
        self._keys = _Keys()
        self._loader = DataLoader(
            _KeyedReader(reader),
            sampler=self._keys,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent,
            pin_memory=pin_memory,
            worker_init_fn=IgnoreInterrupts(),
            generator=torch.Generator(),  # the loader draws a seed for its workers, which must not come from the run's streams
        )
        self._iterator: Iterator[Any] | None = None

    def fetch(self, keys: Iterable[Key]) -> Iterator[Any]:
        """The microbatches of the keys, in order. An error of a worker is raised here, with the worker's traceback as text."""
        self._keys.coming = keys
        self._iterator = iter(self._loader)
        try:
            yield from self._iterator
        except Exception as error:
            try:
                raise_for_dead_worker(self._iterator, error)
            finally:
                self.close()
            raise

    def close(self) -> None:
        """End the workers and wait for them."""
        if self._iterator is not None:
            shut_down_loader(self._loader, self._iterator)
            self._iterator = None
