"""`Trainer`, the object that users hold. It wires the parts together and keeps the life of a run in order; the work is elsewhere.

The steps are in `loop.py`, the build in `assembly.py`, what is saved in `checkpoint/state.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import Unpack

from trainer_kit import assembly, events, loop
from trainer_kit.callback import Callback, Dispatcher, check_callbacks
from trainer_kit.callbacks import Checkpoint, Progress, Signals, Summary
from trainer_kit.checkpoint import CheckpointSaver, parameter_digest
from trainer_kit.checkpoint.identity import tensors_checksum
from trainer_kit.checkpoint.state import TrainingState
from trainer_kit.config import TrainerConfig, TrainerSettings, make_config
from trainer_kit.data import DataProvider, DataStream, as_provider, map_tensors
from trainer_kit.description import Description, describe, plain_settings, say, short_repr
from trainer_kit.environment import check_host_sync_support, run_environment
from trainer_kit.events import Event
from trainer_kit.exceptions import ConfigurationError, ModelError, StateError
from trainer_kit.lifecycle import FitLifecycle
from trainer_kit.mesh import DistributedContext, MeshStrategy
from trainer_kit.model import ModelProvider, as_model_provider
from trainer_kit.model.modes import eval_modes, set_train_modes
from trainer_kit.optim import as_lr_scheduler_provider, as_optimizer_provider
from trainer_kit.parameters import ParameterTable
from trainer_kit.random_state import RandomStreams, forked
from trainer_kit.records import History, Records, Value
from trainer_kit.run_state import Requests, RunState, weakly
from trainer_kit.task import Task
from trainer_kit.weights import StateMapper, write_model_state
from trainer_kit.weights.export import mapped_items


class Trainer:
    """Trains, evaluates, predicts, saves and exports one model.

    model_provider: an nn.Module (its weights are kept), a callable that builds one (with or without a `StageInfo`), or a ModelProvider.
    data: an AutoDataProvider, another DataProvider, or any iterable or DataLoader of microbatches.
    optimizer: a provider such as `optim.AdamW(lr=3e-4)`, or a callable that takes the parameters; without it `fit` uses AdamW.
    lr_scheduler: `optim.Piecewise()`, or a callable `(optimizer)` or `(optimizer, total_steps)`.
    config, settings: see `TrainerConfig`.

    The constructor checks everything that can be checked without building; it starts no process group and makes no model.
    """

    def __init__(
        self,
        model_provider: nn.Module | Callable[..., nn.Module] | ModelProvider,
        task: Task,
        data: DataProvider | Iterable[Any],
        strategy: MeshStrategy | None = None,
        *,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        callbacks: Sequence[Callback] = (),
        config: TrainerConfig | Mapping[str, Any] | None = None,
        **settings: Unpack[TrainerSettings],
    ) -> None:
        self.config = make_config(config, settings)
        if not isinstance(task, Task):
            hint = "; pass an instance, not the class" if isinstance(task, type) else ""
            raise ConfigurationError(f"task= is {task!r}, expected an instance of trainer_kit.Task{hint}")
        self.strategy = strategy if strategy is not None else MeshStrategy()
        if not isinstance(self.strategy, MeshStrategy):
            raise ConfigurationError(f"strategy= is {strategy!r}, expected a MeshStrategy")
        as_lr_scheduler_provider(lr_scheduler)
        provider = as_model_provider(model_provider)
        source = as_provider(data, self.config.accumulate)
        listed = [part for part in (provider, task, source) if isinstance(part, Callback)] + list(callbacks)
        check_callbacks(listed)
        listed = _with_defaults(listed, self.config)
        check_callbacks(listed)
        self._dispatcher = Dispatcher(listed, self)
        self._recipe = assembly.Recipe(
            provider,
            task,
            source,
            None if optimizer is None else as_optimizer_provider(optimizer),
            lr_scheduler,
            self.callbacks,
            self.config,
        )
        self._run = RunState(total_steps=self.config.total_steps)
        self.history = History()
        # The parts know the trainer weakly, so that a model is free as soon as its trainer is.
        self._records = Records(weakly(self._deliver), log_every=self.config.log_every, log_delay=self.config.log_delay)
        self._saver = CheckpointSaver()
        self._requests = Requests(weakly(self.evaluate), weakly(self._save), self._saver.poll)
        self._context: DistributedContext | None = None
        self._model: assembly.BuiltModel | None = None
        self._loop: loop.TrainingLoop | None = None
        self._state: TrainingState | None = None
        self._random: RandomStreams | None = None
        self._closed = False

    # ---- what callbacks and users read

    @property
    def step(self) -> int:
        """Number of finished optimizer steps."""
        return self._run.step

    @property
    def total_steps(self) -> int | None:
        """Number of steps at which the run ends; None: not known, or no limit."""
        return self._run.total_steps

    @property
    def epoch(self) -> int:
        """The pass over the data, from 0."""
        return self._run.epoch

    @property
    def callbacks(self) -> list[Callback]:
        """All callbacks in their order, the built-in ones and the task or provider that is one included; loggers last."""
        return self._dispatcher.callbacks

    @property
    def task(self) -> Task:
        """The task."""
        return self._recipe.task

    @property
    def data(self) -> DataProvider:
        """The provider of the training data."""
        return self._recipe.data

    @property
    def context(self) -> DistributedContext:
        """Where this process is: device, rank."""
        if self._context is None:
            self._context = self.strategy.build()
        return self._context

    @property
    def stages(self) -> list[nn.Module]:
        """The parts of the model that this rank holds."""
        return self._built().stages

    @property
    def model(self) -> nn.Module:
        """The model, when it is one stage."""
        return self._built().stages[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; behaves as torch's."""
        return self._training().optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The LR schedule, or None."""
        return self._training().lr_scheduler

    @property
    def parameters(self) -> ParameterTable:
        """One row per parameter: names, aliases, the tensor."""
        return self._built().table

    @property
    def optimizer_name(self) -> str:
        """The optimizer and where it comes from, for people."""
        text = short_repr(self._recipe.optimizer_provider())
        return text if self._recipe.optimizer is not None else f"{text} (default)"

    @property
    def schedule_name(self) -> str:
        """The LR schedule as it was given, for people."""
        return "none" if self._recipe.lr_scheduler is None else short_repr(self._recipe.lr_scheduler)

    def listeners(self) -> dict[str, list[str]]:
        """Callback method -> class names of the callbacks that override it, in the order in which they are called."""
        return self._dispatcher.listeners()

    def hparams(self) -> dict[str, Any]:
        """The `hparams()` of the parts, by part."""
        recipe = self._recipe
        parts: dict[str, Any] = {"model": recipe.model_provider, "task": recipe.task, "data": recipe.data}
        parts["optimizer"] = recipe.optimizer_provider()
        return {name: part.hparams() for name, part in parts.items()}

    def _built(self) -> assembly.BuiltModel:
        if self._model is None:
            raise StateError("the model is not built yet; call trainer.build() first")
        return self._model

    def _training(self) -> loop.TrainingLoop:
        if self._loop is None:
            raise StateError("the optimizer is not built; call trainer.build() first. A model without trainable parameters has none")
        return self._loop

    def _random_streams(self) -> RandomStreams:
        if self._random is None:
            self._random = RandomStreams(self.config.seed, self.context.device)
        return self._random

    # ---- build

    def build(self) -> None:
        """Build data, model, optimizer and schedule, once. Done by itself at the first use."""
        if self._closed:
            raise StateError("this Trainer was closed; make a new one")
        if self._model is not None:
            return
        recipe, context, emit, durations = self._recipe, self.context, self._dispatcher.emit, assembly.Durations()
        check_host_sync_support(self.config.detect_host_syncs, context.device)
        emit(events.BuildStart)
        with durations.measure("data"):
            recipe.task.setup(context)
            recipe.data.setup(context, self.config.seed)
            stream = assembly.open_stream(recipe.data, context, self.config, training=True)
        emit(events.DataReady)
        with durations.measure("model"):
            self._model = assembly.build_model(recipe, context)
        emit(events.ModelReady)
        random = self._random_streams()
        if self._model.table.trainable():
            with durations.measure("optimizer"):
                self._run.total_steps, stream.max_epochs, schedule_steps = assembly.plan_length(self.config, recipe.data.num_packs(), None)
                self._loop = assembly.build_loop(
                    recipe,
                    self._model,
                    context,
                    stream=stream,
                    run=self._run,
                    records=self._records,
                    dispatcher=self._dispatcher,
                    requests=self._requests,
                    schedule_steps=schedule_steps,
                )
                self._state = TrainingState(
                    self._loop,
                    self._model.table,
                    random,
                    self.callbacks,
                    recipe.task,
                    self._identity(),
                    self.config.checkpoint_trainable_only,
                )
            emit(events.LRSchedulerReady)
        emit(events.BuildEnd, durations=durations.seconds)

    def _identity(self) -> dict[str, Any]:
        table = self._built().table
        identity = {"run_name": self.config.run_name, "seed": self.config.seed, "parameters": parameter_digest(table.shapes())}
        if self.config.checkpoint_trainable_only:  # they come from the source model at a resume, which may have changed
            frozen = [(row.name, row.parameter) for row in table if not row.trainable]
            identity["frozen_weights"] = tensors_checksum(frozen)
        return identity | {"settings": plain_settings(self)}

    # ---- training

    def fit(self, total_steps: int | None = None, *, resume: Literal["auto", "never"] | str = "auto") -> None:
        """Train until `total_steps` finished steps in all (None: as configured), going on from where the run stands.

        resume: "auto" takes the newest valid checkpoint of the Checkpoint callbacks if the run has not begun; "never" does not;
        anything else is the folder of a checkpoint. A finished run says so and returns.
        Raises what ended the run: the first error, KeyboardInterrupt, or Interrupted after SIGTERM.
        """
        if self._run.phase != "idle":
            raise StateError("fit() inside fit(); use trainer.stop() and call fit again")
        self.build()
        if self._loop is None:
            raise ModelError("the model has no trainable parameter, so there is nothing to fit; unfreeze one with requires_grad_(True)")
        self._set_length(total_steps)
        resumed = self._resume(resume)
        if self._run.total_steps is not None and self._run.step >= self._run.total_steps:
            say(
                f"nothing to do: {self._run.step} of {self._run.total_steps} steps are finished; fit(total_steps=...) extends the run",
                self.context,
            )
            return
        self._fit(resumed)

    def _set_length(self, total_steps: int | None) -> None:
        training, before = self._training(), self._run.total_steps
        if total_steps is None and self._run.step and before is not None and self._run.step < before:
            return  # an extended run that was stopped goes on to the length it had
        if total_steps is not None and total_steps < 0:
            raise ConfigurationError(f"fit(total_steps={total_steps}): expected a number of steps that is not negative")
        length = assembly.plan_length(self.config, self.data.num_packs(), total_steps)
        self._run.total_steps, training.stream.max_epochs = length.steps, length.epochs
        if self._run.total_steps != before and training.lr_scheduler is not None:
            so_far = training.lr_scheduler.state_dict()
            training.lr_scheduler = assembly.build_schedule(self._recipe, training.optimizer, length.schedule_steps)
            training.lr_scheduler.load_state_dict(so_far)

    def _resume(self, resume: str) -> bool:
        if resume == "never":
            return False
        if resume != "auto":
            self.load_checkpoint(resume)
            return True
        if self._run.step:
            return False
        found = [(saved.step, c.folder.path_for(saved.step)) for c in self._checkpoints() if (saved := c.folder.newest()) is not None]
        if not found:
            return False
        self.load_checkpoint(max(found)[1])
        return True

    def _fit(self, resumed: bool) -> None:
        run, training = self._run, self._training()
        run.deadline = None if self.config.max_time is None else time.monotonic() + self.config.max_time
        closers = [training.stream.close, training.gradients.zero, *(callback.close for callback in self.callbacks)]
        life = FitLifecycle(run, self._dispatcher, self._requests, self._random_streams(), self._saver, closers)
        with run_environment(self.config, self.context.device), life.around():
            set_train_modes(self.stages)
            self._dispatcher.emit(events.FitStart, resumed=resumed, settings=plain_settings(self))
            self._requests.carry_out()
            training.fit()
            self._finish()

    def _finish(self) -> None:
        """What the end of the steps brings: the last values, the end events, the last save, durable."""
        self._training().guard.resolve()
        self._records.close_step(self._run.step)
        self._records.flush()
        self._dispatcher.emit(events.FitEnd, reason=self._run.stop_reason)
        self._requests.carry_out()
        self._records.flush()
        self._saver.wait()

    def stop(self, reason: str, raising: BaseException | None = None) -> None:
        """End the run at the next step boundary, with the normal end events; `fit` then raises `raising`, if given.

        The first reason counts, and the first `raising`.
        """
        if self._run.phase == "idle":
            raise StateError("stop() outside of fit() has no meaning")
        self._run.stop_reason = self._run.stop_reason or reason
        self._run.stop_raising = self._run.stop_raising or raising

    def log(self, name: str, value: Value) -> None:
        """Record a number or one-element tensor under a name; it joins the next record. Never waits for the device."""
        self._records.log(name, value)

    def emit(self, event: Event) -> None:
        """Send an event, of the user's own type too, to the callbacks that have its method."""
        self._dispatcher.send(event)

    def request(self, kind: Literal["evaluate", "save"], **arguments: Any) -> None:
        """Ask for `evaluate(**arguments)` or a save (`path=None, asynchronous=None`) after the running step, in this order."""
        self._requests.add(kind, arguments)
        if self._run.phase == "idle":
            self._requests.carry_out()

    def _deliver(self, step: int, values: dict[str, float]) -> None:
        self.history.add(step, values)
        if self._run.phase != "idle":
            self._dispatcher.emit(events.Metrics, step=step, values=values)

    # ---- evaluation and prediction

    def evaluate(self, data: Any, *, task: Task | None = None, name: str = "val") -> dict[str, float]:
        """The weighted mean losses and metrics over one pass of `data`, as `{"val/loss": ..., "val/<metric>": ...}`.

        Changes nothing of the run: random streams, train and eval modes, data position and gradients stay as they are.
        """
        task, emit = task or self.task, self._dispatcher.emit
        with self._other_loop("evaluation", "evaluate()", "trainer.request('evaluate', data=...) does it after the step"):
            self._records.flush()
            emit(events.EvaluateStart)
            with self._forward_only(data) as stream:
                limit = self.config.dev_steps or self.config.limit_evaluate_packs
                values = loop.evaluate(stream, self._built().call, task, self.context, prefix=name, limit=limit)
            emit(events.EvaluateEnd, values=values)
        if not values:
            raise ConfigurationError("evaluate(data): the data gave no sample that counts, so there is no loss; is it empty or exhausted?")
        self._deliver(self._run.step, dict(values))
        return values

    def predict(self, data: Any, *, task: Task | None = None, each: Callable[[Any], None] | None = None) -> list[Any]:
        """What `task.process_outputs` gives for each microbatch, in order, on the host. With `each` they go there instead, as they come."""
        task = task or self.task
        results: list[Any] = []
        with self._other_loop("prediction", "predict()", "call it after fit() or in on_fit_end"):
            self._dispatcher.emit(events.PredictStart)
            with self._forward_only(data) as stream:
                for outputs in loop.predict(stream, self._built().call, task, self.context, limit=self.config.dev_steps):
                    (results.append if each is None else each)(map_tensors(lambda t: t.detach().cpu(), outputs))
            self._dispatcher.emit(events.PredictEnd)
        return results

    @contextmanager
    def _other_loop(self, phase: Literal["evaluation", "prediction"], what: str, instead: str) -> Iterator[None]:
        self._run.refuse_inside_step(what, instead)
        self.build()
        before, self._run.phase = self._run.phase, phase
        try:
            yield
        except BaseException as error:
            if before == "idle":  # inside a fit, the fit tells it
                self._dispatcher.emit(events.RunException, exception=error)
            raise
        finally:
            self._run.phase = before

    @contextmanager
    def _forward_only(self, data: Any) -> Iterator[DataStream]:
        """A stream over other data, with the model in eval mode, and everything of the run as it was afterwards."""
        provider = as_provider(data)
        if provider is not self.data:
            provider.setup(self.context, self.config.seed)
        stream = assembly.open_stream(provider, self.context, self.config, training=False)
        model = self._built()
        try:
            with forked(self.context.device), eval_modes(model.stages), torch.no_grad(), model.autocast():
                yield stream
        finally:
            stream.close()

    # ---- saving

    def save_checkpoint(self, path: str | os.PathLike[str] | None = None) -> None:
        """Save a training checkpoint; durable when this returns. Inside a step: asked for, and done after it.

        path: the folder of the checkpoint; None: the next one of the Checkpoint callback.
        """
        where = None if path is None else os.fspath(path)
        if self._run.phase == "step":
            self._requests.add("save", {"path": where, "asynchronous": False})
        else:
            self._save(where, asynchronous=False)

    def _save(self, path: str | None = None, asynchronous: bool | None = None) -> None:
        self.build()
        training, step = self._training(), self._run.step
        if path is None:
            folders = [callback.folder for callback in self._checkpoints()]
            if not folders:
                raise ConfigurationError("there is no Checkpoint callback, so save_checkpoint(path=...) needs a path")
            path = folders[0].path_for(step)
        training.guard.resolve()
        self._records.flush()
        self._dispatcher.emit(events.CheckpointStart, path=path, step=step)
        assert self._state is not None
        tensors, values = self._state.collect()
        dispatcher, saved = self._dispatcher, {"path": path, "step": step}
        self._saver.save(
            path,
            tensors,
            values,
            step=step,
            identity=self._state.identity,
            asynchronous=bool(asynchronous),
            on_saved=lambda: dispatcher.emit(events.CheckpointSaved, **saved),
        )

    def load_checkpoint(self, path: str | os.PathLike[str], parts: Sequence[str] | None = None) -> None:
        """Bring the run to a saved state. Without `parts` everything must fit, and it must be a checkpoint of this run.

        parts: of `model, optimizer, schedule, data, random, callbacks, task`, these alone; the step counter stays.
        """
        self._run.refuse_inside_step("load_checkpoint()", "call it before fit(), or pass fit(resume=path)")
        self.build()
        self._training()
        assert self._state is not None
        self._saver.wait()
        step = self._state.restore(os.fspath(path), parts)
        self._dispatcher.emit(events.CheckpointLoaded, path=os.fspath(path), step=step)

    def _checkpoints(self) -> list[Checkpoint]:
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        mapper: StateMapper | None = None,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
    ) -> list[str]:
        """Write the weights as safetensors, `model.safetensors` or shards with an index, and return the file names.

        mapper: from the model's names to the layout of the files; None: the provider's. dtype: casts floating-point weights.
        max_shard_size: bytes, or a text such as "4GB". A tied weight is written once, under its first name.
        """
        self._run.refuse_inside_step("export()", "call it after fit() or in on_fit_end")
        self.build()
        if self._loop is not None:
            self._loop.guard.resolve()
        stage = self._built().contexts[0]
        mapper = mapper or self._recipe.model_provider.export_mapper(stage)
        items = mapped_items(self._built().table.tensors(), mapper)
        return write_model_state(path, items, max_shard_size=max_shard_size, dtype=dtype)

    # ---- the rest

    def describe(self) -> Description:
        """The parts, the batch arithmetic, parameter counts, the mesh, and who listens to what; shows as a table in a notebook."""
        return describe(self)

    def close(self) -> None:
        """Leave nothing running: workers, files, the task. The trainer cannot be used afterwards."""
        if self._closed:
            return
        self._closed = True
        self._saver.close()
        if self._loop is not None:
            self._loop.stream.close()
        self._recipe.data.close()
        self._recipe.task.finalize()


def _with_defaults(callbacks: list[Callback], config: TrainerConfig) -> list[Callback]:
    """The given callbacks, and the default ones of which none was given. A `fast_dev_run` leaves no files behind."""
    defaults = [kind() for kind in (Summary, Progress, Signals) if not any(isinstance(c, kind) for c in callbacks)]
    if config.fast_dev_run:
        callbacks = [c for c in callbacks if not c.is_logger and not isinstance(c, Checkpoint)]
    return defaults + callbacks
