"""From microbatches to what a model is called with, by the task; for real ones and for those that only fill up.

Not here: when a rank needs a filler, which the runners decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.data import Pack
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.pipeline.loss_terms import SharedWeights, TermWeights, pack_weights
from trainer_kit.random_state import forked
from trainer_kit.task import ForwardInputs, Task

if TYPE_CHECKING:
    from trainer_kit.parallel.context import SequenceParts


def pack_inputs(
    task: Task, microbatches: Sequence[Any], parts: SequenceParts | None
) -> tuple[list[ForwardInputs], SharedWeights | TermWeights, list[int]]:
    """What the task makes of the microbatches of a pack, their weights, and the places of those that count.

    With `parts` inputs and weights are those of this rank's parts. Which microbatches count then depends on whole ones, for whoever leaves
    one out would let the ranks with its other parts wait.
    """
    inputs = [forward_inputs(task, microbatch) for microbatch in microbatches]
    weights = pack_weights(inputs)
    counting = [index for index in range(len(inputs)) if not weights.nothing_counts(index)]
    if parts is None:
        return inputs, weights, counting
    inputs = [cut_inputs(task, given, parts) for given in inputs]
    return inputs, pack_weights(inputs), counting


def cut_inputs(task: Task, given: ForwardInputs, parts: SequenceParts | None) -> ForwardInputs:
    """This rank's part of whole inputs, by the task."""
    return given if parts is None else _checked(task, "cut_sequences", task.cut_sequences(given, parts))


def joined(task: Task, outputs: Any, parts: SequenceParts | None) -> Any:
    """What the task made of the outputs of a part, for whole sequences. A collective of the context ranks."""
    return outputs if parts is None else task.join_sequences(outputs, parts)


def forward_inputs(task: Task, microbatch: Any) -> ForwardInputs:
    """What the task makes of a microbatch, checked to be ForwardInputs."""
    return _checked(task, "build_forward_inputs", task.build_forward_inputs(microbatch))


def _checked(task: Task, method: str, given: Any) -> ForwardInputs:
    if not isinstance(given, ForwardInputs):
        raise ConfigurationError(
            f"{type(task).__name__}.{method} returned a {type(given).__name__}, expected ForwardInputs(inputs=..., state=...)"
        )
    return given


def filler_inputs(pack: Pack, task: Task, device: torch.device, parts: SequenceParts | None) -> ForwardInputs:
    """What a pass without effect runs where nothing counts: the last microbatch of this rank, or the one that the data gave."""
    microbatch = pack.microbatches[-1] if pack.microbatches else pack.filler
    if microbatch is None:
        raise ConfigurationError(
            "this data rank has no microbatch in a step in which others have, and Pack.filler is None; "
            "set it to any microbatch, which is run without effect"
        )
    with forked(device):
        return cut_inputs(task, forward_inputs(task, microbatch), parts)
