"""State mappers of an adapted model: the base model's, unaware of adapters, and an export that merges them.

Before editing: an export sees whole tensors, one group at a time, so that its files do not depend on the mesh, and it makes new ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from trainer_kit.exceptions import StateError, UnsupportedError
from trainer_kit.weights.mapper import StateGroup, StateMapper
from trainer_kit.weights.pieces import Piece, Shape

if TYPE_CHECKING:
    from trainer_kit.peft.inject import Adapted


class WithoutTensors(StateMapper):
    """A mapper without the groups that make tensors of these names alone."""

    def __init__(self, inner: StateMapper, names: Collection[str]) -> None:
        self._inner, self._names = inner, frozenset(names)

    def __repr__(self) -> str:
        return f"WithoutTensors({self._inner!r}, {len(self._names)} names)"

    def groups(self) -> Sequence[StateGroup]:
        return [group for group in self._inner.groups() if not group.outputs or not group.outputs <= self._names]

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._inner.apply(tensors)

    def inverse(self, *, lossy: bool = False) -> StateMapper:
        raise UnsupportedError(f"{self!r} is for loading alone; the export of an adapted model has a mapper of its own")

    def pieces(self, shapes: Mapping[str, Shape]) -> Mapping[str, Sequence[Piece]]:
        return self._inner.pieces(shapes)


class MergedExport(StateMapper):
    """The export mapper of the base model, for inputs W that become W + scale * B @ A: in float32, then in the dtype of W."""

    def __init__(self, inner: StateMapper, adapted: Sequence[Adapted]) -> None:
        self._inner = inner
        self._of_weight = {item.name: item for item in adapted}
        self._matrices = {f"{item.lora_name}.{matrix}" for item in adapted for matrix in ("A", "B")}

    def __repr__(self) -> str:
        return f"MergedExport({self._inner!r}, {len(self._of_weight)} adapters)"

    def groups(self) -> Sequence[StateGroup]:
        groups = [group for group in self._inner.groups() if not group.inputs or not group.inputs <= self._matrices]
        return [StateGroup(self._with_matrices(group.inputs), group.outputs) for group in groups]

    def _with_matrices(self, inputs: frozenset[str]) -> frozenset[str]:
        found = [self._of_weight[name].lora_name for name in inputs if name in self._of_weight]
        return inputs.union(f"{name}.{matrix}" for name in found for matrix in ("A", "B"))

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights = {name: tensor for name, tensor in tensors.items() if name not in self._matrices}
        for name in weights.keys() & self._of_weight.keys():
            weights[name] = self._merged(self._of_weight[name], tensors)
        return self._inner.apply(weights)

    def _merged(self, adapted: Adapted, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if adapted.lora.original is not None:
            raise StateError(f"{adapted.name!r} has its adapter merged already; call trainer_kit.peft.unmerge(model) before the export")
        weight = tensors[adapted.name]
        a, b = (tensors[f"{adapted.lora_name}.{matrix}"] for matrix in ("A", "B"))
        return merged(weight, adapted.lora.delta(a, b, tuple(slice(0, size) for size in weight.shape)))

    def inverse(self, *, lossy: bool = False) -> StateMapper:
        raise UnsupportedError("merged weights do not tell the base model from its adapters; keep the adapter files (export_adapters)")


def merged(weight: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """W + delta in float32, or wider if W is, in the dtype of W."""
    return (weight.to(torch.promote_types(weight.dtype, torch.float32)) + delta).to(weight.dtype)
