"""What a Linear or an Embedding does when its weight is cut over the ranks of a tensor group. Each takes the place of a module's `forward`.

Shapes: B batch, T sequence, V vocabulary. With sequence parallelism each rank has a part of T between the modules, else all of it.
Before editing: weights are used through `to_local()`, whose gradients have the placement of the weight by construction. Computing on
DTensors instead gives embeddings a gradient of the whole table, and meets operators and autocast rules that DTensor does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.layout import layout_of
from trainer_kit.parallel.additions import with_addition
from trainer_kit.parallel.moves import gather_sequence, gather_sequence_alike, scatter_sum, share, sum_parts
from trainer_kit.parallel.shared_inputs import SharedInputs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(slots=True)
class TensorGroup:
    """The ranks that share the work of a module. is_sequence: whether activations between modules are cut along T."""

    mesh: DeviceMesh
    is_sequence: bool

    def whole_input(self, x: torch.Tensor, shared: SharedInputs | None) -> torch.Tensor:
        """The input of a module that computes a part of its outputs from all of its inputs."""
        return self._gather(x) if shared is None else shared.get(x, self._gather)

    def whole_output(self, x: torch.Tensor) -> torch.Tensor:
        """The output of a module that computed it from a part of its inputs."""
        return scatter_sum(x, self.mesh) if self.is_sequence else sum_parts(x, self.mesh)

    def gather_first_argument(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A hook for a module that computes all of its outputs on every rank."""
        return (gather_sequence_alike(args[0], self.mesh), *args[1:]) if self.is_sequence else args

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        return gather_sequence(x, self.mesh) if self.is_sequence else share(x, self.mesh)


def _local(parameter: Any) -> Any:
    """The part of this rank, with a graph."""
    return None if parameter is None else parameter.to_local()


@dataclass(slots=True)
class ColumnLinear:
    """Rows of the weight are cut, and so are the outputs: (B, T, in) to (B, T, out / ranks)."""

    module: nn.Linear
    group: TensorGroup
    shared: SharedInputs | None

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        x = self.group.whole_input(input, self.shared)
        return with_addition(self.module, F.linear(x, _local(self.module.weight), _local(self.module.bias)), x)


@dataclass(slots=True)
class RowLinear:
    """Columns of the weight are cut, as the inputs are: (B, T, in / ranks) to (B, T, out), summed over the ranks."""

    module: nn.Linear
    group: TensorGroup

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = _local(self.module.weight), _local(self.module.bias)
        if input.shape[-1] != weight.shape[-1]:
            raise ModelError(
                f'a "row" Linear of {self.module.in_features} inputs takes the {weight.shape[-1]} of its rank, but got {input.shape[-1]}; '
                'the modules before it must be "column"'
            )
        if bias is not None and self.group.mesh.get_local_rank() > 0:
            bias = bias - bias.detach()  # once in the sum, but with its gradient on every rank
        return self.group.whole_output(with_addition(self.module, F.linear(input, weight, bias), input))


@dataclass(slots=True)
class VocabularyEmbedding:
    """Rows of the table are cut: each rank looks up the ids that it has, (B, T) to (B, T, features), summed over the ranks."""

    module: nn.Embedding
    group: TensorGroup
    first: int = field(init=False)
    num_rows: int = field(init=False)

    def __post_init__(self) -> None:
        layout = layout_of(self.module.weight)
        self.first, self.num_rows = layout.offsets[0], layout.sizes[0]

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        table, index = _local(self.module.weight), input - self.first
        if self.num_rows == 0:  # a small vocabulary on many ranks; the graph is still needed, as its backward communicates
            return self.group.whole_output(with_addition(self.module, table.sum(0).expand(*input.shape, -1), input))
        others = ((index < 0) | (index >= self.num_rows)) & (input >= 0) & (input < self.module.num_embeddings)
        index = index.masked_fill(others, 0)
        found = F.embedding(index, table, self._padding_row())  # fails for ids that no rank has, as on one rank
        found = with_addition(self.module, found, index)
        return self.group.whole_output(found.masked_fill(others.unsqueeze(-1), 0))

    def _padding_row(self) -> int | None:
        if self.module.padding_idx is None:
            return None
        row = self.module.padding_idx - self.first
        return row if 0 <= row < self.num_rows else None


class VocabularyHead(ColumnLinear):
    """A `ColumnLinear` whose outputs are logits over the vocabulary, and say so: (B, T, in) to a DTensor (B, T, V), cut along V."""

    __slots__ = ()

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Shard

        logits = super().__call__(input)
        shape = (*logits.shape[:-1], self.module.out_features)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            logits, self.group.mesh, [Shard(logits.dim() - 1)], run_check=False, shape=torch.Size(shape), stride=stride
        )


Forward = Callable[[torch.Tensor], torch.Tensor]
