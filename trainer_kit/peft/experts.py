"""Low-rank adapters of a module of experts: one for each of the weights that are adapted, with an A and a B for every expert.

Shapes: S tokens sorted by expert, X experts, r rank. Before editing: the module computes each product through its method `project`,
which is replaced on the instance; its parameters and their names stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from trainer_kit.exceptions import UnsupportedError
from trainer_kit.models.experts import GroupedExperts, grouped_linear
from trainer_kit.parallel.additions import local_part
from trainer_kit.peft.layers import LowRank
from trainer_kit.peft.methods import LoRA


class LowRankExperts(LowRank):
    """A (X, r, in) and B (X, out, r) for one weight (X, out, in)."""

    def __init__(self, weight: nn.Parameter, method: LoRA) -> None:
        num_experts, out_features, in_features = weight.shape
        super().__init__(method, (num_experts, method.rank, in_features), (num_experts, out_features, method.rank), weight)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """(S, in) to (S, out); the rows of expert e end before row `ends[e]`."""
        inner = grouped_linear(self._inputs(x), local_part(self.A), ends)
        return grouped_linear(inner * self.scale, local_part(self.B), ends)

    def delta(self, a: torch.Tensor, b: torch.Tensor, box: tuple[slice, ...]) -> torch.Tensor:
        """scale * B @ A of the experts in the box."""
        return super().delta(a[box[0]], b[box[0]], box)

    def cut_dims(self, dim: int) -> Mapping[str, int | None]:
        """`parallelize_tensor` knows no layers of experts."""
        raise UnsupportedError("adapters of experts cannot be cut by parallelize_tensor")


def attach_to_experts(experts: GroupedExperts, submodule: str, weight: str, method: LoRA) -> None:
    """Add a low-rank change of one weight. The adapters of a module are in one ModuleDict, by the name of the weight."""
    adapters = getattr(experts, submodule, None)
    if adapters is None:
        adapters = nn.ModuleDict()
        experts.add_module(submodule, adapters)
        vars(experts)["project"] = _Project(experts, adapters)
    adapters[weight] = LowRankExperts(experts.get_parameter(weight), method)


@dataclass(slots=True)
class _Project:
    """In the place of `project` of a module of experts."""

    experts: GroupedExperts
    adapters: nn.ModuleDict

    def __call__(self, name: str, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        outputs = type(self.experts).project(self.experts, name, x, ends)
        if name not in self.adapters:
            return outputs
        adapter = self.adapters[name]
        assert isinstance(adapter, LowRankExperts)
        return (outputs + adapter(x, ends)).to(outputs.dtype) if adapter.is_added() else outputs
