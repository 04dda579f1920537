"""`SequencePacking`: how documents become rows of one length. `dataset` and `stream` make the rows.

Not here: the choice of what goes into a row (`packing_rows.py`), and reading (`packing_documents.py`, `packing_dataset.py`,
`packing_stream.py`). The one thing to know before editing: rows depend on these settings and the documents alone, never on a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trainer_kit.data.batch_sizes import count
from trainer_kit.data.packing_dataset import PackedDataset
from trainer_kit.data.packing_rows import Piece, RowPlanner
from trainer_kit.data.packing_stream import PackedStream
from trainer_kit.exceptions import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@dataclass(frozen=True)
class SequencePacking:
    """Packs documents of any length into rows of `seq_len` tokens.

        packing = SequencePacking(seq_len=2048, pad_token_id=0, method="best_fit")
        rows = packing.dataset(documents)  # documents[i] and len(documents)
        data = AutoDataProvider(rows, global_batch_size=64, microbatch_size=4, shuffle=True)
        print(f"{rows.statistics.fullness:.1%} of the rows are tokens")

        data = packing.stream(documents, global_batch_size=64, microbatch_size=4)  # any iterable; the lengths are not known
        Trainer(model, CausalLMTask(), data)

    A document is a sequence of integers, or a mapping with `input_ids` and optionally `labels` (as long, not shifted, -100 where nothing is
    predicted). What ends a document, such as an end-of-text token, is part of it. A row is a mapping of int64 tensors of shape (seq_len,):
    - `input_ids`: the tokens of one document after the other, then `pad_token_id`.
    - `labels`: the same, but -100 at padding and at the first token of each document or piece of one, which nothing before it foretells.
    - `document_ids`: the number of the document that a position is of, from 0 in the order of the documents; -1 at padding. Attention
      stays within equal ids, and positions start again where the id changes.

    method: "greedy" fills a row with the documents as they come. "best_fit" keeps `buffer_size` documents at hand: a row starts with the
        one that has waited longest, and goes on with the longest that fits (about Ding et al. 2024, https://arxiv.org/abs/2404.10830).
    split_documents: cut a document where nothing at hand fits into what is left of a row, and go on with it at the start of the next one;
        then only the last row has padding. False: leave padding, and cut only what is longer than `seq_len`. None: True for greedy only.

    Every token of an epoch is in one row. Rows are the same on every rank, and a run resumes at the exact document and token.
    """

    seq_len: int
    pad_token_id: int
    method: Literal["greedy", "best_fit"] = "greedy"
    split_documents: bool | None = None
    buffer_size: int = 1000

    def __post_init__(self) -> None:
        count("seq_len", self.seq_len, at_least=2)
        if self.pad_token_id is None:
            raise ConfigurationError(
                "pad_token_id= is None, expected the id that fills up rows; it is never predicted, so where the tokenizer has no token for "
                "padding any other id does, such as that of its end of text"
            )
        count("pad_token_id", self.pad_token_id, at_least=0)
        count("buffer_size", self.buffer_size)
        if self.method not in ("greedy", "best_fit"):
            raise ConfigurationError(f"method= is {self.method!r}, expected 'greedy' or 'best_fit'")
        if self.split_documents not in (True, False, None):
            raise ConfigurationError(f"split_documents= is {self.split_documents!r}, expected True, False or None")

    def dataset(self, documents: Any, lengths: Sequence[int] | torch.Tensor | None = None) -> PackedDataset:
        """The rows as a map-style dataset, for `AutoDataProvider`, which shuffles rows and resumes without reading what was skipped.

        documents: anything with `__getitem__` and `__len__` that gives the same tokens each time.
        lengths: the number of tokens of each document. None: every document is read once, here.
        """
        return PackedDataset(documents, self, lengths)

    def stream(self, documents: Iterable[Any], global_batch_size: int, microbatch_size: int | None = None) -> PackedStream:
        """The rows as a `DataProvider`, for documents that come one by one. Each rank reads all documents and keeps its part of the rows.

        documents: an iterable that can be gone through again, such as a DataLoader with `batch_size=None`. `set_epoch` is called as for
            other iterables. A resume reads and drops what came before, unless there is a `state_dict` and a `load_state_dict`.
        global_batch_size, microbatch_size: rows of one step over all data ranks, and of one forward pass on one rank, as in
            `AutoDataProvider`.
        """
        return PackedStream(documents, self, global_batch_size, microbatch_size)

    def planner(self, documents: Iterator[Piece]) -> RowPlanner:
        """What divides the documents, given as what is left of each, into rows."""
        is_greedy = self.method == "greedy"
        splits = is_greedy if self.split_documents is None else self.split_documents
        return RowPlanner(documents, seq_len=self.seq_len, buffer_size=1 if is_greedy else self.buffer_size, splits=splits)
