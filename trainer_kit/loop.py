"""The loops: training, evaluation, prediction. Only the order of the calls; every part was built and wired elsewhere.

`TrainingLoop.fit` and `TrainingLoop.step` are the whole of training, in the order of time. There is no model code and no
parallelism here: the runner knows how a pack runs, the gradients know how they are reduced. `events.py` shows the same order with
the events at their places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_kit import events
from trainer_kit.callback import Dispatcher
from trainer_kit.data import DataStream, Pack
from trainer_kit.gradients import Gradients, NonFiniteGuard
from trainer_kit.mesh import DistributedContext
from trainer_kit.metrics import Metric
from trainer_kit.metrics.of_task import metrics_of
from trainer_kit.optim.update import Update
from trainer_kit.parameters import ParameterTable
from trainer_kit.pipeline import LossSums, PackRunner
from trainer_kit.records import Records
from trainer_kit.reduction import Reduction, prepare_metrics, sums_of, with_metrics
from trainer_kit.run_state import Requests, RunState
from trainer_kit.task import Task


@dataclass
class TrainingLoop:
    """The parts of a step, and the order in which they work."""

    run: RunState
    stream: DataStream
    runner: PackRunner
    task: Task
    table: ParameterTable
    gradients: Gradients
    guard: NonFiniteGuard
    update: Update
    lr_scheduler: Any
    records: Records
    metrics: dict[str, Metric]
    dispatcher: Dispatcher
    requests: Requests
    before: dict[str, Any] = field(default_factory=dict)  # the metrics as the running step found them

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that makes the update."""
        return self.update.optimizer

    def fit(self) -> None:
        """Steps until the planned end, a stop, or the end of the data."""
        run, emit = self.run, self.dispatcher.emit
        open_epoch: int | None = None
        while not run.finished:
            pack = self.stream.next()
            if pack is None:
                if open_epoch is not None:
                    self.end_epoch(open_epoch)
                run.stop_reason = None if self.stream.reached_max_epochs else "the data ended"
                break
            if pack.epoch != open_epoch:
                if open_epoch is not None:  # a stream of unknown length shows its end only by the next epoch's first pack
                    self.end_epoch(open_epoch)
                open_epoch = run.epoch = pack.epoch
                emit(events.EpochStart, epoch=open_epoch)
            run.phase = "step"
            self.step(pack)
            run.phase = "between steps"
            self.records.deliver_due(run.step)
            # A save must see what every callback did in this step, and an evaluation of this step comes before its save.
            self.requests.carry_out()
            if pack.is_last:
                self.end_epoch(open_epoch)
                open_epoch = None

    def end_epoch(self, epoch: int) -> None:
        """Tell that a pass over the data is complete, and do what was asked for then."""
        self.dispatcher.emit(events.EpochEnd, epoch=epoch)
        self.requests.carry_out()

    def step(self, pack: Pack) -> None:
        """One optimizer step on one pack."""
        run, emit, gradients = self.run, self.dispatcher.emit, self.gradients
        index = run.step
        if self.metrics:
            self.before = {name: metric.state_dict() for name, metric in self.metrics.items() if isinstance(metric, Metric)}
        record = self.records.due(index + 1) or index + 1 == run.total_steps
        emit(events.StepStart, step=index, microbatches=pack.microbatches)

        emit(events.ForwardBackwardStart, step=index)
        losses = LossSums() if record else None
        weight = self.runner.run_pack(pack, self.task, self.metrics, losses=losses, on_microbatch=self._microbatch_listener(index))
        emit(events.ForwardBackwardEnd, step=index)

        # The gradients are sums until here; nothing may read them before the one division.
        gradients.finish(weight, self.guard.flag())
        self.guard.watch(self.dispatcher.listens(events.GradientsReady))
        if record:
            gradients.check_trainable(self.table)
            self.records.log("optim/grad_norm", gradients.norm())  # before the clipping changes it
        emit(events.GradientsReady, step=index, grad_norm=gradients.norm, scale=gradients.scale)

        permitted = self.guard.permits(index, weight)
        if losses is not None:
            self._log_step(losses)  # before the LR schedule moves on: the lr of this step
        if permitted:
            emit(events.BeforeOptimizerStep, step=index)
            gradients.cast_for_update()
            self.update.step()
            emit(events.OptimizerStep, step=index)
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        gradients.zero()

        run.step = index + 1
        emit(events.StepEnd, step=index, skipped=not permitted)
        if record:
            self.records.close_step(run.step)

    def undo_step(self) -> None:
        """After a step that failed half-way: its pack comes again, and its metrics do not count twice."""
        self.stream.step_back()
        for name, metric in self.metrics.items():
            metric.reset()
            if name in self.before:
                metric.load_state_dict(self.before[name])

    def _microbatch_listener(self, step: int) -> Callable[[int, torch.Tensor | None], None] | None:
        if not self.dispatcher.listens(events.MicrobatchEnd):
            return None
        return lambda index, loss: self.dispatcher.emit(events.MicrobatchEnd, step=step, microbatch=index, loss=loss)

    def _log_step(self, losses: LossSums) -> None:
        summarise = with_metrics if self.records.combine is None else sums_of
        self.records.add(summarise(losses, self.metrics if self.runner.hosts_last_stage else {}, "train"))
        self.records.log("optim/lr", self.optimizer.param_groups[0]["lr"])
        for metric in self.metrics.values():
            metric.reset()


def evaluate(
    stream: DataStream, runner: PackRunner, task: Task, context: DistributedContext, *, prefix: str, limit: int | None
) -> dict[str, float]:
    """The weighted mean losses and the metrics over one pass, as host numbers `<prefix>/<name>`, the same on every rank."""
    losses, metrics = LossSums(), metrics_of(task, context.device)
    prepare_metrics(metrics, context)
    for pack in _one_pass(stream, limit):
        runner.evaluate_pack(pack, task, metrics, losses)
    if context.world_size == 1:
        return {str(name): float(value) for name, value in with_metrics(losses, metrics, prefix).items()}
    sums = {key: float(value) for key, value in sums_of(losses, metrics if runner.hosts_last_stage else {}, prefix).items()}
    return Reduction(context, metrics).combine(sums, {})


def predict(stream: DataStream, runner: PackRunner, task: Task, *, limit: int | None) -> Iterator[list[Any]]:
    """What `task.process_outputs` makes of the microbatches of each pack, in order."""
    for pack in _one_pass(stream, limit):
        yield list(runner.predict_pack(pack, task))


def _one_pass(stream: DataStream, limit: int | None) -> Iterator[Pack]:
    num_packs = 0
    while (limit is None or num_packs < limit) and (pack := stream.next()) is not None:
        num_packs += 1
        yield pack
