"""Values of a step, from the device to the host without a wait, and their history.

A value logged in a step joins the next record (every `log_every`-th step); the record is read a few steps later, under its own
step. Nothing here runs on the device's critical path: `Deferred` starts the copy, and only reading it may wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from trainer_kit.exceptions import ConfigurationError

Value = float | int | bool | torch.Tensor


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
    numbers: dict[str, float]
    names: list[str]
    deferred: Deferred

    def values(self) -> dict[str, float]:
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
    """

    def __init__(self, deliver: Callable[[int, dict[str, float]], None], *, log_every: int, log_delay: int) -> None:
        self._deliver = deliver
        self._log_every, self._log_delay = log_every, log_delay
        self._open: dict[str, Value] = {}
        self._pending: deque[_Record] = deque()

    def due(self, finished: int) -> bool:
        """Whether the step that makes `finished` steps is a recorded one."""
        return finished % self._log_every == 0

    def log(self, name: str, value: Value) -> None:
        """Keep a number or one-element tensor for the next record; the last value of a name counts."""
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ConfigurationError(
                    f"log({name!r}, ...): found a tensor of shape {tuple(value.shape)}, expected one element; reduce it first"
                )
            value = value.detach().clone()  # the caller may change the tensor before the record is read
        elif not isinstance(value, (float, int)) and not hasattr(value, "__float__"):
            raise ConfigurationError(f"log({name!r}, ...): found a {type(value).__name__}, expected a number or a one-element tensor")
        self._open[name] = value

    def state_dict(self) -> dict[str, Value]:
        """What was logged for the next record."""
        return dict(self._open)

    def load_state_dict(self, state: dict[str, Value]) -> None:
        """Take back what `state_dict` gave, in place of what is open now."""
        self._open = dict(state)

    def close_step(self, finished: int) -> None:
        """Make a record of what was logged; its copy to the host starts here."""
        values, self._open = self._open, {}
        if not values:
            return
        names = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
        numbers = {name: float(value) for name, value in values.items() if not isinstance(value, torch.Tensor)}
        by_device: dict[torch.device, list[str]] = {}
        for name in names:
            by_device.setdefault(values[name].device, []).append(name)  # type: ignore[union-attr]
        for group in by_device.values():
            self._pending.append(_Record(finished, numbers, group, Deferred([values[name] for name in group])))  # type: ignore[misc]
            numbers = {}
        if not by_device:
            self._pending.append(_Record(finished, numbers, [], Deferred([])))

    def deliver_due(self, finished: int) -> None:
        """Deliver the records that are at least `log_delay` steps old."""
        while self._pending and self._pending[0].step + self._log_delay <= finished:
            self._deliver_one()

    def flush(self) -> None:
        """Deliver everything recorded so far."""
        while self._pending:
            self._deliver_one()

    def _deliver_one(self) -> None:
        step = self._pending[0].step
        values: dict[str, float] = {}
        while self._pending and self._pending[0].step == step:
            values |= self._pending.popleft().values()
        self._deliver(step, values)
