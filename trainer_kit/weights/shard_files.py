"""The shard files of a model state, written by several ranks at the same time: each its own files, tensor by tensor.

Not here: what makes the files valid (`publish.py`), and how tensors come to a writer (`carrier.py`). Before editing: a writer opens, fills
and closes files only where all ranks agree on how it went, so that a full disk on one is an error on all of them; each rank removes what
it began, and nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from trainer_kit.exceptions import CheckpointError
from trainer_kit.storage import Folder
from trainer_kit.weights.carrier import Carrier, Order, orders_of
from trainer_kit.weights.format import build_header, num_bytes, tensor_bytes
from trainer_kit.weights.items import StateItem
from trainer_kit.weights.publish import TemporaryFile
from trainer_kit.weights.shards import Shard, fill

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext

ROUND_BYTES = 32 * 2**20  # of small tensors that a writer gets at a time; one process takes each alone


class ShardFiles:
    """headers: the first bytes of each file. `write` is a collective of all ranks of the context."""

    def __init__(
        self, folder: Folder, shards: Sequence[Shard[StateItem]], headers: Sequence[bytes], context: DistributedContext | None
    ) -> None:
        self._carrier = Carrier(context, torch.device("cpu"))
        team = self._carrier.team
        self._team, self._folder, self._size = team, folder, sum(shard.size for shard in shards)
        writers = [rank for rank, is_one in enumerate(team.exchange(context is None or context.tensor_rank == 0)) if is_one]
        owner = [writers[index * len(writers) // len(shards)] for index in range(len(shards))]  # neighbours of one stage together
        self._todo = [(shard, header) for shard, header, rank in zip(shards, headers, owner, strict=True) if rank == team.rank]
        orders: dict[int, list[Order]] = {rank: [] for rank in writers}
        for shard, rank in zip(shards, owner, strict=True):
            orders[rank] += orders_of(shard.tensors, rank)
        limit = 1 if team.is_alone else min(ROUND_BYTES, max(shard.size for shard in shards) // 2)  # as much may be on its way
        self._rounds = _rounds(list(orders.values()), limit)
        self._begun: list[TemporaryFile] = []
        self._left = 0  # tensors that the file that is open waits for
        self._arrived: list[torch.Tensor] = []

    def write(self) -> None:
        """All files, under their temporary names. If it fails on a rank, it fails on all, and nothing is left."""
        try:
            for orders in self._rounds:
                self._arrived = self._carrier.bring(orders, before=self._write_arrived)
            self._team.everywhere(self._write_arrived)
        except BaseException as error:
            self.abandon(error)
            raise

    def _write_arrived(self) -> None:
        tensors, self._arrived = self._arrived[::-1], []
        with explained(self._folder, self._size):
            while tensors:
                self._write(tensors.pop())

    def _write(self, tensor: torch.Tensor) -> None:
        if not self._left:
            shard, header = self._todo.pop(0)
            self._folder.make()  # on this rank, too, where the ranks do not share their storage: that is told later
            self._begun.append(TemporaryFile(self._folder, shard.file))
            self._begun[-1].write(header)
            self._left = len(shard.tensors)
        self._begun[-1].write(tensor_bytes(tensor))
        self._left -= 1
        if not self._left:
            self._begun[-1].finish()

    def abandon(self, error: BaseException) -> None:
        """Remove what this rank wrote; a failure to do so is told, and does not hide the first error."""
        self._arrived = []
        try:
            while self._begun:
                self._begun.pop().remove()
        except (OSError, CheckpointError) as second:
            error.add_note(f"the unfinished export in {self._folder.url} could not be removed either: {second}")


def header_of(shard: Shard[StateItem], metadata: dict[str, str]) -> bytes:
    """The first bytes of a file."""
    return build_header(((item.name, item.dtype, item.shape) for item in shard.tensors), metadata)[0]


@contextmanager
def explained(folder: Folder, size: int) -> Iterator[None]:
    """What the operating system says becomes a CheckpointError that says what was needed."""
    try:
        yield
    except OSError as error:
        free = f" ({shutil.disk_usage(folder.url).free:,} are free)" if folder.is_local and folder.exists() else ""
        raise CheckpointError(
            f"the model state could not be written to {folder.url}: {error}. It needs {size:,} bytes there{free}, beside an earlier "
            "export, which is kept until the new one is complete"
        ) from error


def _rounds(by_rank: Sequence[Sequence[Order]], limit: int) -> list[list[Order]]:
    """What is brought at the same time: for each writer its next orders."""
    batches = [fill(((order, num_bytes(order.item.dtype, order.item.shape)) for order in orders), limit) for orders in by_rank]
    return [[order for batch in at_once for order in batch or ()] for at_once in zip_longest(*batches)]
