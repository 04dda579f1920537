"""Context parallelism: the ranks of a context group have the same samples, and each has a part of every sequence.

`SequenceParts` cuts and joins what belongs to positions; tasks and models are given one. `parallelize_context` tells a model of it.
Not here: attention over the parts (`context_attention.py`), which positions a part has (`sequence_parts.py`), weights and gradients: those
of a context group are replicas or FSDP shards, as if its ranks had samples of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from trainer_kit.exceptions import UnsupportedError
from trainer_kit.mesh.layout import local_of
from trainer_kit.parallel.sequence_parts import SEQUENCE_DIM, gather_parts, part_positions, take_part
from trainer_kit.torch_private import whole_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trainer_kit.mesh.context import DistributedContext
    from trainer_kit.parallel.context_attention import Way

METHOD = "set_sequence_parts"
_MARK = "trainer_kit_sequence_parts"


@dataclass(frozen=True, slots=True)
class SequenceParts:
    """Which part of every sequence this rank has. group: the ranks that have the others."""

    rank: int
    num_ranks: int
    group: ProcessGroup

    @classmethod
    def of(cls, context: DistributedContext) -> SequenceParts | None:
        """Those of a run; None if sequences are whole. The first call is a collective."""
        group = context.group("batch", "cp")
        return None if group is None else cls(context.context_rank, context.num_context_ranks, group)

    def take(self, x: torch.Tensor, *, dim: int = SEQUENCE_DIM) -> torch.Tensor:
        """This rank's part of a whole: (B, T, ...) to (B, T / ranks, ...). Raises ConfigurationError if T cannot be cut."""
        return take_part(x, self.rank, self.num_ranks, dim=dim)

    def take_all(self, inputs: Any, shape: torch.Size) -> Any:
        """Of a tensor, or of a mapping's tensors, the parts of those that have a place for each position: (B, T, ...) or (1, T, ...).

        shape: (B, T). What has another shape stays as it is.
        """
        if isinstance(inputs, Mapping):
            return {name: self.take_all(value, shape) for name, value in inputs.items()}
        is_cut = isinstance(inputs, torch.Tensor) and inputs.dim() > 1 and inputs.shape[0] in (1, shape[0]) and inputs.shape[1] == shape[1]
        return self.take(inputs) if is_cut else inputs

    def gather(self, part: torch.Tensor, *, dim: int = SEQUENCE_DIM) -> torch.Tensor:
        """The opposite, on every rank of the group, without a gradient. All of them call it."""
        return gather_parts(whole_tensor(part), self.group, dim=dim)

    def gather_all(self, parts: Any) -> Any:
        """The same with every tensor in a mapping, tuple or list."""
        if isinstance(parts, torch.Tensor):
            return self.gather(parts)
        if isinstance(parts, Mapping):
            return {name: self.gather_all(value) for name, value in parts.items()}
        return type(parts)(map(self.gather_all, parts)) if type(parts) in (tuple, list) else parts

    def positions(self, num_here: int, *, device: torch.device | None = None) -> torch.Tensor:
        """The places in the whole sequence of the `num_here` positions of this rank: rising int64 of shape (num_here,)."""
        return part_positions(num_here * self.num_ranks, self.rank, self.num_ranks, device=device)


def parallelize_context(module: nn.Module, parts: SequenceParts, *, attention: Way = "auto") -> None:
    """Let `module` work on parts of sequences. After parallelize_tensor, and before FSDP.

    Each submodule, itself among them, that has a method `set_sequence_parts(parts, attention)` is called. An attention calls
    `context_attention(q, k, v, parts.group, attention=attention)` from then on, and whatever counts positions uses `parts.positions`. All
    other submodules must treat every position by itself. attention: the way of `context_attention`.

    Raises UnsupportedError for a module that cannot, ConfigurationError for a way that its heads do not allow.
    """
    refused = [name for name, part in module.named_modules() if isinstance(part, nn.MultiheadAttention) and not hasattr(part, METHOD)]
    knowing = [part for part in module.modules() if callable(getattr(part, METHOD, None))]
    if refused or not knowing:
        found = f"{refused[0]!r} is a MultiheadAttention of torch" if refused else f"no submodule has a method {METHOD}"
        raise UnsupportedError(
            f"cp={parts.num_ranks} of MeshStrategy cuts sequences, but {type(module).__name__} has no attention over their parts: {found}. "
            f"Give its attention a method {METHOD}(self, parts, attention) and let it call trainer_kit.parallel.context_attention, or set "
            "cp_shard=1 and cp_replicate=1"
        )
    for part in knowing:
        getattr(part, METHOD)(parts, attention)
    vars(module)[_MARK] = parts


def works_on_parts(module: nn.Module) -> bool:
    """Whether parallelize_context was called for it, or for something inside."""
    return any(_MARK in vars(part) for part in module.modules())


def sum_over_parts(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum over the ranks of a context group, each of which makes a loss of it, so that gradients are summed as well."""
    return _SumOverParts.apply(x, group)


class _SumOverParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradient, ctx.group), None


def _summed(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def num_rows_here(weight: torch.Tensor) -> int:
    """How many rows of a weight are on this rank, should tensor parallelism have cut it."""
    return local_of(weight).shape[0]
