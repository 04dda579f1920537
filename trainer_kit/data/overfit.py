"""`RepeatedPacks`: the first packs of a provider, kept and given again and again, to see whether a model can learn them by heart.

The one thing to know before editing: a resumed run has to get the same packs, so they are read with random streams of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from trainer_kit.data.pack import Pack, as_pack
from trainer_kit.data.provider import DataProvider
from trainer_kit.data.randomness import fork_random


class RepeatedPacks(DataProvider):
    """The first `count` packs of the first epoch of `provider`; going through them once is an epoch.

    key: what the random streams of the reading are a function of.
    """

    draws_random = False

    def __init__(self, provider: DataProvider, count: int, *key: object) -> None:
        self._provider = provider
        self._count = count
        self._key = key
        self._kept: list[Pack] | None = None
        self.pin_memory = provider.pin_memory
        self.knows_all_ranks, self.global_position = provider.knows_all_ranks, provider.global_position

    def packs(self, position: dict[str, Any] | None) -> Iterator[Pack | list[Any]]:
        """The rest of one round."""
        if self._kept is None:
            with fork_random(*self._key, "overfit"):
                first = list(islice(self._provider.packs(None), self._count))
            self._kept = [as_pack(pack, 0, type(self._provider).__name__) for pack in first]
            self._provider.close()
        epoch, start = (position or {}).get("epoch", 0), (position or {}).get("packs", 0)
        for index in range(start, len(self._kept)):
            kept, is_last = self._kept[index], index + 1 == len(self._kept)
            after = {"epoch": epoch + 1, "packs": 0} if is_last else {"epoch": epoch, "packs": index + 1}
            yield Pack(list(kept.microbatches), epoch, after, is_last, kept.num_on_all, kept.filler)

    def num_packs(self) -> int | None:
        known = self._provider.num_packs()
        return self._count if known is None else min(self._count, known)

    def describe(self) -> dict[str, Any]:
        return {**self._provider.describe(), "overfit_packs": self._count, "num_packs": self.num_packs()}

    def hparams(self) -> dict[str, Any]:
        return self._provider.hparams()

    def close(self) -> None:
        self._provider.close()
