"""How long a collective may take: long while things are set up, saved or exported, short in the loop.

Before editing: a timeout of a process group holds for collectives that start afterwards, on this rank alone; all ranks change it at the
same places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from trainer_kit.mesh.groups import GroupCache
from trainer_kit.torch_private import group_timeout, set_group_timeout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Timeouts:
    """The timeouts, in seconds, of the groups of a world that collectives of the main thread use; `short` is for the loop.

    borrowed: a group that somebody else made, and that gets its own timeout back at the end.
    """

    def __init__(self, cache: GroupCache, default: ProcessGroup, setup: float, step: float, *, borrowed: bool) -> None:
        self.setup, self.step = setup, step
        self._cache, self._default, self._borrowed = cache, default, borrowed
        self._before = group_timeout(default)
        self._set(setup)

    @contextmanager
    def short(self) -> Iterator[None]:
        """The block is the loop."""
        yield from self._during(self.step)

    @contextmanager
    def long(self) -> Iterator[None]:
        """The block takes as long as the set-up."""
        yield from self._during(self.setup)

    def _during(self, seconds: float) -> Iterator[None]:
        before = self._now
        if seconds != before:
            self._set(seconds)
        try:
            yield
        finally:
            if seconds != before:
                self._set(before)

    def _set(self, seconds: float) -> None:
        self._now = seconds
        self._cache.timeout = timedelta(seconds=seconds)  # for groups that are made from now on
        for group in [self._default, *self._cache.in_step()]:
            set_group_timeout(group, self._cache.timeout)

    def give_back(self) -> None:
        """The end: a borrowed group is as it was."""
        if self._borrowed and self._before is not None:
            set_group_timeout(self._default, self._before)
