"""`Callback`, the class to override, and the dispatcher that brings events to callbacks.

One method per event of `trainer_kit.events`; a method that is not overridden is never called. Not here: the order of events,
which `loop.py` decides.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from trainer_kit import events
from trainer_kit.events import Event, builtin_events, method_name
from trainer_kit.exceptions import ConfigurationError, nearest

if TYPE_CHECKING:
    from trainer_kit.trainer import Trainer


class Callback:
    """Behaviour added to a run. Override the methods of the events you want; each gets the event record.

    Keep what must survive a resume in `state_dict` (plain values and tensors). `close` always runs for a callback that was
    started, however the run ends.
    """

    is_logger: ClassVar[bool] = False  # loggers are served after all other callbacks

    @property
    def state_key(self) -> str:
        """The name under which the state is saved; two callbacks with equal keys are refused."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """What must survive a resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        if state:
            raise ConfigurationError(
                f"{type(self).__name__} was saved with state {sorted(state)} but does not override load_state_dict; "
                "add one that takes it back"
            )

    def describe(self) -> str:
        """One line for `trainer.describe()`."""
        return type(self).__name__

    def close(self) -> None:
        """Release files, threads, bars. Called once at the end of each fit, whatever happened."""

    def on_build_start(self, event: events.BuildStart) -> None: ...
    def on_data_ready(self, event: events.DataReady) -> None: ...
    def on_model_ready(self, event: events.ModelReady) -> None: ...
    def on_optimizer_ready(self, event: events.OptimizerReady) -> None: ...
    def on_lr_scheduler_ready(self, event: events.LRSchedulerReady) -> None: ...
    def on_build_end(self, event: events.BuildEnd) -> None: ...
    def on_checkpoint_loaded(self, event: events.CheckpointLoaded) -> None: ...
    def on_fit_start(self, event: events.FitStart) -> None: ...
    def on_epoch_start(self, event: events.EpochStart) -> None: ...
    def on_step_start(self, event: events.StepStart) -> None: ...
    def on_forward_backward_start(self, event: events.ForwardBackwardStart) -> None: ...
    def on_microbatch_end(self, event: events.MicrobatchEnd) -> None: ...
    def on_forward_backward_end(self, event: events.ForwardBackwardEnd) -> None: ...
    def on_gradients_ready(self, event: events.GradientsReady) -> None: ...
    def on_before_optimizer_step(self, event: events.BeforeOptimizerStep) -> None: ...
    def on_optimizer_step(self, event: events.OptimizerStep) -> None: ...
    def on_step_end(self, event: events.StepEnd) -> None: ...
    def on_metrics(self, event: events.Metrics) -> None: ...
    def on_evaluate_start(self, event: events.EvaluateStart) -> None: ...
    def on_evaluate_end(self, event: events.EvaluateEnd) -> None: ...
    def on_checkpoint_start(self, event: events.CheckpointStart) -> None: ...
    def on_checkpoint_saved(self, event: events.CheckpointSaved) -> None: ...
    def on_epoch_end(self, event: events.EpochEnd) -> None: ...
    def on_fit_end(self, event: events.FitEnd) -> None: ...
    def on_predict_start(self, event: events.PredictStart) -> None: ...
    def on_predict_end(self, event: events.PredictEnd) -> None: ...
    def on_exception(self, event: events.RunException) -> None: ...


def _known_methods() -> set[str]:
    found, pending = set(builtin_events()), list(Event.__subclasses__())
    while pending:
        event_type = pending.pop()
        found.add(method_name(event_type))
        pending.extend(event_type.__subclasses__())
    return found - {method_name(events.StepEvent)}


def callback_list(callbacks: object) -> list[Any]:
    """The callbacks as a list. Raises ConfigurationError for what is no sequence."""
    if isinstance(callbacks, Sequence) and not isinstance(callbacks, str):
        return list(callbacks)
    raise ConfigurationError(f"callbacks= is {callbacks!r}, expected a list: callbacks=[...]")


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse what would be ignored silently: things that are no callbacks, unknown `on_...` methods, equal state keys."""
    keys: dict[str, Callback] = {}
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = "; pass an instance, not the class" if isinstance(callback, type) else ""
            raise ConfigurationError(f"callbacks= holds {callback!r}, expected instances of trainer_kit.Callback{hint}")
        known = _known_methods()
        for name in dir(callback):
            if name.startswith("on_") and callable(getattr(type(callback), name, None)) and name not in known:
                raise ConfigurationError(
                    f"{type(callback).__name__}.{name} belongs to no event; {nearest(name, known)}. "
                    "Define the Event class of an event of your own before the Trainer is made"
                )
        if callback.state_key in keys:
            raise ConfigurationError(
                f"two callbacks have the state key {callback.state_key!r} ({keys[callback.state_key]!r} and {callback!r}); "
                "their saved states would overwrite each other. Override state_key in one of them"
            )
        keys[callback.state_key] = callback


class Dispatcher:
    """Brings events to the callbacks that override their method; everything else costs one truth test."""

    def __init__(self, callbacks: Iterable[Callback], trainer: Trainer) -> None:
        listed = list(callbacks)
        self.callbacks = [c for c in listed if not c.is_logger] + [c for c in listed if c.is_logger]
        self._trainer = weakref.ref(trainer)
        self._handlers: dict[type[Event], tuple[Callable[[Any], None], ...]] = {
            event_type: self._find(method_name(event_type)) for event_type in builtin_events().values()
        }

    def _find(self, method: str) -> tuple[Callable[[Any], None], ...]:
        default = getattr(Callback, method, None)
        heard = [c for c in self.callbacks if getattr(type(c), method, default) is not default]
        if method.endswith("_end"):
            heard = [c for c in reversed(heard) if not c.is_logger] + [c for c in reversed(heard) if c.is_logger]
        return tuple(getattr(c, method) for c in heard)

    def emit(self, event_type: type[Event], **fields: Any) -> None:
        """Build the record and call the handlers, if there are any."""
        handlers = self._handlers[event_type]
        if handlers:
            event = event_type(trainer=self._trainer(), **fields)  # type: ignore[arg-type]  # it lives while its events are sent
            for handler in handlers:
                handler(event)

    def send(self, event: Event) -> None:
        """Bring a record that already exists, of an event type of ours or of the user's, to its handlers."""
        event_type = type(event)
        if event_type not in self._handlers:
            self._handlers[event_type] = self._find(method_name(event_type))
        for handler in self._handlers[event_type]:
            handler(event)

    def listens(self, event_type: type[Event]) -> bool:
        """Whether anybody hears this event."""
        return bool(self._handlers[event_type])

    def listeners(self) -> dict[str, list[str]]:
        """Method name -> class names of the callbacks that override it, in the order in which they are called."""
        named = {method_name(t): [type(h.__self__).__name__ for h in hs] for t, hs in self._handlers.items()}  # type: ignore[attr-defined]
        return {method: names for method, names in named.items() if names}
