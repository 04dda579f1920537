"""Values of a step, from the device to the host without a wait, and their history.

A value logged in a step joins the next record (every `log_every`-th step); the record is read a few steps later, under its own
step. Nothing here runs on the device's critical path: `Deferred` starts the copy, and only reading it may wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainer_kit.exceptions import ConfigurationError

Value = float | int | bool | torch.Tensor
Reduce = Literal["mean", "sum", "max", "min"]
REDUCTIONS = ("mean", "sum", "max", "min")
Combine = Callable[[dict[Hashable, float], dict[str, Reduce]], dict[str, float]]


class Deferred:
    """Device numbers on their way to the host. `values()` and `float()` wait for them if they are not here yet."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        wide = torch.float64 if not tensors or tensors[0].device.type in ("cpu", "cuda") else torch.float32
        stacked = torch.stack([t.reshape(()).to(wide) for t in tensors]) if tensors else torch.empty(0)
        self._event: torch.Event | None = None
        if stacked.device.type != "cpu":
            host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            host.copy_(stacked, non_blocking=True)
            self._event = torch.Event(device=stacked.device)
            self._event.record()
            stacked = host
        self._host = stacked

    def values(self) -> list[float]:
        """The numbers, in the order given; waits until they are here."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host.tolist()

    def __float__(self) -> float:
        (value,) = self.values()
        return value


@dataclass(slots=True)
class _Record:
    step: int
    numbers: dict[Hashable, float]
    names: list[Hashable]
    deferred: Deferred
    reductions: dict[str, Reduce]

    def values(self) -> dict[Hashable, float]:
        return self.numbers | dict(zip(self.names, self.deferred.values(), strict=True))


class History:
    """The last recorded values by name; bounded, so that a long run does not grow."""

    def __init__(self, max_points: int = 10_000) -> None:
        self._points: dict[str, deque[tuple[int, float]]] = {}
        self._max_points = max_points

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Append one record."""
        for name, value in values.items():
            self._points.setdefault(name, deque(maxlen=self._max_points)).append((step, value))

    def names(self) -> list[str]:
        """All names seen, in order of appearance."""
        return list(self._points)

    def last(self, name: str) -> tuple[int, float] | None:
        """The newest (finished steps, value) of a name."""
        points = self._points.get(name)
        return points[-1] if points else None

    def values(self, name: str) -> list[tuple[int, float]]:
        """All kept (finished steps, value) of a name, oldest first."""
        return list(self._points.get(name, ()))


class Records:
    """Collects the values of the running steps and delivers records.

    deliver: called with (finished steps, host values) of each record, in order of steps.
    combine: on a mesh, brings the values of all ranks together when a record is delivered, which all ranks do after the same step; the
    values are on the host by then, so no device waits for it. None: the values are those of the run.
    """

    def __init__(self, deliver: Callable[[int, dict[str, float]], None], *, log_every: int, log_delay: int) -> None:
        self._deliver = deliver
        self._log_every, self._log_delay = log_every, log_delay
        self._open: dict[Hashable, Value] = {}
        self._reductions: dict[str, Reduce] = {}
        self._pending: deque[_Record] = deque()
        self.combine: Combine | None = None
        self._delivering = False
        self.waits_for_ranks = False  # on a mesh: something of no step is to be recorded where all ranks next meet

    def due(self, finished: int) -> bool:
        """Whether the step that makes `finished` steps is a recorded one."""
        return finished % self._log_every == 0

    def log(self, name: str, value: Value, reduce: Reduce = "mean") -> None:
        """Keep a number or one-element tensor for the next record; the last value of a name counts, with its `reduce`.

        reduce: how the values of several data ranks become one.
        """
        if reduce not in REDUCTIONS:
            raise ConfigurationError(f"log({name!r}, ..., reduce={reduce!r}): expected one of {', '.join(map(repr, REDUCTIONS))}")
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ConfigurationError(
                    f"log({name!r}, ...): found a tensor of shape {tuple(value.shape)}, expected one element; reduce it first"
                )
            value = value.detach().clone()  # the caller may change the tensor before the record is read
        elif not isinstance(value, (float, int)) and not hasattr(value, "__float__"):
            raise ConfigurationError(f"log({name!r}, ...): found a {type(value).__name__}, expected a number or a one-element tensor")
        self._open[name] = value
        if reduce != "mean" or name in self._reductions:
            self._reductions[name] = reduce

    def add(self, values: Mapping[Hashable, Value]) -> None:
        """Keep values of the step that is about to close: losses, metrics, or on a mesh the sums that they are made of."""
        for key, value in values.items():
            self._open[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def state_dict(self) -> dict[str, Any]:
        """What was logged for the next record, and how it combines over ranks."""
        return {"values": {str(name): value for name, value in self._open.items()}, "reductions": dict(self._reductions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, in place of what is open now; an empty state holds nothing."""
        self._open, self._reductions = dict(state.get("values", {})), dict(state.get("reductions", {}))

    def close_outside_of_steps(self, finished: int, *, alone: bool, deliver: bool) -> None:
        """What was logged in no step has a record of its own: now, or where all ranks next meet unless this one is alone.

        What is logged while a record is delivered joins the next one, or each record would lead to another.
        """
        if self._delivering:
            return
        if not alone:
            self.waits_for_ranks = True
            return
        self.close_step(finished)
        if deliver:
            self.flush()

    def close_step(self, finished: int) -> None:
        """Make a record of what was logged; its copy to the host starts here."""
        values, self._open = self._open, {}
        reductions, self._reductions = self._reductions, {}
        self.waits_for_ranks = False
        if not values and self.combine is None:  # on a mesh others may have something
            return
        names = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
        numbers = {name: float(value) for name, value in values.items() if not isinstance(value, torch.Tensor)}
        by_device: dict[torch.device, list[Hashable]] = {}
        for name in names:
            by_device.setdefault(values[name].device, []).append(name)  # type: ignore[union-attr]
        for group in by_device.values():
            deferred = Deferred([values[name] for name in group])  # type: ignore[misc]
            self._pending.append(_Record(finished, numbers, group, deferred, reductions))
            numbers = {}
        if not by_device:
            self._pending.append(_Record(finished, numbers, [], Deferred([]), reductions))

    def deliver_due(self, finished: int) -> None:
        """Deliver the records that are at least `log_delay` steps old."""
        while self._pending and self._pending[0].step + self._log_delay <= finished:
            self._deliver_one()

    def flush(self) -> None:
        """Deliver everything recorded so far. On a mesh all ranks do so together."""
        while self._pending:
            self._deliver_one()

    def drop(self) -> None:
        """Forget the records that are on their way."""
        self._pending.clear()

    def _deliver_one(self) -> None:
        step = self._pending[0].step
        values: dict[Hashable, float] = {}
        reductions: dict[str, Reduce] = {}
        while self._pending and self._pending[0].step == step:
            record = self._pending.popleft()
            values |= record.values()
            reductions |= record.reductions
        of_run = {str(name): value for name, value in values.items()} if self.combine is None else self.combine(values, reductions)
        if not of_run:
            return
        self._delivering = True
        try:
            self._deliver(step, of_run)
        finally:
            self._delivering = False
