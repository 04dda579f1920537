"""`Recorder`: when this rank computed what during a pack, on the clock of its device.

Hosts of one machine share a clock; those of several agree on the moment at which all of them began.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from trainer_kit.pipeline.actions import Action
from trainer_kit.pipeline.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer_kit.mesh.context import DistributedContext


class Recorder:
    """For one pack; made on all ranks at the same time, which is a collective."""

    def __init__(self, context: DistributedContext) -> None:
        self._context, self._device = context, context.device
        self._on_host: list[tuple[Action, float, float]] = []
        self._on_device: list[tuple[Action, torch.Event, torch.Event]] = []
        context.host.barrier()
        self._begin_event = self._mark()
        self._begin = time.perf_counter()

    def _mark(self) -> torch.Event | None:
        """A point in the queue of the device; None where nothing is queued."""
        if self._device.type == "cpu":
            return None
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """The block computes an action."""
        first, start = self._mark(), time.perf_counter()
        yield
        last, end = self._mark(), time.perf_counter()
        if first is None or last is None:
            self._on_host.append((action, start, end))
        else:
            self._on_device.append((action, first, last))

    def timeline(self, ranks: Sequence[int]) -> Timeline:
        """That of the pipeline of these ranks of the world, in the order of its places. A collective of the world; waits for the device."""
        parts = self._context.host.exchange((self._context.node, self._begin, self._times()))
        one_machine = len({node for node, _, _ in parts}) == 1
        records = [
            (place, action, start - (0.0 if one_machine else begin), end - (0.0 if one_machine else begin))
            for place, (_, begin, times) in enumerate(parts[rank] for rank in ranks)
            for action, start, end in times
        ]
        return Timeline.from_records(records, len(ranks))

    def _times(self) -> list[tuple[Action, float, float]]:
        begin = self._begin_event
        if begin is None:
            return self._on_host
        torch.accelerator.synchronize()
        since = [(action, begin.elapsed_time(first), begin.elapsed_time(last)) for action, first, last in self._on_device]
        return [(action, self._begin + start / 1000, self._begin + end / 1000) for action, start, end in since]
