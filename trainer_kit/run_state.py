"""Where a run stands, and what was asked of it during a step.

A wish to stop counts from the next boundary on (`boundary.py`), where all ranks learn of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trainer_kit.exceptions import ConfigurationError, StateError, nearest

if TYPE_CHECKING:
    from trainer_kit.boundary import Boundary

RequestKind = Literal["evaluate", "save"]
ARGUMENTS = {"evaluate": ("data", "task", "name"), "save": ("path", "asynchronous")}


@dataclass(slots=True)
class RunState:
    """Counters of a run. `step` is the number of finished optimizer steps; `phase` says what the trainer is doing now.

    stop_reason, stop_raising: what this rank wishes, and what all wish once stop_agreed, raising_agreed say so.
    together: whether the trainer is in a call that all ranks make. failing: whether it is on the way out of an error.
    """

    step: int = 0
    epoch: int = 0
    total_steps: int | None = None
    deadline: float | None = None
    phase: Literal["idle", "between steps", "step", "evaluation", "prediction"] = "idle"
    stop_reason: str | None = None
    stop_raising: BaseException | None = None
    stop_agreed: bool = False
    raising_agreed: bool = False
    together: bool = False
    failing: bool = False

    @property
    def finished(self) -> bool:
        """Whether no further step is to be made."""
        return self.stop_agreed or (self.total_steps is not None and self.step >= self.total_steps)

    def refuse_inside_step(self, what: str, instead: str) -> None:
        """Raise StateError if a step is running."""
        if self.phase == "step":
            raise StateError(f"{what} inside a step would see a half-made step; {instead}")


@dataclass(slots=True)
class Requests:
    """What callbacks asked for during a step, carried out after it, on all ranks together: evaluations first, then saves."""

    run: RunState
    evaluate: Callable[..., Any]
    save: Callable[..., Any]
    boundary: Boundary
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
        if self.run.failing:
            raise StateError(f"nothing comes of a request ({kind}) of a run that is ending by an error; leave it out of on_exception")
        if kind == "evaluate" or (kind, arguments) not in self._pending:
            self._pending.append((kind, arguments))

    def carry_out(self) -> None:
        """Meet the other ranks, then do what is pending. A request or a wish to stop made meanwhile counts too.

        An error ends it, and nothing is pending then.
        """
        try:
            self.boundary.meet(self._pending)
            while self._pending:
                position = next((i for i, (kind, _) in enumerate(self._pending) if kind == "evaluate"), 0)
                kind, arguments = self._pending.pop(position)
                (self.evaluate if kind == "evaluate" else self.save)(**arguments)
                self.boundary.meet(self._pending)
        except BaseException:
            self.clear()
            raise

    def carry_out_if_idle(self) -> None:
        """Do so outside of fits, where no step comes after which it would be done."""
        if self.run.phase == "idle":
            self.carry_out()

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
