"""The callbacks that are there unless switched off."""

from __future__ import annotations

from trainer_kit.callback import Callback
from trainer_kit.callbacks import Checkpoint, Progress, Signals, Summary
from trainer_kit.config import TrainerConfig

DEFAULTS = (Summary, Progress, Signals)


def with_defaults(callbacks: list[Callback], config: TrainerConfig) -> list[Callback]:
    """The given callbacks after the default ones of which none was given. A `fast_dev_run` leaves no files behind."""
    defaults = [kind() for kind in DEFAULTS if not any(isinstance(callback, kind) for callback in callbacks)]
    if config.fast_dev_run:
        callbacks = [callback for callback in callbacks if not callback.is_logger and not isinstance(callback, Checkpoint)]
    return [*defaults, *callbacks]
