"""What goes into the rows of packed documents: `RowPlanner` decides on lengths alone, `make_row` puts the tokens together.

Not here: reading documents. The one thing to know before editing: between two rows the planner is described by the pieces in `open` and
by how many documents it has taken, so that it can be stopped there and started again. Greedy is best fit with a buffer of one document.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from trainer_kit.data.packing_documents import Document

IGNORE_INDEX = -100  # of the labels; what torch's cross_entropy leaves out
PADDING_ID = -1  # of the document ids


class Piece(NamedTuple):
    """The tokens [start, stop) of a document, which is given by its number."""

    document: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class RowPlanner:
    """Iterates over rows, each a list of pieces in order.

    open: number -> what is left of a document that was taken from `documents`, oldest first. ended: `documents` has no more.
    """

    def __init__(self, documents: Iterator[Piece], *, seq_len: int, buffer_size: int, splits: bool) -> None:
        self.open: dict[int, Piece] = {}
        self.ended = False
        self._documents = documents
        self._by_size: list[tuple[int, int]] = []  # (size, -number): of equal sizes, the oldest is last
        self._seq_len, self._buffer_size, self._splits = seq_len, buffer_size, splits

    def __iter__(self) -> Iterator[list[Piece]]:
        while row := self._next_row():
            yield row

    def _next_row(self) -> list[Piece]:
        row: list[Piece] = []
        left = self._seq_len
        while left and (chosen := self._choose(left)) is not None:
            row.append(self._take(chosen, left))
            left -= row[-1].size
        return row

    def _choose(self, left: int) -> int | None:
        """The document that goes on with a row in which so many places are left; None closes the row.

        Starting with the oldest lets none wait for ever, and puts the rest of a cut document at the start of the next row.
        """
        while len(self.open) < self._buffer_size and not self.ended:
            self._add(next(self._documents, None))
        if not self.open:
            return None
        oldest = next(iter(self.open))
        if left == self._seq_len:
            return oldest
        place = bisect_right(self._by_size, (left, 1))
        if place == 0:
            return oldest if self._splits else None
        return -self._by_size[place - 1][1]

    def _add(self, piece: Piece | None) -> None:
        if piece is None:
            self.ended = True
        else:
            self.open[piece.document] = piece
            insort(self._by_size, (piece.size, -piece.document))

    def _take(self, number: int, at_most: int) -> Piece:
        whole = self.open[number]
        del self._by_size[bisect_right(self._by_size, (whole.size, -number)) - 1]
        taken = Piece(number, whole.start, min(whole.stop, whole.start + at_most))
        if taken.stop < whole.stop:
            self._add(Piece(number, taken.stop, whole.stop))  # under the same key, so it stays the oldest
        else:
            del self.open[number]
        return taken


@dataclass
class PackingStatistics:
    """What was packed. num_documents: those that were begun; num_pieces: with each part of a cut document counted."""

    seq_len: int
    num_rows: int = 0
    num_tokens: int = 0
    num_documents: int = 0
    num_pieces: int = 0

    def add(self, row: Sequence[Piece]) -> None:
        self.num_rows += 1
        self.num_tokens += sum(piece.size for piece in row)
        self.num_documents += sum(piece.start == 0 for piece in row)
        self.num_pieces += len(row)

    @property
    def fullness(self) -> float:
        """The part of the rows that is no padding, in [0, 1]."""
        return self.num_tokens / max(self.num_rows * self.seq_len, 1)

    @property
    def num_cuts(self) -> int:
        """How often a document goes on in another row."""
        return self.num_pieces - self.num_documents


def make_row(parts: Sequence[tuple[Document, Piece]], *, seq_len: int, pad_token_id: int) -> dict[str, torch.Tensor]:
    """The row of these pieces, as `SequencePacking` describes it."""
    input_ids = torch.full((seq_len,), pad_token_id)
    labels = torch.full((seq_len,), IGNORE_INDEX)
    document_ids = torch.full((seq_len,), PADDING_ID)
    begin = 0
    for document, (number, start, stop) in parts:
        end = begin + stop - start
        input_ids[begin:end] = document.input_ids[start:stop]
        labels[begin + 1 : end] = document.labels[start + 1 : stop]
        document_ids[begin:end] = number
        begin = end
    return {"input_ids": input_ids, "labels": labels, "document_ids": document_ids}
