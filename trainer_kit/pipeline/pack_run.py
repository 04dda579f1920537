"""`PackRun`: one pack going through the actions of this rank.

It moves tensors between stages, ranks and the loss; every action is a method. What a microbatch leaves lives here or in the passes of its
stage, so that dropping this object drops all of it. Not here: what surrounds a pack (`runtime.py`), how a stage runs (`stage.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.pipeline.actions import Action, Kind
from trainer_kit.pipeline.outcomes import Outcome
from trainer_kit.pipeline.pack_check import PackCheck
from trainer_kit.pipeline.program import Program
from trainer_kit.pipeline.recording import Recorder
from trainer_kit.pipeline.stage import StagePasses
from trainer_kit.pipeline.transfer_spec import TransferSpec
from trainer_kit.pipeline.transport import Message, Transport
from trainer_kit.pipeline.zero_pass import without_trace
from trainer_kit.task import ForwardInputs

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext


@dataclass(slots=True)
class Microbatch:
    """What is known of a microbatch before it runs, the same on all ranks of a pipeline.

    counts: whether it has a loss; else it only fills up. incoming, outgoing: what the stages of this rank receive and send, by stage.
    """

    given: ForwardInputs
    counts: bool
    incoming: dict[int, TransferSpec] = field(default_factory=dict)
    outgoing: dict[int, TransferSpec] = field(default_factory=dict)


@dataclass(slots=True)
class Surroundings:
    """What lasts longer than a pack. place: of this rank in the pipeline. begin_microbatch: see PipelineRunner."""

    context: DistributedContext
    place: int
    transport: Transport
    check: PackCheck
    autocast: Callable[[], AbstractContextManager[Any]] | None
    begin_microbatch: Callable[[bool], None] | None


class PackRun:
    """Runs the program of this rank, once. peak: how many (stage, microbatch) were alive at a time at most."""

    def __init__(
        self,
        around: Surroundings,
        program: Program,
        passes: Mapping[int, StagePasses],
        microbatches: Sequence[Microbatch],
        outcome: Outcome,
        recorder: Recorder | None,
    ) -> None:
        self._around, self._program, self._passes = around, program, passes
        self._microbatches, self._outcome, self._recorder = microbatches, outcome, recorder
        self._transport, self._last = around.transport, program.layout.num_stages - 1
        self._arrived: dict[Message, Sequence[torch.Tensor]] = {}  # from a stage on this rank
        self._ready: dict[Message, Sequence[torch.Tensor]] = {}  # to be sent
        self._num_alive = self.peak = 0
        self._do: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward,
            Kind.SEND_ACTIVATIONS: self._send_activations,
            Kind.RECEIVE_ACTIVATIONS: self._receive_activations,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECEIVE_GRADIENT: self._receive_gradient,
            Kind.UNSHARD: lambda action: self._sharded(action).unshard(),
            Kind.RESHARD: lambda action: self._sharded(action).reshard(),
            Kind.REDUCE_GRADIENT: lambda action: self._sharded(action).reduce(),
        }

    def run(self) -> None:
        """Every action in order; errors say in which they came."""
        for action in self._program.actions(self._around.place):
            try:
                if Kind.SEND_ACTIVATIONS <= action.kind <= Kind.RECEIVE_GRADIENT:
                    self._around.check.finish()
                self._do[action.kind](action)
            except Exception as error:
                error.add_note(f"in '{action}' of the pipeline, on rank {self._around.context.rank}")
                raise
        self._around.check.finish()
        self._transport.finish()

    def _forward(self, action: Action) -> None:
        stage, index = action.stage, action.microbatch
        passes, microbatch = self._passes[stage], self._microbatches[index]
        inputs = self._inputs(passes, microbatch, index) if stage else microbatch.given.inputs
        with self._recorded(action), self._traced(passes, microbatch), torch.set_grad_enabled(passes.trains):
            context = self._around.context
            context.collect_losses()
            with self._around.autocast() if self._around.autocast is not None else nullcontext():
                outputs = passes.stage.call(inputs, microbatch.given.shared)
                computes = stage == self._last and microbatch.counts
                computed = self._outcome.compute(outputs, microbatch.given) if computes else None
            added = context.take_losses()
            if not microbatch.counts:
                roots = self._outcome.fill(outputs if stage == self._last else (), added)
            elif stage == self._last:
                roots = self._outcome.take(index, microbatch.given, outputs, computed, added)
            else:
                roots = self._outcome.take_added(index, added)
        self._num_alive += self._program.trains
        self.peak = max(self.peak, self._num_alive)
        if stage == self._last:
            passes.keep(index, roots)
            return
        spec = microbatch.outgoing[stage]
        tensors = spec.flatten(outputs)
        passes.keep(index, roots, [tensors[place] for place in spec.differentiable])
        self._hand_over(Message(stage + 1, index, False), tensors)

    def _inputs(self, passes: StagePasses, microbatch: Microbatch, index: int) -> Any:
        spec = microbatch.incoming[passes.stage.index]
        tensors = self._take(Message(passes.stage.index, index, False))
        return spec.rebuild(passes.as_inputs(index, tensors, spec.differentiable))

    def _backward(self, action: Action) -> None:
        kind, stage, index = action
        passes = self._passes[stage]
        gradients: Sequence[torch.Tensor] = ()
        if kind != Kind.BACKWARD_WEIGHT and stage < self._last and passes.trains:
            gradients = self._take(Message(stage, index, True))
        brings_weights = passes.brings_weights(kind)
        with self._recorded(action), self._traced(passes, self._microbatches[index]):
            passes.num_left -= brings_weights
            is_last = brings_weights and not passes.num_left
            if is_last and passes.stage.sync is not None:
                passes.stage.sync.begin_microbatch(True)
            if is_last and self._around.begin_microbatch is not None:
                self._around.begin_microbatch(True)
            found = passes.backward(kind, index, gradients)
            if is_last and self._around.begin_microbatch is not None:
                self._around.begin_microbatch(False)
        self._num_alive -= brings_weights
        if kind == Kind.BACKWARD_WEIGHT:
            return
        if stage == self._last:
            self._outcome.after_backward(index)
        if found is not None and passes.wants_gradient:
            self._hand_over(Message(stage - 1, index, True), found)

    def _hand_over(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """To the stage of a message if it is on this rank, or to be sent."""
        is_here = self._program.layout.rank_of(message.stage) == self._around.place
        (self._arrived if is_here else self._ready)[message] = tensors

    def _take(self, message: Message) -> Sequence[torch.Tensor]:
        """What was handed over on this rank, or received. A gradient says that the outputs it belongs to arrived."""
        here = self._arrived.pop(message, None)
        if here is not None:
            return here
        if message.is_gradient:
            self._transport.answer(Message(message.stage + 1, message.microbatch, False))
        return self._transport.take(message)

    def _send_activations(self, action: Action) -> None:
        message = Message(action.stage + 1, action.microbatch, False)
        self._transport.send(message, self._ready.pop(message), self._program.peer(action), answered=self._passes[action.stage].trains)

    def _receive_activations(self, action: Action) -> None:
        tensors = self._microbatches[action.microbatch].incoming[action.stage].tensors
        message = Message(action.stage, action.microbatch, False)
        self._transport.receive(message, [(shape, dtype) for _, shape, dtype in tensors], self._program.peer(action))

    def _send_gradient(self, action: Action) -> None:
        if self._passes[action.stage].wants_gradient:
            message = Message(action.stage - 1, action.microbatch, True)
            self._transport.send(message, self._ready.pop(message), self._program.peer(action), answered=False)

    def _receive_gradient(self, action: Action) -> None:
        if self._passes[action.stage].trains:
            spec = self._microbatches[action.microbatch].outgoing[action.stage]
            shapes = [spec.tensors[place][1:] for place in spec.differentiable]
            self._transport.receive(Message(action.stage, action.microbatch, True), shapes, self._program.peer(action))

    def _sharded(self, action: Action) -> Any:
        return self._passes[action.stage].stage.sharded

    def _recorded(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext() if self._recorder is None else self._recorder.span(action)

    def _traced(self, passes: StagePasses, microbatch: Microbatch) -> AbstractContextManager[None]:
        """What only fills up leaves random streams and buffers as they were."""
        return nullcontext() if microbatch.counts else without_trace(self._around.context.device, [passes.stage.module])
