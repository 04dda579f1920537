"""The build: from the parts a user gave to the objects of a run, in one order for every mesh.

data → model (meta, distribute, allocate, initialise, load) → parameter table → optimizer → LR schedule → loop. Nothing here runs a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer_kit import events
from trainer_kit.callback import Callback, Dispatcher
from trainer_kit.config import TrainerConfig
from trainer_kit.data import DataProvider, DataStream
from trainer_kit.environment import make_autocast
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.gradients import Gradients, NonFiniteGuard
from trainer_kit.loop import TrainingLoop
from trainer_kit.mesh.context import DistributedContext
from trainer_kit.model import ModelCaller, ModelProvider, StageContext, StageInfo, build_stage
from trainer_kit.model.transforms import checkpoint_activations, compile_blocks
from trainer_kit.optim import AdamW, OptimizerProvider, StochasticAdamW, as_lr_scheduler_provider, build_optimizer
from trainer_kit.parameters import ParameterTable
from trainer_kit.pipeline import SequentialRunner
from trainer_kit.records import Records
from trainer_kit.run_state import Requests, RunState
from trainer_kit.task import Task
from trainer_kit.weights import load_model_state

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

    def optimizer_provider(self) -> OptimizerProvider:
        """The optimizer given, or the default of the precision."""
        if self.optimizer is not None:
            return self.optimizer
        return StochasticAdamW() if self.config.precision == "bf16" else AdamW()


@dataclass
class BuiltModel:
    """The stages of this rank, ready to be called."""

    stages: list[nn.Module]
    contexts: list[StageContext]
    table: ParameterTable
    call: Callable[[Any, Any], Any]
    autocast: Callable[[], Any]


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
    )


def build_model(recipe: Recipe, context: DistributedContext) -> BuiltModel:
    """Build, initialise and load the stages."""
    config, provider = recipe.config, recipe.model_provider
    dtype = torch.bfloat16 if config.precision == "bf16" else None
    stage = StageContext(context, StageInfo())
    stage.module = build_stage(provider, context, stage.stage, seed=config.seed, dtype=dtype)
    table = ParameterTable([stage.module])
    if config.source_model is not None:
        load_model_state(config.source_model, provider.load_mapper(stage), table.tensors(), aliases=table.aliases)
    checkpoint_activations(stage.module, config.activation_checkpointing)
    compile_blocks(stage.module, config.compile)
    autocast = make_autocast(config.precision, context.device)
    return BuiltModel([stage.module], [stage], table, ModelCaller(stage.module), autocast)


def build_loop(
    recipe: Recipe,
    model: BuiltModel,
    context: DistributedContext,
    *,
    stream: DataStream,
    run: RunState,
    records: Records,
    dispatcher: Dispatcher,
    requests: Requests,
    schedule_steps: int | None,
) -> TrainingLoop:
    """Build what only training needs: optimizer, LR schedule, gradients, and the loop that holds them."""
    config, rows = recipe.config, model.table.trainable()
    optimizer = build_optimizer(recipe.optimizer_provider(), [(row.name, row.parameter) for row in rows])
    dispatcher.emit(events.OptimizerReady)
    takes_fp32 = bool(getattr(optimizer, "accepts_fp32_gradients", False))
    grad_dtype = DTYPES[config.grad_dtype] or (torch.float32 if takes_fp32 else None)
    gradients = Gradients(rows, grad_dtype=grad_dtype, cast_for_update=not takes_fp32)
    metrics = checked_metrics(recipe.task)
    return TrainingLoop(
        run=run,
        stream=stream,
        runner=SequentialRunner(model.call, recipe.task, context, autocast=model.autocast, metrics=metrics),
        gradients=gradients,
        guard=NonFiniteGuard(
            gradients, optimizer, config.nonfinite, device=context.device, deferred=context.device.type != "cpu", delay=config.log_delay
        ),
        optimizer=optimizer,
        lr_scheduler=build_schedule(recipe, optimizer, schedule_steps),
        records=records,
        metrics=metrics,
        dispatcher=dispatcher,
        requests=requests,
    )


def build_schedule(recipe: Recipe, optimizer: torch.optim.Optimizer, schedule_steps: int | None) -> Any:
    """The LR schedule for this length of run, from the configured learning rates; None without one."""
    provider = as_lr_scheduler_provider(recipe.lr_scheduler)
    return None if provider is None else provider.build(optimizer, schedule_steps)


def checked_metrics(task: Task) -> dict[str, Any]:
    """The task's metrics, each with update, compute and reset; their names may not be those of the losses."""
    from trainer_kit.metrics import check_metric

    metrics = task.metrics()
    for name, metric in metrics.items():
        if name == "loss":
            raise ConfigurationError(f"{type(task).__name__}.metrics() has the name 'loss', which the loss itself has; rename it")
        check_metric(name, metric)
        if hasattr(metric, "persistent"):  # torchmetrics keeps its state out of state_dict unless asked
            metric.persistent(True)
    return metrics


class RunLength(NamedTuple):
    """Where a run ends; None is no limit. `schedule_steps` is the length that the LR schedule is made for."""

    steps: int | None
    epochs: int | None
    schedule_steps: int | None


def plan_length(config: TrainerConfig, num_packs: int | None, extended: int | None) -> RunLength:
    """The first limit reached ends the run: steps, or passes over the data.

    num_packs: per pass, if that is known. extended: the argument of `fit`, which takes the place of the configured limits.
    """
    if extended is not None:
        return RunLength(extended, None, extended)
    if config.overfit_packs:
        num_packs = config.overfit_packs if num_packs is None else min(config.overfit_packs, num_packs)
    limited = config.total_steps is not None or config.max_time is not None
    epochs = config.epochs if config.epochs is not None or limited else 1
    if num_packs is None and not limited and config.epochs is None and config.dev_steps is None:
        raise ConfigurationError("the data does not say how many packs it has; give total_steps=, epochs= or max_time=")
    limits = [] if config.total_steps is None else [config.total_steps]
    if epochs is not None and num_packs is not None:
        limits.append(epochs * num_packs)
    whole = min(limits) if limits else None
    if config.dev_steps is None:
        return RunLength(whole, epochs, whole)
    # A trial of a few steps goes through the beginning of the schedule of the whole run.
    return RunLength(min([config.dev_steps, *limits]), epochs, whole)
