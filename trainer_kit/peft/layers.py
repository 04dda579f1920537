"""The low-rank changes that layers get: of a Linear, of an Embedding, and of each weight of a module of grouped linear layers.

Shapes: r rank, E experts, N rows. All of them hold a thin matrix A on the side of the inputs and B on the side of the outputs, fill both in
`reset_parameters` as the paper and the peft library do, and know the change `delta` of the whole weight, or of a box of it.
Before editing: A and B may be cut over ranks; a forward uses `local_part` of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer_kit.exceptions import StateError
from trainer_kit.parallel.additions import Addition, local_part
from trainer_kit.peft.methods import LoRA

Box = tuple[slice, ...]


class LowRank(Addition):
    """What the kinds have in common. `original`: on the host, the layer's weight before `merge`; None: it is not merged."""

    A: nn.Parameter
    B: nn.Parameter

    def __init__(self, method: LoRA, shape_of_a: tuple[int, ...], shape_of_b: tuple[int, ...], weight: torch.Tensor) -> None:
        super().__init__()
        self.method, self.scale = method, method.scale
        self.dropout = nn.Dropout(method.dropout) if method.dropout else nn.Identity()
        self.original: torch.Tensor | None = None
        options: dict[str, Any] = {"dtype": method.dtype or weight.dtype, "device": weight.device}
        self.A = nn.Parameter(torch.empty(shape_of_a, **options))
        self.B = nn.Parameter(torch.empty(shape_of_b, **options))
        self.reset_parameters()

    def extra_repr(self) -> str:
        return f"rank={self.method.rank}, scale={self.scale:g}"

    def is_added(self) -> bool:
        """Not while the weight has the change in it. Training would then train nothing."""
        if self.original is not None and self.training and torch.is_grad_enabled():
            raise StateError("the adapters are merged into the weights; call trainer_kit.peft.unmerge(model) before training goes on")
        return self.original is None

    def check_settled(self) -> None:
        """Not while the weight has the change in it: a checkpoint would hold it twice."""
        if self.original is not None:
            raise StateError("the adapters are merged into the weights; call trainer_kit.peft.unmerge(model) before saving or loading")

    def reset_parameters(self) -> None:
        """Kaiming-uniform A with a = sqrt(5), so uniform within 1 / sqrt(inputs); B zero: the layer computes what it did."""
        nn.init.uniform_(self.A, -1 / math.sqrt(self.A.shape[-1]), 1 / math.sqrt(self.A.shape[-1]))
        nn.init.zeros_(self.B)

    def delta(self, a: torch.Tensor, b: torch.Tensor, box: Box) -> torch.Tensor:
        """scale * B @ A in float32, for the box of the weight; a, b: whole."""
        rows, columns = box[-2:]
        return self.scale * (b[..., rows, :].float() @ a[..., columns].float())

    def _inputs(self, x: torch.Tensor) -> torch.Tensor:
        """In the dtype of A, unless autocast chooses one."""
        return self.dropout(x if torch.is_autocast_enabled(x.device.type) else x.to(self.A.dtype))


class LowRankLinear(LowRank):
    """A (r, in) and B (out, r): x to scale * B A dropout(x)."""

    def __init__(self, layer: nn.Linear, method: LoRA) -> None:
        out_features, in_features = layer.weight.shape
        super().__init__(method, (method.rank, in_features), (out_features, method.rank), layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) to (..., out)."""
        return F.linear(F.linear(self._inputs(x), local_part(self.A)) * self.scale, local_part(self.B))

    def cut_dims(self, dim: int) -> Mapping[str, int | None]:
        """B has the rows of the weight, A its columns."""
        return {"A": None, "B": 0} if dim == 0 else {"A": 1, "B": None}


class LowRankEmbedding(LowRank):
    """A (vocabulary, r) and B (features, r): the row of A of each id, times B. A is zero at first, B normal, as in the peft library."""

    def __init__(self, layer: nn.Embedding, method: LoRA) -> None:
        self.padding_idx = layer.padding_idx
        num_rows, num_features = layer.weight.shape
        super().__init__(method, (num_rows, method.rank), (num_features, method.rank), layer.weight)
        self.dropout = nn.Identity()  # inputs are ids

    def reset_parameters(self) -> None:
        """A zero, B from a standard normal distribution."""
        nn.init.zeros_(self.A)
        nn.init.normal_(self.B)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(...) to (..., features); of a table that is cut, ids count from its first row."""
        table = local_part(self.A)
        is_empty = table.shape[0] == 0  # more ranks than rows; the graph is still needed, as its backward communicates
        rows = table.sum(0).expand(*ids.shape, -1) if is_empty else F.embedding(ids, table, self._padding_row(table))
        return F.linear(rows * self.scale, local_part(self.B))

    def delta(self, a: torch.Tensor, b: torch.Tensor, box: Box) -> torch.Tensor:
        """scale * A @ B^T: the rows of the table belong to A."""
        rows, columns = box
        return self.scale * (a[rows].float() @ b[columns].float().T)

    def cut_dims(self, dim: int) -> Mapping[str, int | None]:
        """A has the rows of the table."""
        return {"A": 0, "B": None}

    def _padding_row(self, table: torch.Tensor) -> int | None:
        """Where in the part of this rank the padding is, whose row gets no gradient."""
        if self.padding_idx is None:
            return None
        from trainer_kit.mesh.layout import layout_of

        row = self.padding_idx - layout_of(self.A).offsets[0]
        return row if 0 <= row < table.shape[0] else None
