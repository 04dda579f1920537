"""Saves a training checkpoint every so many steps and at the end of a fit, and removes old ones.

Not here: what a checkpoint holds and how it becomes valid (`trainer_kit.checkpoint`). Know before editing: old checkpoints are
removed only after the new one is durable, and saves are requests, so that a save holds what every callback did in its step. On a mesh
all ranks decide the same, by the step; rank 0 alone removes, by the reduced metrics that all of them have.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.callbacks._arguments import choice, metric_name, warn_missing_metric, whole_number
from trainer_kit.checkpoint.folder import CheckpointFolder
from trainer_kit.exceptions import ConfigurationError

if TYPE_CHECKING:
    from trainer_kit.events import BuildStart, CheckpointLoaded, CheckpointSaved, CheckpointStart, FitEnd, FitStart, Metrics, StepEnd
    from trainer_kit.trainer import Trainer


class Checkpoint(Callback):
    """A folder `step-00000100` per checkpoint, named by the number of finished steps. `fit()` resumes from the newest by itself.

    folder: a path or an fsspec URL.
    every: steps between saves; the last step of a fit is saved too.
    keep_last: how many of the newest stay. None: all, or 1 when `keep_every` or `best` is given.
    keep_every: those whose step is a multiple of it stay for ever.
    best: `("val/loss", "min", 1)`: the checkpoints with the best values of a recorded metric stay too. A checkpoint's value is the
        newest one recorded at or before its step; an evaluation asked for in the same step comes before the save.
    asynchronous: copy the state, go on training, and write in the background.
    name: the key of this callback's own state; give another one to a second Checkpoint.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int,
        keep_last: int | None = None,
        keep_every: int | None = None,
        best: tuple[str, str, int] | None = None,
        asynchronous: bool = True,
        name: str = "Checkpoint",
    ) -> None:
        self.every = whole_number(self, "every", every)
        self.keep_last = None if keep_last is None else whole_number(self, "keep_last", keep_last)
        self.keep_every = None if keep_every is None else whole_number(self, "keep_every", keep_every)
        if keep_last is None and (keep_every is not None or best is not None):
            self.keep_last = 1
        self.best = None if best is None else self._checked_best(best)
        self.asynchronous = asynchronous
        self.name = name
        self.folder = CheckpointFolder(folder)
        self._url = os.fspath(folder)
        self._start_anew()

    def _start_anew(self) -> None:
        self._scores: dict[int, float] = {}  # step of a checkpoint -> its value of the metric
        self._latest: float | None = None  # the newest value of the metric
        self._seen: set[str] = set()
        self._first_step = 0
        self._asked = -1  # the step of the newest save

    def _checked_best(self, best: Any) -> tuple[str, str, int]:
        if not isinstance(best, tuple | list) or len(best) != 3:
            raise ConfigurationError(
                f"Checkpoint(best={best!r}): expected (metric, 'min' or 'max', how many), such as ('val/loss', 'min', 1)"
            )
        metric, mode, count = best
        return metric_name(self, "best[0]", metric), choice(self, "best[1]", mode, ("min", "max")), whole_number(self, "best[2]", count)

    @property
    def state_key(self) -> str:
        return self.name

    def describe(self) -> str:
        kept = [f"keep_last={self.keep_last}"] if self.keep_last else ["all are kept"]
        kept += [f"keep_every={self.keep_every}"] if self.keep_every else []
        kept += [f"best={self.best}"] if self.best else []
        how = "asynchronous" if self.asynchronous else "synchronous"
        return f"{self.name}({self._url}, every {self.every} steps, {', '.join(kept)}, {how})"

    def state_dict(self) -> dict[str, Any]:
        scores = {str(step): value for step, value in self._scores.items()}
        return {"metric": self.best[0] if self.best else None, "latest": self._latest, "scores": scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.best is None or state["metric"] != self.best[0]:
            return  # values of another metric say nothing about this one
        self._latest = state["latest"]
        self._scores = {int(step): float(value) for step, value in state["scores"].items()}

    def best_steps(self) -> list[int]:
        """The steps of the checkpoints that are kept for their metric, best first; equal values: the earlier one."""
        if self.best is None:
            return []
        _, mode, count = self.best
        sign = 1.0 if mode == "min" else -1.0
        return sorted(self._scores, key=lambda step: (sign * self._scores[step], step))[:count]

    def on_build_start(self, event: BuildStart) -> None:
        self._start_anew()  # it may have been in another trainer

    def on_fit_start(self, event: FitStart) -> None:
        self._first_step = event.trainer.step
        if event.resumed:
            self._asked = event.trainer.step

    def on_metrics(self, event: Metrics) -> None:
        if self.best is None:
            return
        self._seen.update(event.values)
        value = event.values.get(self.best[0], math.nan)
        if math.isfinite(value):  # a NaN is never the best
            self._latest = value

    def _save(self, trainer: Trainer) -> None:
        self._asked = trainer.step
        trainer.request("save", path=self.folder.path_for(trainer.step), asynchronous=self.asynchronous)

    def _is_mine(self, event: CheckpointStart | CheckpointSaved) -> bool:
        return event.path == self.folder.path_for(event.step)  # else of another Checkpoint, or the user's own save

    def on_step_end(self, event: StepEnd) -> None:
        step = event.trainer.step
        if step % self.every == 0 or step == event.trainer.total_steps:
            self._save(event.trainer)

    def on_checkpoint_start(self, event: CheckpointStart) -> None:
        if self._latest is not None and self._is_mine(event):
            self._scores[event.step] = self._latest

    def on_checkpoint_loaded(self, event: CheckpointLoaded) -> None:
        # A process that was killed right after a save had no time to remove the older ones.
        newest = self.folder.shared_by(event.trainer.context).find_newest().saved
        if newest is not None and newest.step == event.step and event.path == self.folder.path_for(event.step):
            self._retain(event.trainer)

    def on_checkpoint_saved(self, event: CheckpointSaved) -> None:
        if self._is_mine(event):
            self._retain(event.trainer)

    def _retain(self, trainer: Trainer) -> None:
        if self.keep_last is None:
            return
        best = [self.folder.path_for(step).rsplit("/", 1)[-1] for step in self.best_steps()]
        self.folder.shared_by(trainer.context).retain(keep_last=self.keep_last, keep_every=self.keep_every, best=best)

    def on_fit_end(self, event: FitEnd) -> None:
        made = event.trainer.step > self._first_step
        if made and self._asked != event.trainer.step:
            self._save(event.trainer)
        if made and self.best is not None and self._latest is None:
            warn_missing_metric(self, event.trainer, self.best[0], self._seen)
