"""Every event of a run, in the order of time. This is the page to read first.

A callback overrides the method named after an event: `StepEnd` calls `on_step_end(event)`.

    fit()
        BuildStart                                   once per trainer, at the first use
            DataReady, ModelReady, OptimizerReady, LRSchedulerReady
        BuildEnd
        CheckpointLoaded                             if a checkpoint was resumed
        FitStart                                     everything is restored by now
        EpochStart                                   before the first step of each pass over the data
        per step (one optimizer step):
            StepStart                                the pack is on the device
            ForwardBackwardStart
                MicrobatchEnd                        per microbatch; with pipeline stages only where the last stage is
            ForwardBackwardEnd
            GradientsReady                           synchronised and divided by the weight: clip here
            BeforeOptimizerStep                      not when the step is skipped
            OptimizerStep                            after the update; gradients are still there; not when skipped
                                                     (then: LR schedule, records, gradients are zeroed)
            StepEnd                                  `trainer.step` counts this step now
            Metrics                                  the host values of an earlier step, when due
            requests made during the step, in this order:
                EvaluateStart ... EvaluateEnd
                CheckpointStart ... CheckpointSaved  saved: durable, later when asynchronous
        EpochEnd                                     after the last step of each pass
        FitEnd
    anywhere
        PredictStart ... PredictEnd
        RunException                                 once, for the error that ends the run

All events reach the callbacks in list order; those whose name ends in `End` in reverse order. Loggers are served last.
An event to which nobody listens is never built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from trainer_kit.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Event:
    """Something that happened in a run. Subclass it for events of your own and `trainer.emit(MyEvent(trainer=trainer))`."""

    trainer: Trainer


def method_name(event_type: type[Event]) -> str:
    """The callback method of an event: `StepEnd` -> `on_step_end`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", event_type.__name__).lower()
    return "on_exception" if event_type is RunException else f"on_{words}"


# ---- build


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuildStart(Event):
    """Nothing exists yet but the settings."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataReady(Event):
    """The data provider is bound to the context."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelReady(Event):
    """The stages are built, initialised and loaded; the parameter table exists."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimizerReady(Event):
    """`trainer.optimizer` exists."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LRSchedulerReady(Event):
    """`trainer.lr_scheduler` exists, or is None because there is none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuildEnd(Event):
    """Everything is built. `durations` holds the seconds of each part, by name."""

    durations: Mapping[str, float]


# ---- fit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointLoaded(Event):
    """A training checkpoint was restored; `step` is the number of finished steps it holds, `parts` what was taken from it."""

    path: str
    step: int
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FitStart(Event):
    """The steps begin. `resumed` says whether a checkpoint was loaded for this fit.

    `settings` is what loggers write once: the settings, the mesh, the parts and the `hparams()` of task and provider, as plain values.
    """

    resumed: bool
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochStart(Event):
    """A pass over the data begins (or is entered in the middle, after a resume)."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepEvent(Event):
    """An event of the running step; `step` is its index, from 0."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepStart(StepEvent):
    """The pack is here: its microbatches, on the device. Keep no reference to them after the event."""

    microbatches: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBackwardStart(StepEvent):
    """The first forward is next."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchEnd(StepEvent):
    """Forward and backward of one microbatch are done. `loss` is detached, of its own microbatch, and on the device.

    None: the microbatch has no weight, so it has no loss. With pipeline stages the event comes after the backward of the last one, and only
    on the ranks that have it (`trainer.context.hosts_last_stage`); other stages are not that far. A schedule decides the order.
    """

    microbatch: int
    loss: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBackwardEnd(StepEvent):
    """All microbatches are done; gradients are not divided yet."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradientsReady(StepEvent):
    """Gradients are complete. `grad_norm(p=2.0)` gives their norm as a device tensor, computed once for all who ask.

    Whoever multiplies the gradients by a factor does so through `scale(factor)`, so that the shared norm stays true.
    """

    grad_norm: Callable[..., torch.Tensor]
    scale: Callable[[torch.Tensor | float], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BeforeOptimizerStep(StepEvent):
    """The update is next."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimizerStep(StepEvent):
    """The update was made."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepEnd(StepEvent):
    """The step is finished: `trainer.step == event.step + 1`. `skipped`: no update was made."""

    skipped: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metrics(Event):
    """Host values of one step. `step` counts finished steps; `values` may be edited before the loggers see it."""

    step: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochEnd(Event):
    """A pass over the data is complete."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FitEnd(Event):
    """The steps are over, in order. `reason` is None at the planned end, else what `stop(reason)` was given.

    interrupted: `fit` raises next, as after a signal: time may be short, and what is saved counts more than anything else.
    """

    reason: str | None
    interrupted: bool


# ---- checkpoints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointStart(Event):
    """A training checkpoint is about to be taken at `step` finished steps."""

    path: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointSaved(Event):
    """A training checkpoint is durable."""

    path: str
    step: int


# ---- other loops


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluateStart(Event):
    """An evaluation begins, inside `fit` or not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluateEnd(Event):
    """An evaluation is done; `values` is what `evaluate` returns."""

    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PredictStart(Event):
    """A prediction begins."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PredictEnd(Event):
    """A prediction is done."""


# ---- failure


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunException(Event):
    """The error that ends a fit, or an evaluation or prediction outside of one; it is raised unchanged afterwards.

    The method is `on_exception`.
    """

    exception: BaseException


def builtin_events() -> dict[str, type[Event]]:
    """Method name -> event type, of the events above that are sent."""
    found = (v for v in globals().values() if isinstance(v, type) and issubclass(v, Event) and v not in (Event, StepEvent))
    return {method_name(event_type): event_type for event_type in found}
