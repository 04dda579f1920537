"""`AutoDataProvider`: a map-style dataset, cut into global batches, packs and microbatches.

Not here: the arithmetic of the cuts (`sampler.py`) and the reading (`microbatches.py`, `workers.py`). The one thing to know before
editing: the position is one global number, the samples handed out in this epoch, so it holds for any batch size, number of workers
and number of data ranks, and resuming loads nothing of what was skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from trainer_kit.data.batch_sizes import BatchSizes, count
from trainer_kit.data.microbatches import MicrobatchReader
from trainer_kit.data.pack import Pack
from trainer_kit.data.provider import DataProvider
from trainer_kit.data.randomness import fork_random
from trainer_kit.data.sampler import Order, Span, global_order, index_list, num_global_batches, on_all_ranks, pack_spans
from trainer_kit.data.workers import Key, WorkerPool
from trainer_kit.exceptions import ConfigurationError, StateError
from trainer_kit.random_state import derive_seed

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext

_log = logging.getLogger(__name__)


class AutoDataProvider(DataProvider):
    """Packs from a dataset with `__getitem__` and `__len__`, or from a callable that makes one (called once, at setup).

    global_batch_size: samples of one step, over all data ranks. microbatch_size: samples of one forward pass on one rank; None:
    all of the rank's samples of a step at once.
    collate_fn: list of samples -> microbatch; default torch's. `__getitems__` of the dataset is used if it is there.
    drop_last: leave out a short last global batch instead of using it.
    num_workers: 0 reads in this process, and then random augmentation draws from the run's own streams (from a stream per pack, if
    packs are fetched ahead). With workers, each microbatch is read and collated in a process that was seeded with the position.
    prefetch_factor, persistent_workers: as in torch's DataLoader. pin_memory: None pins when the device is an accelerator.
    A short last global batch is split as evenly as possible over the data ranks; one that gets nothing of it has a filler instead.
    """

    knows_all_ranks = True
    global_position = True

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        microbatch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        persistent_workers: bool = True,
        pin_memory: bool | None = None,
    ) -> None:
        self._sizes = BatchSizes(global_batch_size, microbatch_size)
        self._num_workers = count("num_workers", num_workers, at_least=0)
        self._prefetch_factor = count("prefetch_factor", prefetch_factor)
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigurationError(f"collate_fn= is {collate_fn!r}, expected a function that takes a list of samples")
        self._is_factory = callable(dataset) and (isinstance(dataset, type) or not hasattr(dataset, "__getitem__"))
        if not self._is_factory:
            check_dataset(dataset)
        self._source = dataset
        self._collate_fn = collate_fn
        self._shuffle, self._drop_last = bool(shuffle), bool(drop_last)
        self._persistent_workers = persistent_workers
        self.pin_memory = pin_memory
        self._reader: MicrobatchReader | None = None
        self._pool: WorkerPool | None = None

    def setup(self, context: DistributedContext, seed: int) -> None:
        """Build the dataset, and check the sizes against it and the data ranks."""
        self.close()
        if self._is_factory and self._reader is None:
            made = self._source()
            check_dataset(made)
            self._dataset = made
        elif not self._is_factory:
            self._dataset = self._source
        self._num_samples = len(self._dataset)
        self._microbatch_size = self._sizes.microbatch_on(context.num_data_ranks)
        self._sizes.check_dataset_size(self._num_samples, self._drop_last)
        self._seed, self._data_rank, self._num_data_ranks = seed, context.data_rank, context.num_data_ranks
        self._reader = MicrobatchReader(self._dataset, self._collate_fn)
        self.draws_random = self._num_workers == 0 and self._reader.runs_user_code
        on_accelerator = context.device.type != "cpu"
        self._pins_in_workers = on_accelerator and self.pin_memory is not False
        self._tells = context.is_main
        if self._tells:
            self._report_without_effect(on_accelerator)

    def _report_without_effect(self, on_accelerator: bool) -> None:
        if self.pin_memory and not on_accelerator:
            _log.warning("pin_memory=True has no effect: the device is a CPU")
        if self._num_workers == 0 and (self._prefetch_factor != 2 or not self._persistent_workers):
            _log.warning("prefetch_factor= and persistent_workers= have no effect without workers; set num_workers=")

    def packs(self, position: dict[str, Any] | None) -> Iterator[Pack | list[Any]]:
        """The rest of one epoch. Every sample of an epoch is in exactly one pack of one data rank (`drop_last` aside)."""
        reader = self._ready()
        epoch, start = self._place(position or {})
        several = self._num_data_ranks > 1
        order = global_order(self._num_samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        if self._num_workers:
            microbatches = self._workers(reader).fetch(self._keys(order, epoch, start))
        elif several:
            microbatches = self._read_part(reader, order, epoch, start)
        else:
            microbatches = (reader.read(order[begin:end]) for spans, _ in self._spans(start) for begin, end in spans)
        begin = start
        usable = self._sizes.usable(self._num_samples, start, self._drop_last)
        for spans, after in self._spans(start):
            is_last = after >= usable
            after_pack = {
                "epoch": epoch + 1 if is_last else epoch,
                "samples": 0 if is_last else after,
                "dataset_size": self._num_samples,
                "seed": self._seed,
            }
            pack = Pack([next(microbatches) for _ in spans], epoch, after_pack, is_last)
            if several:
                pack.num_on_all, _ = self._on_all_ranks(begin, after)
                pack.filler = None if spans else next(microbatches)
                begin = after
            yield pack
        next(microbatches, None)  # lets the loader see the end: workers that do not persist leave now

    def _spans(self, start: int) -> Iterator[tuple[list[tuple[int, int]], int]]:
        return pack_spans(
            self._num_samples,
            global_batch_size=self._sizes.global_batch_size,
            microbatch_size=self._microbatch_size,
            data_rank=self._data_rank,
            num_data_ranks=self._num_data_ranks,
            start=start,
            drop_last=self._drop_last,
        )

    def _on_all_ranks(self, begin: int, end: int) -> tuple[int, Span]:
        return on_all_ranks(begin, end, microbatch_size=self._microbatch_size, num_data_ranks=self._num_data_ranks)

    def _read_part(self, reader: MicrobatchReader, order: Order, epoch: int, start: int) -> Iterator[Any]:
        """The microbatches of one of several data ranks; for a pack of which it has no part, the filler, with random streams of its own."""
        before = start
        for spans, after in self._spans(start):
            for begin, end in spans:
                yield reader.read(order[begin:end])
            if not spans:
                begin, end = self._on_all_ranks(before, after)[1]
                with fork_random(self._seed, "filler", epoch, begin):
                    filler = reader.read(order[begin:end])
                yield filler
            before = after

    def _keys(self, order: Order, epoch: int, start: int) -> Iterator[Key]:
        """What the workers read: the same as `_read_part`."""
        before = start
        for spans, after in self._spans(start):
            for span in spans or [self._on_all_ranks(before, after)[1]]:
                yield derive_seed(self._seed, "worker", epoch, span[0]), index_list(order, span)
            before = after

    def _workers(self, reader: MicrobatchReader) -> WorkerPool:
        if self._pool is None:
            self._pool = WorkerPool(
                reader,
                num_workers=self._num_workers,
                prefetch_factor=self._prefetch_factor,
                persistent=self._persistent_workers,
                pin_memory=self._pins_in_workers,
            )
        return self._pool

    def _place(self, position: Mapping[str, Any]) -> tuple[int, int]:
        """Epoch and samples of a position; says so when the data or the seed are not those it was saved with."""
        now = {"dataset_size": self._num_samples, "seed": self._seed}
        for name, value in now.items():
            if position.get(name, value) != value and self._tells:
                _log.warning(
                    "the data position was saved with %s=%s and now it is %s: samples may be repeated or left out in this epoch",
                    name, position[name], value,
                )  # fmt: skip
        return position.get("epoch", 0), position.get("samples", 0)

    def _ready(self) -> MicrobatchReader:
        if self._reader is None:
            raise StateError("AutoDataProvider was asked for packs before setup(context, seed)")
        return self._reader

    def num_packs(self) -> int | None:
        self._ready()
        return num_global_batches(self._num_samples, self._sizes.global_batch_size, self._drop_last)

    def packs_left(self, position: dict[str, Any] | None) -> int | None:
        self._ready()
        left = self._num_samples - (position or {}).get("samples", 0)
        return num_global_batches(max(left, 0), self._sizes.global_batch_size, self._drop_last)

    def describe(self) -> dict[str, Any]:
        self._ready()
        per_rank = self._sizes.global_batch_size // self._num_data_ranks
        return {
            "provider": type(self).__name__,
            "dataset": type(self._dataset).__name__,
            "dataset_size": self._num_samples,
            "global_batch_size": self._sizes.global_batch_size,
            "microbatch_size": self._microbatch_size,
            "accumulation": per_rank // self._microbatch_size,
            "num_packs": self.num_packs(),
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
            "num_workers": self._num_workers,
        }

    def hparams(self) -> dict[str, Any]:
        return {
            "global_batch_size": self._sizes.global_batch_size,
            "microbatch_size": self._sizes.microbatch_size,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def check_dataset(dataset: Any) -> None:
    """Refuse what has no samples by number."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigurationError(
            f"dataset= is a {name} without __getitem__ and __len__, expected a map-style dataset; "
            "an iterable of microbatches goes to the Trainer itself: Trainer(model, task, data=iterable)"
        )
    if isinstance(dataset, Mapping) and 0 not in dataset:
        raise ConfigurationError(
            f"dataset= is a mapping with the keys {list(dataset)[:8]}, expected samples numbered from 0; "
            "choose one of its entries, or wrap tensors in torch.utils.data.TensorDataset"
        )
