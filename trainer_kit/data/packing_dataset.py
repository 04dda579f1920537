"""`PackedDataset`: the rows of map-style documents, each of them a function of its number.

Not here: order, ranks and resuming, which `AutoDataProvider` does for any map-style dataset. The one thing to know before editing: the plan
is made once, from lengths, and kept as two tensors, so that worker processes share it instead of copying it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from trainer_kit.data.batch_sizes import count
from trainer_kit.data.packing_documents import Document, read_document
from trainer_kit.data.packing_rows import PackingStatistics, Piece, make_row
from trainer_kit.exceptions import ConfigurationError

if TYPE_CHECKING:
    from trainer_kit.data.packing import SequencePacking


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Rows by number; see `SequencePacking` for what is in them. A row reads the documents it has pieces of, each of them whole.

    statistics: of all rows.
    """

    def __init__(self, documents: Any, packing: SequencePacking, lengths: Sequence[int] | torch.Tensor | None) -> None:
        check_documents(documents)
        self._documents, self._packing = documents, packing
        self._lengths = torch.tensor(_read_lengths(documents) if lengths is None else _given_lengths(lengths, len(documents)))
        self.statistics = PackingStatistics(packing.seq_len)
        pieces, ends = array("q"), array("q", [0])
        for row in packing.planner(Piece(number, 0, length) for number, length in enumerate(self._lengths.tolist())):
            self.statistics.add(row)
            for piece in row:
                pieces.extend(piece)
            ends.append(len(pieces) // 3)
        self._pieces = torch.frombuffer(pieces, dtype=torch.int64).view(-1, 3)
        self._row_ends = torch.frombuffer(ends, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._row_ends) - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} packed rows")
        begin, end = self._row_ends[index % len(self)], self._row_ends[index % len(self) + 1]
        parts = [(self._read(row[0]), Piece(*row)) for row in self._pieces[begin:end].tolist()]
        return make_row(parts, seq_len=self._packing.seq_len, pad_token_id=self._packing.pad_token_id)

    def _read(self, number: int) -> Document:
        document = read_document(self._documents[number], number)
        length = int(self._lengths[number])
        if len(document.input_ids) != length:
            raise ConfigurationError(
                f"document {number} of documents= has {len(document.input_ids)} tokens, expected {length} as in lengths= or "
                "when it was first read; the usual cause are lengths of other documents, or documents that change"
            )
        return document


def check_documents(documents: Any) -> None:
    """Refuse what has no documents by number, or none at all."""
    no_documents = isinstance(documents, (str, bytes)) or (isinstance(documents, Mapping) and 0 not in documents)
    if no_documents or not hasattr(documents, "__getitem__") or not hasattr(documents, "__len__"):
        raise ConfigurationError(
            f"documents= is a {type(documents).__name__}, expected documents numbered from 0, with __getitem__ and __len__; "
            "an iterable of documents goes to SequencePacking(...).stream(documents, global_batch_size)"
        )
    if len(documents) == 0:
        raise ConfigurationError(f"documents= is a {type(documents).__name__} without documents, expected at least one")


def _read_lengths(documents: Any) -> list[int]:
    return [len(read_document(documents[number], number).input_ids) for number in range(len(documents))]


def _given_lengths(lengths: Sequence[int] | torch.Tensor, num_documents: int) -> list[int]:
    values: Iterator[Any] = iter(lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths)
    checked = [count(f"lengths[{number}]", length) for number, length in enumerate(values)]
    if len(checked) != num_documents:
        raise ConfigurationError(f"lengths= has {len(checked)} entries, expected one for each of the {num_documents} of documents=")
    return checked
