"""One pass over an iterable of microbatches, with its randomness made a function of (seed, epoch, microbatch).

The one thing to know before editing: a sampler may draw its order as late as the first `next`, so that one has streams of its own.
After it, a DataLoader whose order comes from torch's own samplers may draw from the run's streams, since what it draws for one
microbatch does not depend on the ones before. Any other iterable, such as one with a shuffle buffer, keeps to streams keyed by the
microbatch: reading again what was skipped then gives the same data.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer_kit.data.pack import Position
from trainer_kit.data.randomness import fork_random
from trainer_kit.random_state import derive_seed

_log = logging.getLogger(__name__)
_END = object()


class EpochReader:
    """Reads the microbatches of one epoch one by one. `num_read`: how many so far; `ended`: the iterator has no more."""

    def __init__(self, data: Any, iterator: Iterator[Any], *, seed: int, epoch: int, num_read: int) -> None:
        self.epoch = epoch
        self.num_read = num_read
        self.ended = False
        self.current: Any = None
        self._iterator = iterator
        self._seed = seed
        self._peeked: list[Any] = []
        self._num_own = num_reads_with_own_streams(data)

    def advance(self) -> bool:
        """Put the next microbatch in `current`; False at the end."""
        item = self._peeked.pop() if self._peeked else self._pull(self.num_read < self._num_own)
        if item is _END:
            return False
        self.current = item
        self.num_read += 1
        return True

    def peek(self) -> None:
        """Find out whether the epoch has ended, where a length says so. An item in spite of it is kept for `advance`."""
        item = self._pull(True)
        if item is not _END:
            _log.warning("len() of the data promised %d microbatches, but there are more; num_packs is wrong", self.num_read)
            self._peeked.append(item)

    def skip(self, count: int) -> int:
        """Read and drop; the number of microbatches that were there. Leaves the run's streams alone."""
        for done in range(count):
            if self._pull(True) is _END:
                _log.warning("the saved data position is %d microbatches into epoch %d, which has %d", count, self.epoch, done)
                return done
            self.num_read += 1
        return count

    def place(self) -> Position:
        """The position behind what was read. It becomes the start of the next epoch once it turns out that nothing follows."""
        return partial(self._describe_place, self.num_read)

    def _describe_place(self, num_read: int) -> dict[str, Any]:
        if self.ended and num_read == self.num_read:
            return {"epoch": self.epoch + 1, "microbatches": 0}
        return {"epoch": self.epoch, "microbatches": num_read}

    def _pull(self, in_own_streams: bool) -> Any:
        if self.ended:
            return _END
        if in_own_streams:
            with fork_random(self._seed, "microbatch", self.epoch, self.num_read):
                item = next(self._iterator, _END)
        else:
            item = next(self._iterator, _END)
        self.ended = item is _END
        return item


def num_reads_with_own_streams(data: Any) -> float:
    """How many microbatches of an epoch must not be read with the run's streams. See the top of the file."""
    if type(data) in (list, tuple):
        return 0
    if not isinstance(data, DataLoader) or type(data).__iter__ is not DataLoader.__iter__ or isinstance(data.dataset, IterableDataset):
        return math.inf
    samplers = (data.sampler, data.batch_sampler)
    is_known = all(sampler is None or type(sampler).__module__.startswith("torch.utils.data.") for sampler in samplers)
    return 1 if is_known else math.inf


def start_epoch(data: Any, epoch: int, seed: int | None) -> None:
    """Call `set_epoch` on the iterable, its samplers and its dataset, nested ones too, and seed their generators from `seed`."""
    pending, seen = [data], set()
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if callable(getattr(found, "set_epoch", None)):
            found.set_epoch(epoch)
        generator = getattr(found, "generator", None)
        if seed is not None and isinstance(generator, torch.Generator):
            generator.manual_seed(derive_seed(seed, "generator", epoch))
        pending += [getattr(found, name, None) for name in ("sampler", "batch_sampler", "dataset")]
