"""Which steps have a record, for callbacks that add values to it and would do needless work in the other steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_kit.trainer import Trainer


def is_recorded(trainer: Trainer, step: int) -> bool:
    """Whether the running step, of this index, makes a record: every `log_every`-th does, and the last one."""
    return (step + 1) % trainer.config.log_every == 0 or step + 1 == trainer.total_steps
