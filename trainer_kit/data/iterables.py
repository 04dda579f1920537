"""`IterableDataProvider`: any iterable or DataLoader of microbatches; and `as_provider`, which turns what users pass into a provider.

Not here: how one epoch is read (`epoch_reader.py`). The one thing to know before editing: nothing is known about the iterable, so
the position is the number of microbatches read, and resuming reads and drops them; only what has `state_dict` can do better.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer_kit.data.batch_sizes import count
from trainer_kit.data.epoch_reader import EpochReader, num_reads_with_own_streams, start_epoch
from trainer_kit.data.pack import Pack
from trainer_kit.data.provider import DataProvider
from trainer_kit.data.randomness import fork_random
from trainer_kit.data.workers import started_workers_ignore_interrupts
from trainer_kit.exceptions import ConfigurationError, StateError, UnsupportedError
from trainer_kit.torch_private import iterate_loader, raise_for_dead_worker, shut_down_loader

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext

_log = logging.getLogger(__name__)


class IterableDataProvider(DataProvider):
    """Packs of `accumulate` microbatches from an iterable, which is iterated once per epoch; a short last pack is used.

    The order of a DataLoader is made a function of (seed, epoch): `set_epoch` is called wherever it is found, generators are seeded,
    and `iter` runs with random streams of its own. An iterator gives one epoch. An object with `state_dict` and `load_state_dict`
    keeps its state in the position instead of being skipped through.
    """

    def __init__(self, data: Any, accumulate: int = 1) -> None:
        check_iterable(data)
        self._data = data
        self._accumulate = count("accumulate", accumulate)
        self._is_iterator = iter(data) is data if hasattr(data, "__next__") else False
        self._keeps_state = callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))
        self._iterator: Iterator[Any] | None = None
        self._num_taken = 0  # from an iterator, which can't go back
        self._seed, self._tells = 0, True
        self._num_own = num_reads_with_own_streams(data)
        self.draws_random = self._num_own == 1 and data.num_workers == 0
        self.num_epochs = 1 if self._is_iterator else None

    def setup(self, context: DistributedContext, seed: int) -> None:
        if context.num_data_ranks > 1:
            raise UnsupportedError(
                f"an iterable of microbatches has no part per rank, and there are {context.num_data_ranks} data ranks; "
                "use AutoDataProvider with the dataset, or a DataProvider of your own"
            )
        self._seed, self._tells = seed, context.is_main

    def packs(self, position: dict[str, Any] | None) -> Iterator[Pack | list[Any]]:
        """The rest of one epoch. Its length need not be known; if the iterable has one, it is checked, not trusted."""
        try:
            yield from self._epoch(position or {})
        except Exception as error:
            try:
                raise_for_dead_worker(self._iterator, error)
            finally:
                self.close()  # a loader whose worker died can't be iterated again
            raise

    def _epoch(self, position: dict[str, Any]) -> Iterator[Pack]:
        reader = self._open(position.get("epoch", 0), position.get("microbatches", 0), position.get("loader"))
        length = self._length()
        while microbatches := self._take(reader):
            place = self._place(reader)
            if reader.num_read == length:
                reader.peek()
            is_last = True if reader.ended else (None if length is None else False)
            yield Pack(microbatches, reader.epoch, place or reader.place(), is_last)

    def _take(self, reader: EpochReader) -> list[Any]:
        microbatches: list[Any] = []
        while len(microbatches) < self._accumulate and reader.advance():
            microbatches.append(reader.current)
            self._num_taken += self._is_iterator
        return microbatches

    def _place(self, reader: EpochReader) -> dict[str, Any] | None:
        """The position of a loader with state, which has to be asked before anything else is read from it."""
        if not self._keeps_state:
            return None
        return {"epoch": reader.epoch, "microbatches": reader.num_read, "loader": self._data.state_dict()}

    def _open(self, epoch: int, num_read: int, state: Any) -> EpochReader:
        """An iterator over the epoch, put behind its first `num_read` microbatches."""
        start_epoch(self._data, epoch, None if self._keeps_state else self._seed)
        if state is not None:
            self._data.load_state_dict(state)
        with fork_random(self._seed, "iter", epoch) if self._num_own else contextlib.nullcontext():
            self._iterator = self._iterate()
        start = num_read if state is not None else self._num_taken
        reader = EpochReader(self._data, self._iterator, seed=self._seed, epoch=epoch, num_read=start)
        if start > num_read:
            raise StateError(
                f"the data is an iterator that has given {self._num_taken} microbatches and can't go back to {num_read}; "
                "pass a new one, or an iterable that can be iterated again"
            )
        if start < num_read:
            if self._tells:
                _log.warning("resuming the data by reading and dropping %d microbatches of epoch %d", num_read - start, epoch)
            self._num_taken += reader.skip(num_read - start) * self._is_iterator
        return reader

    def _iterate(self) -> Iterator[Any]:
        if not isinstance(self._data, DataLoader):
            return iter(self._data)
        with started_workers_ignore_interrupts(self._data):
            return iterate_loader(self._data)

    def _length(self) -> int | None:
        try:
            return len(self._data)
        except (TypeError, NotImplementedError):
            return None

    def num_packs(self) -> int | None:
        length = self._length()
        return None if length is None else -(-length // self._accumulate)

    def packs_left(self, position: dict[str, Any] | None) -> int | None:
        length, done = self._length(), (position or {}).get("microbatches", 0)
        return None if length is None else -(-max(length - done, 0) // self._accumulate)

    def describe(self) -> dict[str, Any]:
        return {
            "provider": type(self).__name__,
            "data": type(self._data).__name__,
            "accumulation": self._accumulate,
            "num_packs": self.num_packs(),
        }

    def hparams(self) -> dict[str, Any]:
        return {"accumulate": self._accumulate}

    def close(self) -> None:
        if self._iterator is not None and isinstance(self._data, DataLoader):
            shut_down_loader(self._data, self._iterator)
        self._iterator = None


def check_iterable(data: Any) -> None:
    """Refuse what is no iterable of microbatches, with the way that was probably meant."""
    name = type(data).__name__
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise ConfigurationError(
            f"data= is a map-style dataset ({name}), expected microbatches; use AutoDataProvider({name.lower()}, global_batch_size=...)"
        )
    if isinstance(data, (str, bytes, dict, torch.Tensor)) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        hint = "; call the function, or wrap it in a class with __iter__" if callable(data) else ""
        raise ConfigurationError(f"data= is a {name}, expected a DataProvider, a DataLoader or an iterable of microbatches{hint}")


def as_provider(data: Any, accumulate: int = 1) -> DataProvider:
    """The provider that `data` is, or one over the iterable that `data` is, with `accumulate` microbatches per step."""
    if not isinstance(data, DataProvider):
        return IterableDataProvider(data, accumulate)
    if accumulate != 1:
        raise ConfigurationError(
            f"accumulate={accumulate!r} is for plain iterables; {type(data).__name__} makes packs itself: "
            "leave accumulate= out and set the sizes there (AutoDataProvider: global_batch_size= and microbatch_size=)"
        )
    return data
