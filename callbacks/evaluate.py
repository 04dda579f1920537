"""Runs an evaluation every so many steps, at the start, and at the end of a fit.

Not here: the evaluation itself (`trainer.evaluate`). Know before editing: evaluations are requests, which run before a save of
the same step, so the checkpoint knows their values and this callback's note that they were made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.callbacks._arguments import whole_number
from trainer_kit.exceptions import ConfigurationError

if TYPE_CHECKING:
    from trainer_kit.events import BuildStart, FitEnd, FitStart, StepEnd
    from trainer_kit.task import Task
    from trainer_kit.trainer import Trainer


class Evaluate(Callback):
    """Records `<name>/loss` and `<name>/<metric>` of some data.

    data: whatever `trainer.evaluate` takes.
    every: steps between evaluations; None: only at the start or end.
    at_start: before the first step of the run (not again when it resumes).
    at_end: after the last step of a fit, unless that step was evaluated already.
    task: another task than the one that is trained.
    name: the prefix of the recorded names; give another one to a second Evaluate.
    """

    def __init__(
        self,
        data: Any,
        *,
        every: int | None = None,
        at_start: bool = False,
        at_end: bool = True,
        task: Task | None = None,
        name: str = "val",
    ) -> None:
        if data is None:
            raise ConfigurationError("Evaluate(data=None): expected a data provider, a DataLoader or another iterable of microbatches")
        self.every = None if every is None else whole_number(self, "every", every)
        if not name or not isinstance(name, str):
            raise ConfigurationError(f"Evaluate(name={name!r}): expected the prefix of the recorded names, such as 'val'")
        if every is None and not at_start and not at_end:
            raise ConfigurationError("Evaluate(every=None, at_start=False, at_end=False) never evaluates; set one of them")
        self.data, self.task, self.name = data, task, name
        self.at_start, self.at_end = at_start, at_end
        self._first_step = 0
        self._evaluated = -1  # the step of the newest evaluation

    @property
    def state_key(self) -> str:
        return f"Evaluate.{self.name}"

    def describe(self) -> str:
        times = ["at the start"] if self.at_start else []
        times += [f"every {self.every} steps"] if self.every else []
        times += ["at the end"] if self.at_end else []
        return f"Evaluate({self.name}: {', '.join(times)})"

    def state_dict(self) -> dict[str, Any]:
        return {"evaluated": self._evaluated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._evaluated = state["evaluated"]

    def on_build_start(self, event: BuildStart) -> None:
        self._evaluated = -1  # it may have been in another trainer

    def on_fit_start(self, event: FitStart) -> None:
        self._first_step = event.trainer.step
        if self.at_start and event.trainer.step == 0:
            self._request(event.trainer)

    def on_step_end(self, event: StepEnd) -> None:
        step = event.trainer.step
        if (self.every and step % self.every == 0) or (self.at_end and step == event.trainer.total_steps):
            self._request(event.trainer)

    def on_fit_end(self, event: FitEnd) -> None:
        step = event.trainer.step
        if self.at_end and not event.interrupted and step > self._first_step and step != self._evaluated:
            self._request(event.trainer)

    def _request(self, trainer: Trainer) -> None:
        self._evaluated = trainer.step
        trainer.request("evaluate", data=self.data, name=self.name, task=self.task)
