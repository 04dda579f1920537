"""Small exchanges between the hosts of all ranks, never on a device: sums of numbers, plain values, and agreement on what to do.

They use a gloo group of the world that nothing else uses, so they can run while collectives of the mesh are under way. Before editing:
each call is a collective, all ranks make the same ones in the same order; only `agree` notices when they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trainer_kit.mesh.calls import RollCall

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

    from trainer_kit.mesh.failure import FailureWatch


class HostChannel(Protocol):
    """What both channels do. Values are numbers and plain objects."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks, in float64."""
        ...

    def start_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start a sum over all ranks; the callable waits for it."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        ...

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks, by rank, on rank 0; None elsewhere."""
        ...

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0."""
        ...

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        ...

    def agree(self, what: str, detail: str = "") -> None:
        """Raise StateError on every rank unless all of them make the same call, such as `what="export()"`."""
        ...

    def for_background(self) -> ProcessGroup | None:
        """A gloo group of the world for collectives of a background thread; None in one process."""
        ...


class LocalChannel:
    """One process: every value is its own."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """See HostChannel."""
        return list(values)

    def start_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """See HostChannel."""
        found = list(values)
        return lambda: found

    def exchange(self, value: Any) -> list[Any]:
        """See HostChannel."""
        return [value]

    def gather(self, value: Any) -> list[Any] | None:
        """See HostChannel."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """See HostChannel."""
        return value

    def barrier(self) -> None:
        """See HostChannel."""

    def agree(self, what: str, detail: str = "") -> None:
        """See HostChannel."""

    def for_background(self) -> None:
        """See HostChannel."""


class GroupChannel:
    """Plain values between the ranks of a gloo group."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._rank, self._world_size = group, group.rank(), group.size()

    def exchange(self, value: Any) -> list[Any]:
        """See HostChannel."""
        import torch.distributed as dist

        values: list[Any] = [None] * self._world_size
        dist.all_gather_object(values, value, self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        """See HostChannel."""
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, group=self._group, device=torch.device("cpu"), group_src=0)
        return box[0]


class WorldChannel(GroupChannel):
    """The ranks of a world. While a rank waits in `agree`, what ended another one is raised."""

    def __init__(
        self,
        group: ProcessGroup,
        store: Store,
        make_background: Callable[[], ProcessGroup],
        failures: FailureWatch,
        *,
        agree_timeout: float = 25.0,
    ) -> None:
        super().__init__(group)
        self.agree_timeout = agree_timeout
        self._make_background = make_background
        self._background: ProcessGroup | None = None
        self._roll_call = RollCall(store, self._rank, self._world_size, failures)

    def sum(self, values: Sequence[float]) -> list[float]:
        """See HostChannel."""
        return self.start_sum(values)()

    def start_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """See HostChannel."""
        import torch.distributed as dist

        numbers = torch.tensor(values, dtype=torch.float64, device="cpu")
        work = dist.all_reduce(numbers, group=self._group, async_op=True) if len(values) else None

        def wait() -> list[float]:
            if work is not None:
                work.wait()
            return numbers.tolist()

        return wait

    def gather(self, value: Any) -> list[Any] | None:
        """See HostChannel."""
        import torch.distributed as dist

        values: list[Any] | None = [None] * self._world_size if self._rank == 0 else None
        dist.gather_object(value, values, 0, self._group)
        return values

    def barrier(self) -> None:
        """See HostChannel."""
        self.sum([0.0])

    def for_background(self) -> ProcessGroup:
        """See HostChannel."""
        if self._background is None:
            self._background = self._make_background()
        return self._background

    def agree(self, what: str, detail: str = "") -> None:
        """See HostChannel."""
        self._roll_call.agree(what, detail, self.agree_timeout)
