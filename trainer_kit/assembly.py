"""The build: from the parts a user gave to the objects of a run, in one order for every mesh.

data → model (meta, distribute, allocate, initialise, load) → parameter table → optimizer → LR schedule → loop. Nothing here runs a step.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_kit import events
from trainer_kit.agreement import check_same_settings
from trainer_kit.built_model import BuiltModel, build_model
from trainer_kit.callback import Callback, Dispatcher
from trainer_kit.checkpoint import parameter_digest
from trainer_kit.checkpoint.identity import tensors_checksum
from trainer_kit.config import TrainerConfig
from trainer_kit.data import DataProvider, DataStream
from trainer_kit.description import shown_once
from trainer_kit.environment import check_host_sync_support
from trainer_kit.exceptions import ModelError, StateError
from trainer_kit.gradients import Gradients, NonFiniteGuard
from trainer_kit.loop import TrainingLoop
from trainer_kit.mesh import DistributedContext, MeshStrategy
from trainer_kit.metrics.of_task import metrics_of
from trainer_kit.model import ModelProvider
from trainer_kit.optim import AdamW, OptimizerProvider, StochasticAdamW, as_lr_scheduler_provider
from trainer_kit.optim.update import Update, build_update
from trainer_kit.parameters import ParameterTable
from trainer_kit.random_state import RandomStreams
from trainer_kit.records import Records
from trainer_kit.reduction import Reduction, prepare_metrics
from trainer_kit.run_length import plan_length
from trainer_kit.run_state import Requests, RunState
from trainer_kit.task import Task
from trainer_kit.training_state import TrainingState

logger = logging.getLogger("trainer_kit")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, None: None}


@dataclass
class Recipe:
    """What the user gave, checked, before anything is built."""

    model_provider: ModelProvider
    task: Task
    data: DataProvider
    optimizer: OptimizerProvider | None
    lr_scheduler: Any
    callbacks: Sequence[Callback]
    config: TrainerConfig

    def hparams(self) -> dict[str, Any]:
        """The `hparams()` of the parts, by part."""
        parts: dict[str, Any] = {"model": self.model_provider, "task": self.task, "data": self.data, "optimizer": self.optimizer_provider()}
        schedule = as_lr_scheduler_provider(self.lr_scheduler)
        if schedule is not None:
            parts["lr_scheduler"] = schedule
        found = {name: part.hparams() for name, part in parts.items()}
        return found | {"callbacks": [callback.describe() for callback in self.callbacks]}

    def optimizer_provider(self) -> OptimizerProvider:
        """The optimizer given, or the default of the precision."""
        if self.optimizer is not None:
            return self.optimizer
        return StochasticAdamW() if self.config.precision == "bf16" else AdamW()


@dataclass
class TrainingParts:
    """What only training needs."""

    loop: TrainingLoop
    random: RandomStreams
    state: TrainingState


@dataclass
class Parts:
    """Everything that is built so far. A model without trainable parameters has no optimizer and no training parts."""

    model: BuiltModel | None = None
    optimizer: torch.optim.Optimizer | None = None
    training: TrainingParts | None = None

    def built_model(self) -> BuiltModel:
        """The model. Raises StateError before it is there."""
        if self.model is None:
            raise StateError("the model is not built yet; call trainer.build() first")
        return self.model

    def for_training(self) -> TrainingParts:
        """The parts that only training needs. Raises ModelError if there is nothing to train, StateError before they are there."""
        if not self.built_model().table.has_trainable:
            raise ModelError(
                "the model has no trainable parameter, so nothing can be trained or resumed; unfreeze one with requires_grad_(True)"
            )
        if self.training is None:
            raise StateError("the build is not that far yet; use this from on_lr_scheduler_ready on")
        return self.training


@dataclass
class Durations:
    """Seconds that each part of the build took."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the block under a name."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def assemble(
    parts: Parts,
    recipe: Recipe,
    strategy: MeshStrategy,
    context: DistributedContext,
    *,
    run: RunState,
    records: Records,
    dispatcher: Dispatcher,
    requests: Requests,
) -> None:
    """Build everything into `parts`, in order, and tell of each part as soon as it is there."""
    config, emit, durations = recipe.config, dispatcher.emit, Durations()
    check_host_sync_support(config.detect_host_syncs, context.device)
    settings = plain_settings(recipe, strategy, context, config.total_steps)
    del settings["strategy"]["device"]  # it may name the device of this rank
    settings["callbacks"] = [callback.describe() for callback in recipe.callbacks if not callback.is_logger]  # those work on rank 0 alone
    check_same_settings(context, settings)
    if context.world_size > 1:
        records.combine = Reduction(context, {}).combine
    emit(events.BuildStart)
    with durations.measure("data"):
        recipe.task.setup(context)
        recipe.data.setup(context, config.seed)
        stream = open_stream(recipe.data, context, config, training=True)
    emit(events.DataReady)
    with durations.measure("model"):
        parts.model = model = build_model(recipe.model_provider, config, context)
    emit(events.ModelReady)
    model.table.join(context)  # whoever heard of the model may have frozen something
    if model.table.has_trainable:
        with durations.measure("optimizer"):
            with shown_once(context):
                update = build_update(recipe.optimizer_provider(), model.table.trainable(), context, model.table.entries)
            parts.optimizer = update.optimizer
        emit(events.OptimizerReady)
        run.total_steps, stream.max_epochs, schedule_steps = plan_length(config, stream.num_packs(), None)
        with shown_once(context):
            scheduler = build_schedule(recipe, parts.optimizer, schedule_steps)
        loop = build_loop(recipe, model, context, update, scheduler, stream, run, records, dispatcher, requests)
        random = RandomStreams(config.seed, context.device, context.random_rank, context.num_random_ranks)
        identity = run_identity(recipe, model.table, strategy, context)
        state = TrainingState(
            loop, model.table, model.ties, random, dispatcher.callbacks, recipe.task, identity, context, config.checkpoint_trainable_only
        )
        parts.training = TrainingParts(loop, random, state)
        emit(events.LRSchedulerReady)
    emit(events.BuildEnd, durations=durations.seconds)


def run_identity(recipe: Recipe, table: ParameterTable, strategy: MeshStrategy, context: DistributedContext) -> dict[str, Any]:
    """Which run it is: another name, seed or model is another run; other settings are told at a resume."""
    config = recipe.config
    identity: dict[str, Any] = {"run_name": config.run_name, "seed": config.seed, "parameters": parameter_digest(table.shapes())}
    frozen = [(row.name, row.parameter) for row in table if not row.trainable]
    if config.checkpoint_trainable_only and all(entry.is_trainable for entry in table.entries if entry.is_parameter) and context.is_main:
        logger.warning("checkpoint_trainable_only=True has no effect: nothing is frozen, so checkpoints hold all weights")
    if config.checkpoint_trainable_only:  # they come from the source model at a resume, which may have changed
        identity["frozen_weights"] = tensors_checksum(frozen, context)
    settings = plain_settings(recipe, strategy, context, None)
    del settings["trainer"]["total_steps"]  # an extended run is the same run, and the LR schedule tells of its new length
    del settings["callbacks"]  # they name folders, which may have moved
    return identity | {"settings": settings}


def plain_settings(recipe: Recipe, strategy: MeshStrategy, context: DistributedContext, total_steps: int | None) -> dict[str, Any]:
    """The settings, the mesh and the `hparams()` of the parts as plain values, for loggers and checkpoints."""
    settings = {
        "trainer": recipe.config.model_dump() | {"total_steps": total_steps},
        "strategy": strategy.model_dump(mode="json"),
        "device": context.device.type,
        **recipe.hparams(),
    }
    return json.loads(json.dumps(settings, default=_named))


def _named(value: Any) -> str | list[str]:
    """A name for what JSON cannot hold; without what differs in every process: an address, the order of a set."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", str(value))


def open_stream(provider: DataProvider, context: DistributedContext, config: TrainerConfig, *, training: bool) -> DataStream:
    """A stream over a provider that was set up; evaluation streams pass over the data once."""
    default = 0 if context.device.type == "cpu" else 2
    return DataStream(
        provider,
        context.device,
        seed=config.seed,
        prefetch_packs=default if config.prefetch_packs is None else config.prefetch_packs,
        overfit_packs=config.overfit_packs if training else 0,
        max_epochs=None if training else 1,
        context=context,
        fill_up=not training,
    )


def build_loop(
    recipe: Recipe,
    model: BuiltModel,
    context: DistributedContext,
    update: Update,
    lr_scheduler: Any,
    stream: DataStream,
    run: RunState,
    records: Records,
    dispatcher: Dispatcher,
    requests: Requests,
) -> TrainingLoop:
    """The loop with the parts of a step."""
    config, device, optimizer = recipe.config, context.device, update.optimizer
    takes_fp32 = bool(getattr(optimizer, "accepts_fp32_gradients", False))
    gradients = Gradients(
        model.table.trainable(),
        context=context,
        grad_dtype=DTYPES[config.grad_dtype] or (torch.float32 if takes_fp32 else None),
        cast_for_update=not takes_fp32,
        sync=model.fsdp_sync,
    )
    metrics = metrics_of(recipe.task, device)
    if context.world_size > 1:
        model.connect(gradients)
        prepare_metrics(metrics, context)
        records.combine = Reduction(context, metrics).combine
    deferred = device.type != "cpu"
    guard = NonFiniteGuard(
        gradients, optimizer, config.nonfinite, device=device, deferred=deferred, delay=config.log_delay, tells=context.is_main
    )
    return TrainingLoop(
        run,
        stream,
        model.runner,
        recipe.task,
        model.table,
        gradients,
        guard,
        update,
        lr_scheduler,
        records,
        metrics,
        dispatcher,
        requests,
    )


def build_schedule(recipe: Recipe, optimizer: torch.optim.Optimizer, schedule_steps: int | None) -> Any:
    """The LR schedule for this length of run, from the configured learning rates; None without one."""
    provider = as_lr_scheduler_provider(recipe.lr_scheduler)
    return None if provider is None else provider.build(optimizer, schedule_steps)
