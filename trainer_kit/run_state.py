"""Where a run stands, and what was asked of it during a step."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer_kit.exceptions import ConfigurationError, StateError, nearest

RequestKind = Literal["evaluate", "save"]
ARGUMENTS = {"evaluate": ("data", "task", "name"), "save": ("path", "asynchronous")}


@dataclass(slots=True)
class RunState:
    """Counters of a run. `step` is the number of finished optimizer steps; `phase` says what the trainer is doing now."""

    step: int = 0
    epoch: int = 0
    total_steps: int | None = None
    deadline: float | None = None
    phase: Literal["idle", "between steps", "step", "evaluation", "prediction"] = "idle"
    stop_reason: str | None = None
    stop_raising: BaseException | None = None

    @property
    def finished(self) -> bool:
        """Whether no further step is to be made."""
        return (
            self.stop_reason is not None
            or (self.total_steps is not None and self.step >= self.total_steps)
            or (self.deadline is not None and self._out_of_time())
        )

    def _out_of_time(self) -> bool:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self.stop_reason = "max_time is over"
            return True
        return False

    def refuse_inside_step(self, what: str, instead: str) -> None:
        """Raise StateError if a step is running."""
        if self.phase == "step":
            raise StateError(f"{what} inside a step would see a half-made step; {instead}")


@dataclass(slots=True)
class Requests:
    """What callbacks asked for during a step, carried out after it: evaluations first, then saves.

    settle_saves: brings out the outcome of a background save that has ended meanwhile.
    """

    evaluate: Callable[..., Any]
    save: Callable[..., Any]
    settle_saves: Callable[[], None]
    _pending: list[tuple[RequestKind, dict[str, Any]]] = field(default_factory=list)

    def add(self, kind: RequestKind, arguments: dict[str, Any]) -> None:
        """Ask for an evaluation or a save; the same save twice is one."""
        if kind not in ARGUMENTS:
            raise ConfigurationError(f"request({kind!r}): expected 'evaluate' or 'save'")
        for name in arguments:
            if name not in ARGUMENTS[kind]:
                raise ConfigurationError(f"request({kind!r}, {name}=...): {nearest(name, ARGUMENTS[kind])}")
        if kind == "evaluate" and "data" not in arguments:
            raise ConfigurationError("request('evaluate'): data= is missing, the data to evaluate")
        if kind == "evaluate" or (kind, arguments) not in self._pending:
            self._pending.append((kind, arguments))

    def carry_out(self) -> None:
        """Do what is pending, after the outcome of a background save that has ended. A request made meanwhile is done too."""
        self.settle_saves()
        while self._pending:
            position = next((i for i, (kind, _) in enumerate(self._pending) if kind == "evaluate"), 0)
            kind, arguments = self._pending.pop(position)
            (self.evaluate if kind == "evaluate" else self.save)(**arguments)

    def clear(self) -> None:
        """Forget what is pending, after an error."""
        self._pending.clear()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The bound method without keeping its object alive. Calling it after the object is gone is an error."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = reference()
        assert bound is not None, "called after its object was gone"
        return bound(*args, **kwargs)

    return call
