"""Which samples make up which microbatch: pure functions of (seed, epoch, sizes, rank).

Not here: fetching. The one thing to know before editing: the order is global, a function of (seed, epoch) and the size of the
dataset alone; global batch g is samples [g * G, (g + 1) * G) of it on every mesh, and ranks only choose their part of that.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainer_kit.random_state import derive_seed

Order = torch.Tensor | range
Span = tuple[int, int]


def global_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> Order:
    """Position in the epoch -> index in the dataset; a range when unshuffled, else int64 of shape (num_samples,)."""
    if not shuffle:
        return range(num_samples)
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator)


def index_list(order: Order, span: Span) -> list[int]:
    """The dataset indices at positions [start, stop) of the order."""
    part = order[span[0] : span[1]]
    return part.tolist() if isinstance(part, torch.Tensor) else list(part)


def num_global_batches(num_samples: int, global_batch_size: int, drop_last: bool) -> int:
    """The steps that `num_samples` samples give."""
    return num_samples // global_batch_size if drop_last else -(-num_samples // global_batch_size)


def pack_spans(
    num_samples: int,
    *,
    global_batch_size: int,
    microbatch_size: int,
    data_rank: int = 0,
    num_data_ranks: int = 1,
    start: int = 0,
    drop_last: bool = False,
) -> Iterator[tuple[list[Span], int]]:
    """For each pack from position `start` on: the spans of its microbatches on this rank, and the global position after it.

    A rank's part of a global batch is contiguous. A short last batch is split as evenly as possible, so ranks may then have
    different numbers of microbatches, or none; `on_all_ranks` tells how many the others have.
    """
    for begin in range(start, num_samples, global_batch_size):
        end = min(begin + global_batch_size, num_samples)
        size = end - begin
        if drop_last and size < global_batch_size:
            return
        first = begin + size * data_rank // num_data_ranks
        last = begin + size * (data_rank + 1) // num_data_ranks
        yield [(at, min(at + microbatch_size, last)) for at in range(first, last, microbatch_size)], end


def on_all_ranks(begin: int, end: int, *, microbatch_size: int, num_data_ranks: int) -> tuple[int, Span]:
    """Of the global batch [begin, end): how many microbatches the rank with most has, and what a rank without any runs in their place."""
    most = -(-(end - begin) // num_data_ranks)
    return -(-most // microbatch_size), (begin, min(begin + microbatch_size, end))
