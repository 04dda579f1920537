"""`PackedStream`: packs of rows from documents that come one by one, resumable at the exact document and token.

Every rank reads all documents, makes the same plan, and keeps its part of each global batch; so the position is one for all ranks, and
holds for any number of them. The one thing to know before editing: the position leads to the document that has been open longest;
the documents from there on are read again, and those that were used up meanwhile are dropped. `IterableDataProvider` does the reading,
with a document in the place of a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from trainer_kit.data.batch_sizes import BatchSizes
from trainer_kit.data.iterables import IterableDataProvider
from trainer_kit.data.pack import Pack, Position
from trainer_kit.data.packing_documents import Document, read_document
from trainer_kit.data.packing_rows import PackingStatistics, Piece, make_row
from trainer_kit.data.provider import DataProvider
from trainer_kit.data.randomness import fork_random
from trainer_kit.data.sampler import on_all_ranks, pack_spans
from trainer_kit.exceptions import ConfigurationError, StateError

if TYPE_CHECKING:
    from trainer_kit.data.packing import SequencePacking
    from trainer_kit.mesh.context import DistributedContext

Row = list[tuple[Document, Piece]]


class PackedStream(DataProvider):
    """Packs of microbatches, each a mapping of (B, seq_len) tensors; see `SequencePacking.stream`.

    A short last global batch is split as evenly as possible over the data ranks; one that gets nothing of it has a filler instead.
    statistics: of the rows of all ranks that were made so far in this process.
    """

    knows_all_ranks = True
    global_position = True
    draws_random = False  # not from the run's streams: documents have streams of their own

    def __init__(self, documents: Iterable[Any], packing: SequencePacking, global_batch_size: int, microbatch_size: int | None) -> None:
        check_documents(documents)
        self._documents = _AllDocuments(documents)
        self._name = type(documents).__name__
        self._packing = packing
        self._sizes = BatchSizes(global_batch_size, microbatch_size)
        self._context: DistributedContext | None = None
        self.num_epochs = self._documents.num_epochs
        self.statistics = PackingStatistics(packing.seq_len)

    def setup(self, context: DistributedContext, seed: int) -> None:
        """Check the sizes against the data ranks. No document is read."""
        self._documents.setup(context, seed)
        self._context, self._seed = context, seed
        self._microbatch_size = self._sizes.microbatch_on(context.num_data_ranks)

    def packs(self, position: dict[str, Any] | None) -> Iterator[Pack | list[Any]]:
        """The rest of one epoch. Every token of an epoch is in exactly one row of one data rank."""
        context = self._ready()
        reader = _OpenDocuments(self._documents, position or {}, self._seed)
        planner = self._packing.planner(reader.read())
        rows = iter(planner)
        while batch := [reader.use(row) for row in islice(rows, self._sizes.global_batch_size)]:
            for row in batch:
                self.statistics.add([piece for _, piece in row])
            ended = reader.ended or planner.ended
            after = reader.position(list(planner.open.values()), ended)
            is_last = False if planner.open else (True if ended else None)
            yield self._pack(batch, Pack([], reader.epoch, after, is_last), context)

    def _pack(self, rows: Sequence[Row], pack: Pack, context: DistributedContext) -> Pack:
        """The pack, filled with this rank's part of the rows of a global batch."""
        num_ranks, size = context.num_data_ranks, self._microbatch_size
        (spans, _), *_ = pack_spans(
            len(rows), global_batch_size=len(rows), microbatch_size=size, data_rank=context.data_rank, num_data_ranks=num_ranks
        )
        pack.microbatches = [self._microbatch(rows[begin:end]) for begin, end in spans]
        if num_ranks > 1:
            pack.num_on_all, (begin, end) = on_all_ranks(0, len(rows), microbatch_size=size, num_data_ranks=num_ranks)
            pack.filler = None if spans else self._microbatch(rows[begin:end])
        return pack

    def _microbatch(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        made = [make_row(row, seq_len=self._packing.seq_len, pad_token_id=self._packing.pad_token_id) for row in rows]
        return default_collate(made)

    def _ready(self) -> DistributedContext:
        if self._context is None:
            raise StateError("PackedStream was asked for packs before setup(context, seed)")
        return self._context

    def describe(self) -> dict[str, Any]:
        context = self._ready()
        return {
            "provider": type(self).__name__,
            "documents": self._name,
            **self.hparams(),
            "microbatch_size": self._microbatch_size,
            "accumulation": self._sizes.global_batch_size // context.num_data_ranks // self._microbatch_size,
            "num_packs": None,
        }

    def hparams(self) -> dict[str, Any]:
        return {
            "global_batch_size": self._sizes.global_batch_size,
            "microbatch_size": self._sizes.microbatch_size,
            "seq_len": self._packing.seq_len,
            "packing": self._packing.method,
        }

    def close(self) -> None:
        self._documents.close()


class _AllDocuments(IterableDataProvider):
    """All documents on every data rank."""

    def setup(self, context: DistributedContext, seed: int) -> None:
        self._seed, self._tells = seed, context.is_main


class _OpenDocuments:
    """Reads the documents of an epoch from a position on, and holds those of which something is left."""

    def __init__(self, documents: IterableDataProvider, position: Mapping[str, Any], seed: int) -> None:
        self.epoch: int = position.get("epoch", 0)
        self.ended = False
        self._documents, self._seed = documents, seed
        self._start: dict[str, Any] = position.get("documents") or {"epoch": self.epoch}
        self._place: Position = self._start  # behind the last document that was read
        self._num_read: int = position.get("num_read", 0)  # those before were read in an earlier life
        self._starts: dict[int, int] = dict(position.get("open", []))  # of documents that were cut or waited in it
        self._held: dict[int, tuple[Document, Position]] = {}  # with the place before it

    def read(self) -> Iterator[Piece]:
        """What is left of each document."""
        packs = self._documents.packs(self._start)
        number: int = self._start.get("microbatches", 0)
        while (pack := self._next(packs, number)) is not None:
            assert pack.position is not None
            before, self._place = self._place, pack.position
            self.ended = pack.is_last is True
            is_new, self._num_read = number >= self._num_read, max(number + 1, self._num_read)
            if is_new or number in self._starts:
                document = read_document(pack.microbatches[0], number)
                self._held[number] = (document, before)
                yield Piece(number, self._starts.pop(number, 0), len(document.input_ids))
            number += 1

    def _next(self, packs: Iterator[Any], number: int) -> Pack | None:
        """A document that draws random numbers is a function of its number, and so the same when it is read again."""
        draws = self._documents.draws_random
        with fork_random(self._seed, "document", self.epoch, number) if draws else nullcontext():
            return next(packs, None)

    def use(self, row: Sequence[Piece]) -> Row:
        """The pieces with their documents; lets go of those that are used up."""
        parts = [(self._held[piece.document][0], piece) for piece in row]
        for document, piece in parts:
            if piece.stop == len(document.input_ids):
                del self._held[piece.document]
        return parts

    def position(self, pieces: Sequence[Piece], ended: bool) -> Position:
        """The position behind the last row, given what is left, oldest first."""
        if ended and not pieces:
            return {"epoch": self.epoch + 1}
        place = self._held[pieces[0].document][1] if pieces else self._place
        left = [[piece.document, piece.start] for piece in pieces] + [list(start) for start in self._starts.items()]
        return partial(_describe, self.epoch, place, left, self._num_read)


def _describe(epoch: int, place: Position, left: list[list[int]], num_read: int) -> dict[str, Any]:
    documents = place() if callable(place) else place
    if documents["epoch"] > epoch:  # it turned out meanwhile that nothing follows
        return {"epoch": documents["epoch"]}
    return {"epoch": epoch, "documents": documents, "open": left, "num_read": num_read}


def check_documents(documents: Any) -> None:
    """Refuse what is no iterable of documents."""
    name = type(documents).__name__
    if isinstance(documents, Dataset) and not isinstance(documents, IterableDataset):
        raise ConfigurationError(
            f"documents= is a map-style dataset ({name}), expected an iterable of documents; use SequencePacking(...).dataset(documents)"
        )
    is_iterable = hasattr(documents, "__iter__") or hasattr(documents, "__getitem__")
    if isinstance(documents, (str, bytes, Mapping, torch.Tensor)) or not is_iterable:
        raise ConfigurationError(f"documents= is a {name}, expected an iterable of documents, each a sequence of integers or a mapping")
