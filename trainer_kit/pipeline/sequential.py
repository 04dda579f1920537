"""`SequentialRunner`: the microbatches of a pack, one after the other: forward, loss, backward.

It is the runner of one stage per mesh. Forward and backward alternate, so that one microbatch's activations are alive at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trainer_kit.data import Pack, batch_size
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.context import DistributedContext
from trainer_kit.metrics import Metric
from trainer_kit.pipeline.loss_sums import LossSums
from trainer_kit.pipeline.loss_terms import SharedWeights, Term, TermWeights, check_loss, pack_weights
from trainer_kit.task import ForwardInputs, Task, Weight
from trainer_kit.torch_private import read_cpu_scalar, run_backward


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

    model: called with (inputs, shared). autocast: makes the context in which forwards and losses run; None: as they are.
    """

    def __init__(
        self,
        model: Callable[[Any, Any], Any],
        context: DistributedContext,
        *,
        autocast: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self._model, self._context, self._autocast = model, context, autocast
        self._starts: dict[tuple[float, torch.dtype, int], torch.Tensor] = {}
        self._warned: set[str] = set()

    def run_pack(
        self,
        pack: Pack,
        task: Task,
        metrics: dict[str, Metric],
        *,
        losses: LossSums | None,
        on_microbatch: Callable[[int, torch.Tensor | None], None] | None = None,
    ) -> Weight:
        """Forward and backward of every microbatch; gradients accumulate. Returns the weight by which to divide them.

        losses: where the losses are added, if they are wanted. on_microbatch: called with (index, loss or None) after each backward.
        """
        inputs = [forward_inputs(task, microbatch) for microbatch in pack.microbatches]
        weights = pack_weights(inputs)
        for index, given in enumerate(inputs):
            terms: list[Term] = []
            if not weights.nothing_counts(index):
                terms = self._forward(task, given, weights, index, metrics, training=True)
                self._backward(terms)
                if losses is not None:
                    losses.add(terms)
            if on_microbatch is not None:
                on_microbatch(index, terms[0].loss.detach() if terms else None)
        if weights.assumed and len(inputs) > 1:
            self._warn_of_sizes(pack.microbatches)
        return weights.total

    def evaluate_pack(self, pack: Pack, task: Task, metrics: dict[str, Metric], losses: LossSums) -> None:
        """Forward, loss and metrics of every microbatch, without a graph; the terms are added to `losses`."""
        for microbatch in pack.microbatches:
            given = forward_inputs(task, microbatch)
            weights = pack_weights([given])
            if not weights.nothing_counts(0):
                losses.add(self._forward(task, given, weights, 0, metrics, training=False))

    def predict_pack(self, pack: Pack, task: Task) -> Iterator[Any]:
        """What `task.process_outputs` makes of each microbatch, in order."""
        for microbatch in pack.microbatches:
            given = forward_inputs(task, microbatch)
            with nullcontext() if self._autocast is None else self._autocast():
                outputs = self._model(given.inputs, given.shared)
            yield task.process_outputs(outputs, given.state)

    def _forward(
        self,
        task: Task,
        given: ForwardInputs,
        weights: SharedWeights | TermWeights,
        index: int,
        metrics: dict[str, Metric],
        *,
        training: bool,
    ) -> list[Term]:
        self._context.collect_losses()
        if self._autocast is None:
            outputs = self._model(given.inputs, given.shared)
            returned = task.compute_loss(outputs, given.state)
        else:
            with self._autocast():
                outputs = self._model(given.inputs, given.shared)
                returned = task.compute_loss(outputs, given.state)
        terms = weights.terms(index, returned, self._context.take_losses())
        for term in terms:
            check_loss(term, needs_graph=training)
        if metrics:
            with torch.no_grad():
                task.update_metrics(metrics, outputs, given.state)
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
        key = (start, loss.dtype, loss.dim())
        kept = self._starts.get(key)
        if kept is None:
            if len(self._starts) > 1000:
                self._starts.clear()
            if loss.dtype.itemsize < 4 and read_cpu_scalar(torch.tensor(start, dtype=loss.dtype)) != start:
                self._warn_once(f"the weight {start} is no {loss.dtype}, the dtype of the loss: return the loss in fp32", key="dtype")
            kept = self._starts[key] = torch.full_like(loss, float(start), requires_grad=False)
        return kept

    def _warn_of_sizes(self, microbatches: Sequence[Any]) -> None:
        sizes = [batch_size(microbatch) for microbatch in microbatches]
        if len(set(sizes)) > 1:
            self._warn_once(
                f"the microbatches of a step have {sizes} samples but each counts 1, because the task declares no weight; "
                "set weight= of ForwardInputs, or return Loss(loss, weight), to make the loss the mean over samples",
                key="sizes",
            )

    def _warn_once(self, text: str, *, key: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, stacklevel=2)
