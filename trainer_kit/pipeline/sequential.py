"""`SequentialRunner`: the microbatches of a pack, one after the other: forward, loss, backward.

It is the runner of one stage per mesh. Forward and backward alternate, so that one microbatch's activations are alive at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_kit.data import batch_size
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.context import DistributedContext
from trainer_kit.metrics import Metric
from trainer_kit.pipeline.loss_terms import MAIN, SharedWeights, Term, TermWeights, check_loss, pack_weights
from trainer_kit.task import ForwardInputs, Task, Weight
from trainer_kit.torch_private import run_backward


@dataclass(slots=True)
class PackResult:
    """What a pack gave: the weight to divide by, and the sums of weighted losses by term where they were asked for."""

    weight: Weight = 0
    loss_sums: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    coefficients: dict[str, float] = field(default_factory=dict)

    def add(self, term: Term) -> None:
        """Add one term of one microbatch; one of weight 0 adds nothing, be its loss nan."""
        value = term.loss.detach()
        value = value.float() if value.dtype.itemsize < 4 else value
        weighted = value * term.weight
        if isinstance(term.weight, torch.Tensor):
            weighted = torch.where(term.weight == 0, 0, weighted)
        elif term.weight == 0:
            weighted = torch.zeros_like(weighted)
        self.loss_sums[term.name] = self.loss_sums[term.name] + weighted if term.name in self.loss_sums else weighted
        self.weights[term.name] = self.weights.get(term.name, 0) + term.weight
        self.coefficients[term.name] = term.coefficient

    def values(self, prefix: str) -> dict[str, torch.Tensor]:
        """`<prefix>/loss`, which is what is minimised, and with several terms the weighted mean of each as `<prefix>/<term>`."""
        means = {name: _ratio(total, self.weights[name]) for name, total in self.loss_sums.items()}
        found = {f"{prefix}/{name}": mean for name, mean in means.items() if name != MAIN}
        if means:
            found[f"{prefix}/loss"] = torch.stack([mean * self.coefficients[name] for name, mean in means.items()]).sum()
        return found


def _ratio(total: torch.Tensor, weight: Weight) -> torch.Tensor:
    if isinstance(weight, torch.Tensor) or weight:
        return total / weight
    return torch.full_like(total, float("nan"))


def forward_inputs(task: Task, microbatch: Any) -> ForwardInputs:
    """What the task makes of a microbatch, checked to be ForwardInputs."""
    given = task.build_forward_inputs(microbatch)
    if not isinstance(given, ForwardInputs):
        raise ConfigurationError(
            f"{type(task).__name__}.build_forward_inputs returned a {type(given).__name__}, expected ForwardInputs(inputs=..., state=...)"
        )
    return given


class SequentialRunner:
    """Runs packs through one stage.

    autocast: makes the context in which forwards and losses run.
    """

    def __init__(
        self,
        model: Callable[[Any, Any], Any],
        task: Task,
        context: DistributedContext,
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        metrics: dict[str, Metric] | None = None,
    ) -> None:
        self._model, self._task, self._context = model, task, context
        self._autocast = autocast
        self._metrics = metrics or {}
        self._starts: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self._sizes_warned = False

    def run_pack(
        self, microbatches: Sequence[Any], *, record: bool, on_microbatch: Callable[[int, torch.Tensor | None], None] | None = None
    ) -> PackResult:
        """Forward and backward of every microbatch; gradients accumulate, undivided.

        record: keep the sums of the losses. on_microbatch: called with (index, loss or None) after each backward.
        """
        self._context.take_losses()  # what a failed forward left behind belongs to nobody
        inputs = [forward_inputs(self._task, microbatch) for microbatch in microbatches]
        weights, result = pack_weights(inputs), PackResult()
        for index, given in enumerate(inputs):
            terms: list[Term] = []
            if not weights.nothing_counts(index):
                terms = self._forward(given, weights, index)
                self._backward(terms)
                if record:
                    for term in terms:
                        result.add(term)
            if on_microbatch is not None:
                on_microbatch(index, terms[0].loss.detach() if terms else None)
        if weights.assumed and len(inputs) > 1 and not self._sizes_warned:
            self._warn_of_sizes(microbatches)
        result.weight = weights.total
        return result

    def _forward(self, given: ForwardInputs, weights: SharedWeights | TermWeights, index: int) -> list[Term]:
        with self._autocast():
            outputs = self._model(given.inputs, given.shared)
            returned = self._task.compute_loss(outputs, given.state)
        terms = weights.terms(index, returned, self._context.take_losses())
        for term in terms:
            check_loss(term, needs_graph=True)
        if self._metrics:
            with torch.no_grad():
                self._task.update_metrics(self._metrics, outputs, given.state)
        return terms

    def _backward(self, terms: list[Term]) -> None:
        # A term of weight 0 may be nan (a mean over nothing), which 0 times nan would bring into the gradients.
        counted = [term for term in terms if isinstance(term.start, torch.Tensor) or term.start]
        if counted:
            run_backward(tuple([term.loss for term in counted]), tuple([self._start(term) for term in counted]))

    def _start(self, term: Term) -> torch.Tensor:
        """The tensor from which the backward of a term starts; those of host weights are kept."""
        loss, start = term.loss, term.start
        if isinstance(start, torch.Tensor):
            return start.to(loss.device, loss.dtype).reshape(loss.shape)
        key = (float(start), loss.dtype)
        kept = self._starts.get(key)
        if kept is None or kept.device != loss.device or kept.shape != loss.shape:
            if len(self._starts) > 1000:
                self._starts.clear()
            kept = self._starts[key] = torch.full_like(loss, float(start), requires_grad=False)
        return kept

    def _warn_of_sizes(self, microbatches: Sequence[Any]) -> None:
        sizes = [batch_size(microbatch) for microbatch in microbatches]
        if len(set(sizes)) > 1:
            self._sizes_warned = True
            warnings.warn(
                f"the microbatches of a step have {sizes} samples but each counts 1, because the task declares no weight; "
                "set weight= of ForwardInputs, or return Loss(loss, weight), to make the loss the mean over samples",
                stacklevel=2,
            )


def evaluate_microbatch(
    model: Callable[[Any, Any], Any],
    task: Task,
    context: DistributedContext,
    microbatch: Any,
    metrics: dict[str, Metric],
    result: PackResult,
) -> None:
    """Forward, loss and metrics of one microbatch, without a graph; its terms are added to `result`."""
    context.take_losses()
    given = forward_inputs(task, microbatch)
    weights = pack_weights([given])
    if weights.nothing_counts(0):
        return
    outputs = model(given.inputs, given.shared)
    terms = weights.terms(0, task.compute_loss(outputs, given.state), context.take_losses())
    for term in terms:
        check_loss(term, needs_graph=False)
        result.add(term)
    if metrics:
        task.update_metrics(metrics, outputs, given.state)
