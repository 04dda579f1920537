"""`StateStream`: the tensors that an export would write, handed out in buckets, for an engine in the same processes.

Before editing: ranks agree by name before each bucket, since user code runs between buckets, and one rank may have left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.team import Team
from trainer_kit.weights.carrier import Carrier, orders_of
from trainer_kit.weights.format import num_bytes
from trainer_kit.weights.items import StateItem, checked_items
from trainer_kit.weights.shards import fill, parse_size

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext

Bucket = list[tuple[str, torch.Tensor]]
Receivers = Literal["all", "main"]


class StateStream:
    """Iterate over it once: buckets of (name, tensor) pairs in the order of an export. `len` says how many there are.

    A bucket has at most `bucket_bytes`, or one larger tensor. The tensors are whole, on the device of the run, and the receiver's own: they
    do not change with the model. to="main": rank 0 gets the tensors, and the buckets of the other ranks are empty.
    On a mesh all ranks take the same buckets; when one leaves early, all must.
    """

    def __init__(
        self,
        items: Iterable[StateItem],
        context: DistributedContext,
        *,
        bucket_bytes: int | str = "512MB",
        dtype: torch.dtype | None = None,
        to: Receivers = "all",
    ) -> None:
        if to not in ("all", "main"):
            raise ConfigurationError(f'model_state(to={to!r}): expected "all" or "main"')
        limit = parse_size(bucket_bytes, "bucket_bytes")
        final = Team.of(context).everywhere(lambda: checked_items(list(items), dtype))
        receivers = range(context.world_size if to == "all" else 1)
        orders = [orders_of(final, rank) for rank in receivers]
        sized = ((index, num_bytes(item.dtype, item.shape)) for index, item in enumerate(final))
        self._buckets = [[of_rank[index] for index in bucket for of_rank in orders] for bucket in fill(sized, limit)]
        self._context, self._carrier = context, Carrier(context, context.device, fresh=True)
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[Bucket]:
        return self

    def __next__(self) -> Bucket:
        if self._num_taken == len(self._buckets):
            raise StopIteration
        self._context.host.agree("the next bucket of model_state()")
        orders = self._buckets[self._num_taken]
        tensors = self._carrier.bring(orders, before=_nothing)
        self._num_taken += 1
        return list(zip((order.item.name for order in orders if order.rank == self._context.rank), tensors, strict=True))

    def leave(self) -> None:
        """No more buckets are wanted. Raises StateError, on every rank, if another one goes on."""
        if self._num_taken < len(self._buckets):
            self._num_taken = len(self._buckets)
            self._context.host.agree("the end of model_state()")


def _nothing() -> None:
    pass
