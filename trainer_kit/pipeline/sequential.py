"""`SequentialRunner`: the microbatches of a pack, one after the other: forward, loss, backward.

It is the runner of one stage per mesh. Forward and backward alternate, so that one microbatch's activations are alive at a time.
On a mesh, ranks whose forwards contain collectives (`lockstep`) all run the same number of passes; what a rank lacks, it fills up with
passes that have no effect. Context ranks run the same microbatches in the same order, also those of which their part has no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_kit.data import Pack, batch_size
from trainer_kit.mesh.context import DistributedContext
from trainer_kit.metrics import Metric
from trainer_kit.pipeline.inputs import cut_inputs, filler_inputs, forward_inputs, joined, pack_inputs
from trainer_kit.pipeline.loss_starts import LossStarts, counted
from trainer_kit.pipeline.loss_sums import LossSums
from trainer_kit.pipeline.loss_terms import SharedWeights, Term, TermWeights, check_loss
from trainer_kit.pipeline.rank_weights import OwnWeights, RankWeights
from trainer_kit.pipeline.zero_pass import check_roots, ends_of, not_reached, without_trace, zeros_for
from trainer_kit.task import ForwardInputs, Task, Weight
from trainer_kit.torch_private import run_backward, whole_tensor

if TYPE_CHECKING:
    from trainer_kit.parallel.context import SequenceParts


def _ignore(is_last: bool) -> None:
    """There is no synchroniser to tell."""


class SequentialRunner:
    """Runs packs through one stage.

    model: called with (inputs, shared). autocast: makes the context in which forwards and losses run; None: as they are.
    lockstep: forwards contain collectives, so all ranks run the same number of passes. begin_microbatch: called before each forward of
    training with whether it is this rank's last one of the pack; once with True if there is none. Only on several ranks.
    modules: what `model` calls, whose buffers a pass without effect leaves as they were. parts: this rank's parts of sequences, if they are
    cut.
    """

    hosts_last_stage = True

    def __init__(
        self,
        model: Callable[[Any, Any], Any],
        context: DistributedContext,
        *,
        autocast: Callable[[], AbstractContextManager[Any]] | None = None,
        lockstep: bool = False,
        begin_microbatch: Callable[[bool], None] | None = None,
        modules: Sequence[nn.Module] = (),
        parts: SequenceParts | None = None,
    ) -> None:
        self._model, self._context, self._autocast, self._modules, self._parts = model, context, autocast, modules, parts
        self._several = context.world_size > 1
        self._fills_up = lockstep and self._several and context.num_data_ranks > 1  # peers of one data rank run the same anyway
        self._in_lockstep = self._fills_up or parts is not None
        self.begin_microbatch = begin_microbatch
        has_loss_peers = self._several and context.world_size > context.num_tensor_ranks
        self._totals = RankWeights(context) if has_loss_peers else OwnWeights()
        self._ends: list[torch.Tensor] = []  # of the graph of the running microbatch, in lockstep
        self._starts = LossStarts(self._several)

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
        if self._several:
            return self._run_on_ranks(pack, task, metrics, losses, on_microbatch)
        inputs, weights, counting = pack_inputs(task, pack.microbatches, None)
        for index, given in enumerate(inputs):
            terms: list[Term] = []
            if index in counting:
                terms = self._forward(task, given, weights, index, metrics, training=True)
                self._backward(terms)
                if losses is not None:
                    losses.add(terms)
            if on_microbatch is not None:
                on_microbatch(index, terms[0].loss.detach() if terms else None)
        if weights.assumed and len(inputs) > 1:
            sizes = [batch_size(microbatch) for microbatch in pack.microbatches]
            if len(set(sizes)) > 1:
                self._starts.warn_of_sizes(sizes)
        return weights.total

    def _run_on_ranks(
        self,
        pack: Pack,
        task: Task,
        metrics: dict[str, Metric],
        losses: LossSums | None,
        on_microbatch: Callable[[int, torch.Tensor | None], None] | None,
    ) -> Weight:
        """`run_pack` on one of several ranks: the microbatches that count, then the passes that other ranks wait for."""
        inputs, weights, counting = pack_inputs(task, pack.microbatches, self._parts)
        self._totals.begin(weights)
        num_fillers = self._num_fillers(pack, len(counting))
        begin, left = self.begin_microbatch or _ignore, len(counting) + num_fillers
        backward = self._backward_in_lockstep if self._in_lockstep else self._backward
        if not left:
            begin(True)
        for index, given in enumerate(inputs):
            terms: list[Term] = []
            if index in counting:
                left -= 1
                begin(left == 0)
                terms = self._forward(task, given, weights, index, metrics, training=True)
                backward(terms)
                if losses is not None:
                    losses.add(terms)
            if on_microbatch is not None:
                on_microbatch(index, terms[0].loss.detach() if terms else None)
        if num_fillers:
            filler = inputs[counting[-1]] if counting else filler_inputs(pack, task, self._context.device, self._parts)
            for left in reversed(range(num_fillers)):
                begin(left == 0)
                self._run_without_effect(filler, training=True)
        sizes = [batch_size(microbatch) for microbatch in pack.microbatches] if weights.assumed else []
        total = self._totals.finish([size for size in sizes if size is not None])
        if self._totals.sizes_differ and self._context.is_main:
            self._starts.warn_of_sizes(sizes)
        return total

    def _num_fillers(self, pack: Pack, num_run: int) -> int:
        """How many passes without effect this rank adds to those it runs anyway."""
        if not self._fills_up:
            return 0
        return max(pack.num_on_all or 0, len(pack.microbatches)) - num_run

    def _run_without_effect(self, given: ForwardInputs, *, training: bool) -> None:
        with without_trace(self._context.device, self._modules):
            self._context.collect_losses()
            with nullcontext() if self._autocast is None else self._autocast():
                outputs = self._model(given.inputs, given.shared)
            ends = ends_of(outputs, self._context.take_losses())
            if training:
                self._totals.before_backward()
                check_roots(ends)
                run_backward(tuple(ends), tuple(zeros_for(ends)))

    def evaluate_pack(self, pack: Pack, task: Task, metrics: dict[str, Metric], losses: LossSums) -> None:
        """Forward, loss and metrics of every microbatch, without a graph; the terms are added to `losses`."""
        num_run = 0
        for microbatch in pack.microbatches:
            (given,), weights, counts = pack_inputs(task, [microbatch], self._parts)
            if counts:
                losses.add(self._forward(task, given, weights, 0, metrics, training=False))
                num_run += 1
        if self._fills_up:
            self._fill_up_forwards(pack, task, num_run)

    def predict_pack(self, pack: Pack, task: Task) -> Iterator[Any]:
        """What `task.process_outputs` makes of each microbatch of this rank, in order. In lockstep, go through all of them before any
        other collective."""
        for microbatch in pack.microbatches:
            given = cut_inputs(task, forward_inputs(task, microbatch), self._parts)
            with nullcontext() if self._autocast is None else self._autocast():
                outputs = self._model(given.inputs, given.shared)
            yield joined(task, task.process_outputs(outputs, given.state), self._parts)
        if self._fills_up:
            self._fill_up_forwards(pack, task, len(pack.microbatches))

    def _fill_up_forwards(self, pack: Pack, task: Task, num_run: int) -> None:
        if num_fillers := self._num_fillers(pack, num_run):
            filler = filler_inputs(pack, task, self._context.device, self._parts)
            for _ in range(num_fillers):
                self._run_without_effect(filler, training=False)

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
        added = self._context.take_losses()
        terms = weights.terms(index, returned, added)
        for term in terms:
            if self._several:
                term.loss = whole_tensor(term.loss)  # from logits that tensor parallelism cut over the classes
            check_loss(term, needs_graph=training)
        if metrics:
            with torch.no_grad():
                task.update_metrics(metrics, outputs, given.state)
        if self._in_lockstep and training:
            self._ends = ends_of(outputs, added)
        return terms

    def _backward(self, terms: list[Term]) -> None:
        to_count = counted(terms)
        if to_count:
            run_backward(tuple([term.loss for term in to_count]), tuple([self._starts.of(term) for term in to_count]))

    def _backward_in_lockstep(self, terms: list[Term]) -> None:
        """`_backward` that goes back from everything a pass without effect does: else its collectives would wait for these."""
        ends, self._ends = self._ends, []
        to_count = counted(terms)
        losses = [term.loss for term in to_count]
        more = not_reached(losses, ends)
        check_roots(losses + more)
        run_backward((*losses, *more), (*map(self._starts.of, to_count), *zeros_for(more)))
