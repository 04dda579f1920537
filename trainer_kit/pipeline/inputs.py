"""From microbatches to what a model is called with, by the task; for real ones and for those that only fill up.

Not here: when a rank needs a filler, which the runners decide.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer_kit.data import Pack
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.random_state import forked
from trainer_kit.task import ForwardInputs, Task


def forward_inputs(task: Task, microbatch: Any) -> ForwardInputs:
    """What the task makes of a microbatch, checked to be ForwardInputs."""
    given = task.build_forward_inputs(microbatch)
    if not isinstance(given, ForwardInputs):
        raise ConfigurationError(
            f"{type(task).__name__}.build_forward_inputs returned a {type(given).__name__}, expected ForwardInputs(inputs=..., state=...)"
        )
    return given


def filler_inputs(pack: Pack, task: Task, device: torch.device) -> ForwardInputs:
    """What a pass without effect runs where nothing counts: the last microbatch of this rank, or the one that the data gave."""
    microbatch = pack.microbatches[-1] if pack.microbatches else pack.filler
    if microbatch is None:
        raise ConfigurationError(
            "this data rank has no microbatch in a step in which others have, and Pack.filler is None; "
            "set it to any microbatch, which is run without effect"
        )
    with forked(device):
        return forward_inputs(task, microbatch)
