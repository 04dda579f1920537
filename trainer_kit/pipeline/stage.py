"""`Stage`, what the build gives the runtime for each stage of this rank, and `StagePasses`, its passes during one pack.

Knows one stage and its graphs; not the other stages, transfers or losses. Between a forward and the last backward of a microbatch it keeps
the edges of the graph where backward starts, not the outputs, whose memory is free as soon as they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from trainer_kit.pipeline.actions import Kind
from trainer_kit.pipeline.sharded_stage import ShardedStage
from trainer_kit.pipeline.split_backward import SplitBackward
from trainer_kit.torch_private import run_backward

Root = tuple[torch.Tensor, torch.Tensor]
"""Where backward starts, and with which gradient."""


class MicrobatchSync(Protocol):
    """What tells FSDP units that the last backward of a pack comes, where each microbatch gathers and reduces."""

    @property
    def units(self) -> Sequence[Any]:
        """The FSDP units."""
        ...

    def begin_microbatch(self, is_last: bool) -> None:
        """Before a backward, and once before the first forward."""
        ...

    def reset(self) -> None:
        """A pack was given up."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of this rank.

    index: its place in the model. module: it has `stage_transfer_spec`. call: (inputs, shared) -> outputs; the module, compiled or cast or
    not. sharded: its FSDP units, if the program gathers and reduces once per pack. sync: of its FSDP units, if each microbatch does.
    splits: whether backwards of inputs and of weights can be separate. Where they cannot, or would compute activations twice, the whole
    backward runs in the place of that of inputs.
    """

    index: int
    module: nn.Module
    call: Callable[[Any, Any], Any]
    sharded: ShardedStage | None = None
    sync: MicrobatchSync | None = None
    splits: bool = True


class StagesSync:
    """What `Gradients` gets in place of one `FSDPSync` for the whole model: the runtime tells each stage by itself."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._parts = [part for stage in stages for part in (stage.sharded, stage.sync) if part is not None]
        self.units = [unit for part in self._parts for unit in part.units]

    def begin_microbatch(self, is_last: bool) -> None:
        """The stages are told before their own backwards."""

    def reset(self) -> None:
        """A pack was given up: nothing of it is left in the units."""
        for part in self._parts:
            part.reset()


@dataclass(slots=True)
class _Kept:
    """What a forward leaves for its backward. answers: the edges of outputs, and which of the gradients that come back is theirs."""

    leaves: Sequence[torch.Tensor]
    roots: list[tuple[GradientEdge, torch.Tensor]]
    answers: list[tuple[GradientEdge, int]]
    weights: SplitBackward | None = None


class StagePasses:
    """The passes of one stage over the microbatches of a pack.

    trains: whether backwards come. wants_gradient: whether the previous stage waits for the gradient of the inputs.
    """

    def __init__(self, stage: Stage, num_microbatches: int, *, trains: bool, wants_gradient: bool) -> None:
        self.stage, self.trains, self.wants_gradient = stage, trains, wants_gradient
        self.num_left = num_microbatches  # backwards that bring gradients of parameters
        self._leaves: dict[int, Sequence[torch.Tensor]] = {}
        self._kept: dict[int, _Kept] = {}

    def as_inputs(self, index: int, tensors: Sequence[torch.Tensor], differentiable: Iterable[int]) -> list[torch.Tensor]:
        """What came from the previous stage, such that its gradient can be had."""
        inputs = [tensor.detach() for tensor in tensors]
        if self.trains and self.wants_gradient:
            self._leaves[index] = [inputs[place].requires_grad_() for place in differentiable]
        return inputs

    def keep(self, index: int, roots: Sequence[Root], outputs: Sequence[torch.Tensor] = ()) -> None:
        """A forward is done. outputs: those for which a gradient comes back, in order; some may have no graph."""
        if self.trains:
            with_graph = [(get_gradient_edge(root), start) for root, start in roots if root.requires_grad]
            answers = [(get_gradient_edge(output), place) for place, output in enumerate(outputs) if output.requires_grad]
            self._kept[index] = _Kept(self._leaves.pop(index, ()), with_graph, answers)

    def brings_weights(self, kind: Kind) -> bool:
        """Whether a backward of this kind adds to the gradients of parameters."""
        return kind == Kind.BACKWARD or (kind == Kind.BACKWARD_WEIGHT) == self.stage.splits

    def backward(self, kind: Kind, index: int, gradients: Sequence[torch.Tensor] = ()) -> Sequence[torch.Tensor] | None:
        """Run a backward. Returns the gradients of the inputs, if it is one that computes them.

        gradients: of all outputs for which some come back, in order; the backward of weights needs none.
        """
        if not self.trains:
            return ()
        if kind == Kind.BACKWARD_WEIGHT:
            kept = self._kept.pop(index)
            if kept.weights is not None:
                kept.weights.of_weights()
                if self.stage.sharded is not None:
                    self.stage.sharded.collect()
            return None
        kept = self._kept[index]
        edges = [edge for edge, _ in kept.roots] + [edge for edge, _ in kept.answers]
        starts = [start for _, start in kept.roots] + [gradients[place] for _, place in kept.answers]
        leaves, kept.leaves, kept.roots, kept.answers = kept.leaves, (), [], []
        if kind == Kind.BACKWARD_INPUT and self.stage.splits:
            kept.weights = SplitBackward(edges, leaves)
            del edges
            found = kept.weights.of_inputs(starts)
        else:
            if kind == Kind.BACKWARD:
                del self._kept[index]
            if edges:
                run_backward(tuple(edges), tuple(starts))
            found = [leaf.grad for leaf in leaves]
        return [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(leaves, found, strict=True)]
