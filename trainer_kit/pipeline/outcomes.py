"""What becomes of the outputs of the last stage: a loss to go back from, numbers of an evaluation, or predictions.

Also of the losses that other stages add. Used by the pipeline alone; without stages the sequential runner does this by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trainer_kit.mesh.context import AddedLoss
from trainer_kit.metrics import Metric
from trainer_kit.pipeline.inputs import joined
from trainer_kit.pipeline.loss_starts import LossStarts, counted
from trainer_kit.pipeline.loss_sums import LossSums
from trainer_kit.pipeline.loss_terms import SharedWeights, Term, TermWeights, check_loss
from trainer_kit.pipeline.stage import Root
from trainer_kit.pipeline.zero_pass import ends_of, not_reached, zeros_for
from trainer_kit.task import ForwardInputs, Task
from trainer_kit.torch_private import whole_tensor

if TYPE_CHECKING:
    from trainer_kit.parallel.context import SequenceParts


class Outcome(Protocol):
    """Called for microbatches that count, in the order of the program; `fill` for the others."""

    def compute(self, outputs: Any, given: ForwardInputs) -> Any:
        """In the last stage, as a part of its forward."""
        ...

    def take(self, index: int, given: ForwardInputs, outputs: Any, computed: Any, added: Sequence[AddedLoss]) -> list[Root]:
        """After the forward of the last stage: where its backward starts."""
        ...

    def take_added(self, index: int, added: Sequence[AddedLoss]) -> list[Root]:
        """After the forward of another stage: where its backward starts, besides from its outputs."""
        ...

    def fill(self, outputs: Any, added: Sequence[AddedLoss]) -> list[Root]:
        """After the forward of any stage for a microbatch that does not count; `outputs` only in the last one."""
        ...

    def after_backward(self, index: int) -> None:
        """After the backward of the last stage, for every microbatch of the pack."""
        ...


class TrainingOutcome:
    """Losses to go back from.

    in_lockstep: backwards contain collectives, so all ranks go back from the same places, those that no loss depends on too.
    """

    def __init__(
        self,
        task: Task,
        weights: SharedWeights | TermWeights,
        metrics: dict[str, Metric],
        losses: LossSums | None,
        starts: LossStarts,
        on_microbatch: Callable[[int, torch.Tensor | None], None] | None,
        *,
        in_lockstep: bool,
    ) -> None:
        self._task, self._weights, self._metrics, self._losses, self._starts = task, weights, metrics, losses, starts
        self._on_microbatch, self._in_lockstep = on_microbatch, in_lockstep
        self._main: dict[int, torch.Tensor] = {}  # losses that are not told yet
        self._weighed: defaultdict[int, set[str]] = defaultdict(set)  # terms by microbatch, which several stages here may add to

    def compute(self, outputs: Any, given: ForwardInputs) -> Any:
        """See Outcome."""
        return self._task.compute_loss(outputs, given.state)

    def take(self, index: int, given: ForwardInputs, outputs: Any, computed: Any, added: Sequence[AddedLoss]) -> list[Root]:
        """See Outcome."""
        terms = _checked(self._weights.terms(index, computed, added), self._losses, self._weighed[index])
        _update(self._task, self._metrics, outputs, given)
        self._main[index] = terms[0].loss.detach()
        return self._roots(terms, ends_of(outputs, added) if self._in_lockstep else ())

    def take_added(self, index: int, added: Sequence[AddedLoss]) -> list[Root]:
        """See Outcome."""
        if not added:
            return []
        terms = _checked(self._weights.added_terms(index, added), self._losses, self._weighed[index])
        return self._roots(terms, ends_of((), added) if self._in_lockstep else ())

    def _roots(self, terms: Sequence[Term], ends: Sequence[torch.Tensor]) -> list[Root]:
        """From the terms that count, and from the ends of the graph that they leave out."""
        roots = [(term.loss, self._starts.of(term)) for term in counted(terms)]
        more = not_reached([root for root, _ in roots], ends)
        return roots + list(zip(more, zeros_for(more), strict=True))

    def fill(self, outputs: Any, added: Sequence[AddedLoss]) -> list[Root]:
        """See Outcome."""
        ends = ends_of(outputs, added)
        return list(zip(ends, zeros_for(ends), strict=True))

    def after_backward(self, index: int) -> None:
        """See Outcome."""
        loss = self._main.pop(index, None)
        if self._on_microbatch is not None:
            self._on_microbatch(index, loss)


class EvaluationOutcome:
    """Losses and metrics to add up. weights: those of each microbatch by itself."""

    def __init__(
        self, task: Task, weights: Mapping[int, SharedWeights | TermWeights], metrics: dict[str, Metric], losses: LossSums
    ) -> None:
        self._task, self._weights, self._metrics, self._losses = task, weights, metrics, losses
        self._weighed: defaultdict[int, set[str]] = defaultdict(set)

    def compute(self, outputs: Any, given: ForwardInputs) -> Any:
        """See Outcome."""
        return self._task.compute_loss(outputs, given.state)

    def take(self, index: int, given: ForwardInputs, outputs: Any, computed: Any, added: Sequence[AddedLoss]) -> list[Root]:
        """See Outcome."""
        _checked(self._weights[index].terms(0, computed, added), self._losses, self._weighed[index])
        _update(self._task, self._metrics, outputs, given)
        return []

    def take_added(self, index: int, added: Sequence[AddedLoss]) -> list[Root]:
        """See Outcome."""
        if added:
            _checked(self._weights[index].added_terms(0, added), self._losses, self._weighed[index])
        return []

    def fill(self, outputs: Any, added: Sequence[AddedLoss]) -> list[Root]:
        """See Outcome."""
        return []

    def after_backward(self, index: int) -> None:
        """See Outcome."""


class PredictionOutcome:
    """What the task makes of the outputs, by microbatch. parts: of sequences, if they are cut."""

    def __init__(self, task: Task, parts: SequenceParts | None = None) -> None:
        self._task, self._parts = task, parts
        self.found: dict[int, Any] = {}

    def compute(self, outputs: Any, given: ForwardInputs) -> Any:
        """See Outcome."""
        return None

    def take(self, index: int, given: ForwardInputs, outputs: Any, computed: Any, added: Sequence[AddedLoss]) -> list[Root]:
        """See Outcome."""
        self.found[index] = joined(self._task, self._task.process_outputs(outputs, given.state), self._parts)
        return []

    def take_added(self, index: int, added: Sequence[AddedLoss]) -> list[Root]:
        """See Outcome."""
        return []

    def fill(self, outputs: Any, added: Sequence[AddedLoss]) -> list[Root]:
        """See Outcome."""
        return []

    def after_backward(self, index: int) -> None:
        """See Outcome."""


def _checked(terms: list[Term], losses: LossSums | None, weighed: set[str]) -> list[Term]:
    """The terms with whole losses, which are added to `losses` if they are wanted; see `LossSums.add`."""
    for term in terms:
        term.loss = whole_tensor(term.loss)  # from logits that tensor parallelism cut over the classes
        check_loss(term, needs_graph=torch.is_grad_enabled())
    if losses is not None:
        losses.add(terms, weighed)
    return terms


def _update(task: Task, metrics: dict[str, Metric], outputs: Any, given: ForwardInputs) -> None:
    if metrics:
        with torch.no_grad():
            task.update_metrics(metrics, outputs, given.state)
