"""Passes without effect: what a rank runs in place of a microbatch when the forwards of other ranks contain collectives.

Its backward starts from zeros, so the gradients stay as they are, and random streams and buffers are put back. Not here: when a rank
needs one, which the runner decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer_kit.data import iterate_tensors
from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.context import AddedLoss
from trainer_kit.random_state import forked
from trainer_kit.torch_private import put_back


@contextmanager
def without_trace(device: torch.device, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Random streams, and the buffers of the modules, are after the block what they were before, be they changed or replaced."""
    owners = [module for stage in modules for module in stage.modules()]
    kept = [(owner, name, buffer, buffer.clone()) for owner in owners for name, buffer in owner.named_buffers(recurse=False)]
    try:
        with forked(device):
            yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, values in kept:
                if getattr(owner, name) is not buffer:
                    setattr(owner, name, buffer)
                put_back(buffer, values)  # the backward of other microbatches may still look at it


def ends_of(outputs: Any, added: Sequence[AddedLoss]) -> list[torch.Tensor]:
    """Where the graph of a forward ends: the tensors of the model's output, and the losses that modules added."""
    found = [*iterate_tensors(outputs), *(loss.value for loss in added)]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor) and tensor.requires_grad]


def not_reached(losses: Sequence[torch.Tensor], ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those ends from which none of the losses was made. The graph is searched from the losses to the ends and no further."""
    edges = [_edge(end) for end in ends]
    missing, seen = set(edges), set(edges)
    to_visit = [_edge(loss) for loss in losses] if ends else []
    while to_visit and missing:
        edge = to_visit.pop()
        missing.discard(edge)
        if edge not in seen and edge[0] is not None:
            seen.add(edge)
            to_visit += edge[0].next_functions
    return [end for end, edge in zip(ends, edges, strict=True) if edge in missing]


def _edge(tensor: torch.Tensor) -> tuple[Any, int]:
    """The node that made a tensor, and which of its results it is."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def zeros_for(ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients from which a backward without effect starts."""
    return [torch.zeros_like(end) for end in ends]


def check_roots(roots: Sequence[torch.Tensor]) -> None:
    """Raise ModelError if no backward can start, for whose collectives the other ranks would wait."""
    if not roots:
        raise ModelError(
            "the output of the model holds no tensor with a graph, but on this mesh each rank must run a backward through the output, also "
            "where no loss counts; let forward() return tensors, or a mapping, sequence or dataclass of them"
        )
