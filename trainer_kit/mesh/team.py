"""`Team`: ranks that do something on their hosts together, so that an error of one is the same error on all of them.

Files are the usual reason: rank 0 removes, chooses or writes, and the others must learn how it went; or every rank writes its own file,
and none may go on if one failed. Not here: an error inside a step, which ends the ranks without a collective (`failure.py`).

Before editing: every method is a collective, which all ranks call. An action must not contain a collective that a failed rank would
leave the others waiting in.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from trainer_kit.mesh.host import GroupChannel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trainer_kit.mesh.context import DistributedContext
    from trainer_kit.mesh.host import HostChannel

T = TypeVar("T")


class Team:
    """One process alone. The other teams have several ranks."""

    rank = 0
    num_ranks = 1

    @staticmethod
    def of(context: DistributedContext | None) -> Team:
        """All ranks of a run, over its host channel."""
        return Team() if context is None or context.world_size == 1 else _Ranks(context.host, context.rank, context.world_size)

    @staticmethod
    def of_group(group: ProcessGroup | None) -> Team:
        """The ranks of a gloo group."""
        return Team() if group is None else _Ranks(GroupChannel(group), group.rank(), group.size())

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.num_ranks == 1

    @property
    def is_main(self) -> bool:
        """Whether this is its first rank."""
        return self.rank == 0

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """The value of the first rank."""
        return value

    def everywhere(self, action: Callable[[], T]) -> T:
        """Every rank does it; the result is its own. If one fails, all ranks raise the error of the lowest rank that did."""
        if self.is_alone:
            return action()
        result, failure = _attempt(action)
        for rank, told in enumerate(self.exchange(_told(failure))):
            if told is not None:
                _raise(rank, told, failure if rank == self.rank else None)
        return result  # type: ignore[return-value]

    def on_main(self, action: Callable[[], T]) -> T:
        """The first rank does it, and all get its result or raise its error."""
        if self.is_alone:
            return action()
        result, failure = _attempt(action) if self.is_main else (None, None)
        told, result = self.broadcast((_told(failure), result))
        if told is not None:
            _raise(0, told, failure)
        return result


class _Ranks(Team):
    """Several ranks over a channel between them."""

    def __init__(self, channel: HostChannel | GroupChannel, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.exchange, self.broadcast = channel.exchange, channel.broadcast  # type: ignore[method-assign]


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Result and error. An interrupt is not kept back: it ends this rank now."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def _told(failure: Exception | None) -> tuple[BaseException, str] | None:
    return None if failure is None else (portable(failure), "".join(traceback.format_exception(failure)))


def _raise(rank: int, told: tuple[BaseException, str], own: BaseException | None) -> None:
    error, trace = told
    if own is not None:
        own.add_note(f"on rank {rank}")
        raise own
    error.add_note(f"on rank {rank}:\n{trace}")
    raise error


def portable(error: BaseException) -> BaseException:
    """The error itself if other ranks can take it in, else a RuntimeError that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception as reason:  # whatever pickling someone else's class gives; the text is what matters
        stand_in = RuntimeError(f"{type(error).__name__}: {error}")
        stand_in.add_note(f"in place of the error itself, which cannot be sent to other ranks: {reason}")
        return stand_in
