"""`Trainer`, the object that users hold. It wires the parts together and keeps the life of a run in order; the work is elsewhere.

The steps are in `loop.py`, the build in `assembly.py`, what is saved in `training_state.py`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from typing_extensions import Unpack

from trainer_kit import assembly, events
from trainer_kit.boundary import boundary_of
from trainer_kit.callback import Callback, Dispatcher, callback_list, check_callbacks
from trainer_kit.callbacks import Checkpoint
from trainer_kit.checkpoint import CheckpointSaver
from trainer_kit.config import TrainerConfig, TrainerSettings, make_config
from trainer_kit.data import DataProvider, as_provider
from trainer_kit.default_callbacks import with_defaults
from trainer_kit.description import Description, describe
from trainer_kit.events import Event
from trainer_kit.exceptions import ConfigurationError, StateError
from trainer_kit.exporting import ModelWeights
from trainer_kit.fitting import Fitting
from trainer_kit.inference import Inference
from trainer_kit.lifecycle import close_all, telling, together
from trainer_kit.mesh import DistributedContext, MeshStrategy
from trainer_kit.model import ModelProvider, as_model_provider
from trainer_kit.optim import as_lr_scheduler_provider, as_optimizer_provider
from trainer_kit.parameters import ParameterTable
from trainer_kit.records import History, Records, Reduce, Value
from trainer_kit.run_state import Requests, RunState, weakly
from trainer_kit.saving import Saving
from trainer_kit.task import Task, checked_task
from trainer_kit.weights import StateMapper
from trainer_kit.weights.companions import StrPath
from trainer_kit.weights.stream import Receivers, StateStream

if TYPE_CHECKING:
    from trainer_kit.pipeline.runtime import PipelineRunner


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
        checked_task(task)
        self.strategy = strategy if strategy is not None else MeshStrategy()
        if not isinstance(self.strategy, MeshStrategy):
            raise ConfigurationError(f"strategy= is {strategy!r}, expected a MeshStrategy instance")
        as_lr_scheduler_provider(lr_scheduler)
        provider = as_model_provider(model_provider)
        source, self._given_data = as_provider(data, self.config.accumulate), data
        listed = [part for part in (provider, task, source) if isinstance(part, Callback)] + callback_list(callbacks)
        listed = with_defaults(listed, self.config)
        check_callbacks(listed)
        self._dispatcher = Dispatcher(listed, self)
        optimizer = None if optimizer is None else as_optimizer_provider(optimizer)
        self.recipe = assembly.Recipe(provider, task, source, optimizer, lr_scheduler, self.callbacks, self.config)
        self._run = RunState(total_steps=self.config.total_steps)
        self.history = History()
        # The parts know the trainer weakly, so that a model is free as soon as its trainer is.
        self._records = Records(weakly(self._deliver), log_every=self.config.log_every, log_delay=self.config.log_delay)
        self._parts: assembly.Parts | None = None
        self._closed = False

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
        return self.recipe.task

    @property
    def data(self) -> DataProvider:
        """The provider of the training data."""
        return self.recipe.data

    @functools.cached_property
    def context(self) -> DistributedContext:
        """Where this process is: device, rank, meshes. The first access starts the process groups, if there are several ranks."""
        return self.strategy.build(setup_timeout=self.config.setup_timeout, step_timeout=self.config.step_timeout)

    @functools.cached_property
    def _saver(self) -> CheckpointSaver:
        return CheckpointSaver(context=self.context)

    @functools.cached_property
    def _requests(self) -> Requests:
        boundary = boundary_of(self._run, self._saver, self.context, self._records)
        return Requests(self._run, weakly(self._evaluate), weakly(self._save), boundary)

    @property
    def stages(self) -> list[nn.Module]:
        """The parts of the model that this rank holds."""
        return self._model().stages

    @property
    def model(self) -> nn.Module:
        """The model, when it is one stage."""
        if (number := self.context.stage_layout.num_stages) > 1:
            raise StateError(f"the model is cut into {number} pipeline stages; those of this rank are trainer.stages")
        return self._model().stages[0]

    @property
    def pipeline(self) -> PipelineRunner | None:
        """The runner of the pipeline, with its programs and recorded timelines; None without pipeline ranks."""
        return self._model().pipeline

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; behaves as torch's."""
        if self._parts is None or self._parts.optimizer is None:
            raise StateError("there is no optimizer; call trainer.build() first. A model without trainable parameters has none")
        return self._parts.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The LR schedule, or None."""
        return self._training().loop.lr_scheduler

    @property
    def parameters(self) -> ParameterTable:
        """One row per parameter: names, aliases, the tensor."""
        return self._model().table

    def listeners(self) -> dict[str, list[str]]:
        """Callback method -> class names of the callbacks that override it, in the order in which they are called."""
        return self._dispatcher.listeners()

    def _model(self) -> assembly.BuiltModel:
        return (self._parts or assembly.Parts()).built_model()

    def _training(self) -> assembly.TrainingParts:
        return (self._parts or assembly.Parts()).for_training()

    # ---- build

    def build(self) -> None:
        """Build data, model, optimizer and schedule, once. Done by itself at the first use."""
        if self._closed:
            raise StateError("this Trainer was closed; make a new one")
        if self._parts is not None:
            return
        self._parts = assembly.Parts()
        try:
            with telling(self._dispatcher, self._run, self._report), self._together("build()"):
                assembly.assemble(
                    self._parts, self.recipe, self.strategy, self.context,
                    run=self._run, records=self._records, dispatcher=self._dispatcher, requests=self._requests,
                )  # fmt: skip
        except BaseException:
            self._parts = None  # half a build is none: the next use begins anew
            raise

    # ---- training

    def fit(self, total_steps: int | None = None, *, resume: str | os.PathLike[str] = "auto") -> None:
        """Train until `total_steps` finished steps in all (None: as configured), going on from where the run stands.

        resume: "auto" takes the newest valid checkpoint of the Checkpoint callbacks if the run has not begun; "never" does not;
        anything else is the folder of a checkpoint. A finished run says so and returns.
        Raises what ended the run: the first error, KeyboardInterrupt, or Interrupted after SIGTERM.
        """
        if self._run.phase != "idle":
            raise StateError("fit() inside fit(); use trainer.stop() and call fit again")
        self.build()
        with self._together("fit()", total_steps=total_steps, resume=resume):
            closers = [callback.close for callback in self.callbacks]
            Fitting(self.recipe, self.strategy, self.context, self._model(), self._training(), self._saving(), self._requests, closers).fit(
                total_steps, resume
            )

    def stop(self, reason: str, raising: BaseException | None = None) -> None:
        """End the run at the next step boundary, with the normal end events; `fit` then raises `raising`, if given.

        The first reason counts, and the first `raising`.
        """
        if self._run.phase == "idle":
            raise StateError("stop() outside of fit() has no meaning")
        self._run.stop_reason = self._run.stop_reason or reason
        self._run.stop_raising = self._run.stop_raising or raising

    def log(self, name: str, value: Value, *, reduce: Reduce = "mean") -> None:
        """Record a number or one-element tensor under a name; it joins the next record. Never waits for the device.

        reduce: how the values of the data ranks that logged it become one. What is logged outside of steps has a record of its own; on a
        mesh that is made at the next boundary between steps, or by the next `fit`, `evaluate` or `predict`.
        """
        self._records.log(name, value, reduce)
        if self._run.phase != "step":
            alone, idle = self.context.world_size == 1, self._run.phase == "idle"
            self._records.close_outside_of_steps(self._run.step, alone=alone, deliver=idle)

    def emit(self, event: Event) -> None:
        """Send an event, of the user's own type too, to the callbacks that have its method."""
        if not isinstance(event, Event):
            raise ConfigurationError(f"emit({event!r}): found a {type(event).__name__}, expected an Event: MyEvent(trainer=...)")
        self._dispatcher.send(event)

    def request(self, kind: Literal["evaluate", "save"], **arguments: Any) -> None:
        """Ask for `evaluate(**arguments)` or a save (`path=None, asynchronous=None`) after the running step, in this order."""
        if self._run.phase != "idle":
            self._requests.add(kind, arguments)
            return
        with self._together(f"request({kind!r})"):
            self._requests.add(kind, arguments)
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
        self._run.refuse_inside_step("evaluate()", "trainer.request('evaluate', data=...) does it after the step")
        with self._together("evaluate()", name=name):
            values = self._evaluate(data, task=task, name=name)
            self._requests.carry_out_if_idle()
        return values

    def _evaluate(self, data: Any, *, task: Task | None = None, name: str = "val") -> dict[str, float]:
        values = self._inference().evaluate(data, checked_task(self.task if task is None else task), name)
        self._deliver(self._run.step, dict(values))
        return values

    def predict(self, data: Any, *, task: Task | None = None, each: Callable[[Any], None] | None = None) -> list[Any]:
        """What `task.process_outputs` gives for each microbatch, in order, on the host. With `each` they go there instead, as they come.

        On a mesh all ranks call it; rank 0 gets the results of all, the others none.
        """
        results: list[Any] = []
        self._run.refuse_inside_step("predict()", "call it after fit() or in on_fit_end")
        with self._together("predict()"):
            self._inference().predict(data, checked_task(self.task if task is None else task), each or results.append)
            self._requests.carry_out_if_idle()
        return results

    def _together(self, what: str, **arguments: object) -> AbstractContextManager[None]:
        return together(what, self.context, self._run, arguments)

    def _report(self, error: BaseException) -> None:
        if "context" in vars(self):  # else it is what kept the ranks from meeting
            self.context.failures.report(error)

    def _inference(self) -> Inference:
        self.build()
        return Inference(self.config, self.context, self._model(), self._pause_data, self._run, self._records, self._dispatcher)

    def _pause_data(self, data: Any) -> DataProvider | None:
        if data is not self._given_data and data is not self.data:
            return None
        if self._parts is not None and self._parts.training is not None:
            self._parts.training.loop.stream.close()  # one object is read by one iterator at a time
        return self.data

    # ---- saving

    def save_checkpoint(self, path: str | os.PathLike[str] | None = None) -> None:
        """Save a training checkpoint; durable when this returns. Inside a step or an evaluation: asked for, and done after it.

        path: the folder of the checkpoint; None: the next one of the Checkpoint callback.
        """
        where = None if path is None else os.fspath(path)
        if self._run.phase in ("step", "evaluation", "prediction"):  # callbacks may have put other weights in place
            self._requests.add("save", {"path": where, "asynchronous": False})
        else:
            with self._together("save_checkpoint()", path=where):
                self._save(where, asynchronous=False)

    def _save(self, path: str | None = None, asynchronous: bool | None = None) -> None:
        self.build()
        self._saving().save(path, asynchronous=bool(asynchronous))

    def load_checkpoint(self, path: str | os.PathLike[str], parts: Sequence[str] | None = None, *, verify: bool = True) -> None:
        """Bring the run to a saved state. Without `parts` everything must fit, and it must be a checkpoint of this run.

        parts: of `model, optimizer, schedule, data, random, callbacks, task`, these alone; the step counter stays.
        verify: compare the checksums of the files.
        """
        self._run.refuse_inside_step("load_checkpoint()", "call it before fit(), or pass fit(resume=path)")
        with self._together("load_checkpoint()", path=path, parts=parts):
            self.build()
            self._saving().load(os.fspath(path), parts, verify=verify)

    def _saving(self) -> Saving:
        folders = [callback.folder for callback in self.callbacks if isinstance(callback, Checkpoint)]
        return Saving(self._saver, self._training().state, self._records, self._dispatcher, folders)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        mapper: StateMapper | None = None,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
        companions: StrPath | Sequence[StrPath] | None = None,
    ) -> list[str]:
        """Write the weights as safetensors, `model.safetensors` or shards with an index, and return the file names.

        mapper: from the model's names to the layout of the files; None: the provider's. dtype: casts floating-point weights.
        max_shard_size: bytes, or a text such as "4GB". A tied weight is written once, under its first name. companions: a folder whose
        configuration and tokenizer files are copied beside the weights, or a list of files; with `dtype`, `config.json` says so.
        On a mesh all ranks call it and share the work, in a folder that all see; the files are the same as those of one process.
        """
        asked: Any = {"path": path, "dtype": dtype, "max_shard_size": max_shard_size, "companions": companions}
        with self._weights("export()", **asked) as weights:
            return weights.export(mapper, **asked)

    @contextmanager
    def model_state(
        self,
        mapper: StateMapper | None = None,
        *,
        bucket_bytes: int | str = "512MB",
        dtype: torch.dtype | None = None,
        to: Receivers = "all",
    ) -> Iterator[StateStream]:
        """The tensors that `export` would write, for an engine in this process: `with trainer.model_state() as buckets`.

        `for bucket in buckets` gives lists of (name, tensor) pairs, of at most `bucket_bytes` or one larger tensor. The tensors are whole,
        on the device of the run, and yours: the model does not change them. to="main": those of rank 0; elsewhere buckets are empty.
        On a mesh all ranks call it and take the same buckets; leave early on all of them or on none. Train after the block, not in it.
        """
        asked: Any = {"bucket_bytes": bucket_bytes, "dtype": dtype, "to": to}
        with self._weights("model_state()", **asked) as weights, weights.stream(mapper, **asked) as stream:
            yield stream

    @contextmanager
    def _weights(self, what: str, **arguments: object) -> Iterator[ModelWeights]:
        self._run.refuse_inside_step(what, "call it after fit() or in on_fit_end")
        with self._together(what, **arguments):
            self.build()
            if self._model().table.has_trainable:
                self._training().loop.guard.resolve()
            yield ModelWeights(self._model(), self.recipe.model_provider, self.context)

    def describe(self) -> Description:
        """The parts, the batch arithmetic, parameter counts, the mesh, and who listens to what; shows as a table in a notebook."""
        return describe(self)

    def close(self) -> None:
        """Leave nothing running: workers, files, the task. The trainer cannot be used afterwards."""
        if self._run.phase != "idle":
            raise StateError("close() inside fit(); use trainer.stop(reason) to end it")
        if not self._closed:
            self._closed = True
            close_all(vars(self).get("context"), self.recipe, self._parts, vars(self).get("_saver"))
