"""One call of `fit`: how long it goes, from where, and what happens before and after the steps. The steps are in `loop.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer_kit import assembly, events
from trainer_kit.description import say, shown_once
from trainer_kit.environment import run_environment
from trainer_kit.exceptions import CheckpointError, ConfigurationError
from trainer_kit.lifecycle import FitLifecycle, telling
from trainer_kit.mesh import DistributedContext, MeshStrategy
from trainer_kit.model.modes import set_train_modes
from trainer_kit.run_length import RunLength, plan_length
from trainer_kit.run_state import Requests
from trainer_kit.saving import Saving


@dataclass
class Fitting:
    """Brings a run from where it stands to its end. `closers` are called at the end, however it comes."""

    recipe: assembly.Recipe
    strategy: MeshStrategy
    context: DistributedContext
    model: assembly.BuiltModel
    training: assembly.TrainingParts
    saving: Saving
    requests: Requests
    closers: Sequence[Callable[[], None]]

    def fit(self, total_steps: int | None, resume: str | os.PathLike[str]) -> None:
        """See `Trainer.fit`."""
        run = self.training.loop.run
        with telling(self.training.loop.dispatcher, run, self.context.failures.report):
            self._set_length(total_steps)
            resumed = self._resume(resume)
            if resumed and total_steps is None:
                self._count_what_is_left()
            if run.total_steps is not None and run.step >= run.total_steps:
                done = f"{run.step} of {run.total_steps} steps are finished"
                say(f"nothing to do: {done}; fit(total_steps=...) extends the run", self.context)
                return
            self.training.loop.gradients.check_trainable(self.model.table)
            self.saving.check_state()
            self.saving.prepare()
        self._run_steps(resumed)

    def _set_length(self, total_steps: int | None) -> None:
        run = self.training.loop.run
        if total_steps is None and run.step:
            return  # the run keeps the length it has, be it extended
        if total_steps is not None and (type(total_steps) is not int or total_steps < 0):
            raise ConfigurationError(f"fit(total_steps={total_steps!r}): expected a number of steps that is not negative")
        self._take_length(plan_length(self.recipe.config, self.training.loop.stream.num_packs(), total_steps))

    def _count_what_is_left(self) -> None:
        """Where passes over the data end the run, another batch size since the save means another number of steps."""
        config, loop = self.recipe.config, self.training.loop
        left = loop.stream.packs_left() if config.total_steps is None and not config.overfit_packs and config.dev_steps is None else None
        if left is not None and loop.run.step + left != loop.run.total_steps:
            total = loop.run.step + left
            self._take_length(RunLength(total, loop.stream.max_epochs, total))

    def _take_length(self, length: RunLength) -> None:
        loop, run = self.training.loop, self.training.loop.run
        if length.steps != run.total_steps and loop.lr_scheduler is not None:
            so_far = loop.lr_scheduler.state_dict()
            scheduler = assembly.build_schedule(self.recipe, loop.optimizer, length.schedule_steps)
            with shown_once(self.context):
                scheduler.load_state_dict(so_far)
            loop.lr_scheduler = scheduler
        run.total_steps, loop.stream.max_epochs = length.steps, length.epochs

    def _resume(self, resume: str | os.PathLike[str]) -> bool:
        if not isinstance(resume, (str, os.PathLike)):
            raise ConfigurationError(f"fit(resume={resume!r}): expected 'auto', 'never' or the folder of a checkpoint")
        if resume == "never" or (resume == "auto" and self.training.loop.run.step):
            return False
        path = self.saving.newest() if resume == "auto" else os.fspath(resume)
        if path is None:
            return False
        try:
            self.saving.load(path, None)
        except CheckpointError as error:
            if resume != "auto":
                error.add_note(f"fit(resume={path!r}): expected 'auto', 'never' or the folder of a checkpoint")
            raise
        return True

    def _run_steps(self, resumed: bool) -> None:
        loop, config = self.training.loop, self.recipe.config
        run = loop.run
        run.deadline = None if config.max_time is None else time.monotonic() + config.max_time
        closers = [loop.stream.close, loop.gradients.zero, *self.closers]
        last_values = loop.records.flush if self.context.world_size == 1 else loop.records.drop
        saver, random = self.saving.saver, self.training.random
        life = FitLifecycle(self.context, run, loop.dispatcher, self.requests, random, saver, last_values, loop.undo_step, closers)
        # A compiled model is compiled in its first step, at its own time on each rank.
        timeout = self.context.long_timeout() if config.compile else self.context.short_timeout()
        with run_environment(config, self.context.device), life.around(), timeout:
            set_train_modes(self.model.stages)
            settings = assembly.plain_settings(self.recipe, self.strategy, self.context, run.total_steps)
            loop.dispatcher.emit(events.FitStart, resumed=resumed, settings=settings)
            self.requests.carry_out()
            loop.fit()
            self._finish()

    def _finish(self) -> None:
        """What the end of the steps brings: the last values, the end events, the last save, durable."""
        loop = self.training.loop
        run, records = loop.run, loop.records
        loop.guard.resolve()
        records.close_step(run.step)
        records.flush()
        loop.dispatcher.emit(events.FitEnd, reason=run.stop_reason, interrupted=run.raising_agreed)
        self.requests.carry_out()
        records.close_step(run.step)  # what the handlers of the end logged
        records.flush()
        self.saving.saver.wait()
