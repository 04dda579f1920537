"""Where a run ends: the arithmetic of steps, passes over the data, and trial runs. No state, and no data is touched."""

from __future__ import annotations

from typing import NamedTuple

from trainer_kit.config import TrainerConfig
from trainer_kit.exceptions import ConfigurationError


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
    if num_packs == 0:
        raise ConfigurationError(
            "the data has no pack; expected at least one. The usual cause is empty data: look at the dataset or loader of data="
        )
    limits = [] if config.total_steps is None else [config.total_steps]
    if epochs is not None and num_packs is not None:
        limits.append(epochs * num_packs)
    whole = min(limits) if limits else None
    if config.dev_steps is None:
        return RunLength(whole, epochs, whole)
    # A trial of a few steps goes through the beginning of the schedule of the whole run.
    return RunLength(min([config.dev_steps, *limits]), epochs, whole)
