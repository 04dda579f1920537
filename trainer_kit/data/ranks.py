"""What the data ranks tell each other about their packs: whether there is one, how many microbatches it has, and that peers read the same.

Only where a provider does not know the other ranks by itself, and once for the first pack of a stream. Before editing: everything here
is a collective on the hosts. All ranks take the same decisions from the same answers, so that they go on asking in the same order.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainer_kit.data.pack import Pack, is_movable_object, iterate_tensors
from trainer_kit.exceptions import ConfigurationError, StateError

if TYPE_CHECKING:
    from trainer_kit.data.provider import DataProvider
    from trainer_kit.mesh.context import DistributedContext

_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What one rank has next: a pack of `epoch` with so many microbatches; with None, no more pack before that epoch, or an error."""

    data_rank: int
    epoch: int
    num_microbatches: int | None
    is_last: bool | None
    error: str | None


class Ranks:
    """Asks the other ranks of a world on behalf of the stream of one provider.

    asks: whether data ranks must ask before each pack. checked: whether the first pack was. place: data rank, and number of them.
    """

    def __init__(self, context: DistributedContext, provider: DataProvider, provider_name: str) -> None:
        self._context, self._name = context, provider_name
        self.rank = context.rank
        self.place = (context.data_rank, context.num_data_ranks)
        self.asks = not provider.knows_all_ranks and context.num_data_ranks > 1
        self.checked = self._said_uneven = False

    def random_key(self, seed: int) -> tuple[int, ...]:
        """What random numbers of the data are a function of: the same on peers of a data rank, another on each data rank."""
        data_rank, num_data_ranks = self.place
        return (seed, data_rank) if num_data_ranks > 1 else (seed,)

    def ask(self, pack: Pack | None, error: Exception | None, epoch: int) -> list[Answer]:
        """The answers of all ranks, by rank. An error on one of them ends the call on all."""
        count, is_last = (None, None) if pack is None else (len(pack.microbatches), pack.is_last)
        text = None if error is None else f"{type(error).__name__}: {error}"
        mine = Answer(self._context.data_rank, epoch if pack is None else pack.epoch, count, is_last, text)
        answers = [Answer(*found) for found in self._context.host.exchange(tuple(mine))]
        if error is not None:
            raise error
        for rank, answer in enumerate(answers):
            if answer.error is not None:
                raise StateError(f"rank {rank} could not fetch its next pack from {self._name}: {answer.error}")
        return answers

    def say_who_ended_first(self, ended: Sequence[Answer], others: Sequence[Answer]) -> None:
        """Warn, once and on one rank, that packs of others are left out, if any of them has one."""
        longer = [answer for answer in others if answer.num_microbatches is not None]
        if self._said_uneven or not ended or not longer:
            return
        self._said_uneven = True
        if self._context.is_main:
            _log.warning(
                "epoch %d of %s ended first on %s, and %s had more packs, which are left out: an epoch ends on all ranks with the "
                "shortest. Give every data rank the same number of packs to use all of them",
                longer[0].epoch, self._name, _data_ranks(ended), _data_ranks(longer),
            )  # fmt: skip

    def fewest(self, count: int | None) -> int | None:
        """The smallest of the ranks' numbers; None if one of them does not know its own."""
        if not self.asks:
            return count
        counts = self._context.host.exchange(count)
        return None if None in counts else min(counts)

    def by_data_rank(self, value: Any) -> dict[str, list[Any]]:
        """The values of all data ranks, as `{"ranks": [...]}`; just this value if there is one data rank."""
        data_rank, num_data_ranks = self.place
        if num_data_ranks == 1:
            return value
        found = dict(self._context.host.exchange((data_rank, value)))
        return {"ranks": [found[rank] for rank in range(num_data_ranks)]}

    def check_first(self, pack: Pack, position: Any) -> None:
        """Once per stream: peers of a data rank hold the same data, and all ranks stand at the same global position, if there is one."""
        context = self._context
        has_peers = context.world_size > context.num_data_ranks
        digest = checksum([pack.microbatches, pack.filler]) if has_peers else 0
        shapes = [tuple(tensor.shape) for tensor in iterate_tensors(pack.microbatches)][:8] if has_peers else []
        found = context.host.exchange((context.data_rank, (digest, shapes), position))
        for data_rank in range(context.num_data_ranks):
            digests = {rank: theirs for rank, (number, theirs, _) in enumerate(found) if number == data_rank}
            if len({digest for digest, _ in digests.values()}) > 1:
                lines = ", ".join(f"rank {rank}: shapes {shapes}, checksum {digest:08x}" for rank, (digest, shapes) in digests.items())
                raise ConfigurationError(
                    f"the ranks {list(digests)} are peers of data rank {data_rank} and must get the same pack, but {self._name} gave them "
                    f"different ones ({lines}). The usual causes: the data is split by rank in place of context.data_rank, or made with "
                    "random numbers that depend on the rank"
                )
        places = [place for _, _, place in found]
        if any(place != places[0] for place in places):
            lines = ", ".join(f"rank {rank} at {place}" for rank, place in enumerate(places))
            raise ConfigurationError(
                f"{self._name} stands at different positions: {lines}. The usual cause is a dataset with another size on some ranks"
            )
        self.checked = True


def _data_ranks(answers: Sequence[Answer]) -> str:
    ranks = sorted({answer.data_rank for answer in answers})
    return f"data rank {ranks[0]}" if len(ranks) == 1 else f"the data ranks {', '.join(map(str, ranks))}"


def agreed_is_last(answers: Sequence[Answer]) -> bool | None:
    """Whether the packs of all ranks are the last of their epoch: if one is, all are."""
    found = {answer.is_last for answer in answers}
    return True if True in found else (None if None in found else False)


def checksum(tree: Any) -> int:
    """A number that changes with the structure of a tree, and with any bit of its tensors and plain values."""
    value = 0
    for piece in _pieces(tree):
        value = zlib.crc32(piece, value)
    return value


def _pieces(tree: Any) -> Iterator[bytes | memoryview]:
    yield type(tree).__name__.encode()
    if isinstance(tree, torch.Tensor):
        yield repr((tuple(tree.shape), tree.dtype)).encode()
        if tree.layout is torch.strided and not tree.is_quantized:
            kept = tree.detach().cpu().resolve_conj().resolve_neg().contiguous()
            if size := kept.numel() * kept.element_size():
                yield memoryview((ctypes.c_ubyte * size).from_address(kept.data_ptr())).cast("B")
    elif isinstance(tree, (str, bytes, int, float, complex, type(None))):
        yield repr(tree).encode()
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield repr(key).encode()
            yield from _pieces(value)
    elif isinstance(tree, (list, tuple)) and not is_movable_object(tree):
        for value in tree:
            yield from _pieces(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not is_movable_object(tree):
        for field in dataclasses.fields(tree):
            yield from _pieces(getattr(tree, field.name, None))
