"""`TransferSpec`: what goes from one stage to the next for one microbatch, as the module's `stage_transfer_spec` describes it.

A pytree of mappings, sequences and dataclasses with tensors. What is no tensor is not sent: the receiving side takes it from its own
description. Tensors are told apart by their path in the tree, so the order of keys does not matter. Not here: the sending.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from trainer_kit.data.pack import is_movable_object, map_tensors
from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.layout import is_distributed
from trainer_kit.torch_private import written_class

Side = Literal["incoming", "outgoing"]


class TensorSpec(NamedTuple):
    """One tensor: where it is in the tree, its shape and dtype."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient comes back for it."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        name = f"{self.path}: " if self.path else ""
        return f"{name}{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class _Sorted(NamedTuple):
    """The tensors of a spec in the order in which both sides send and receive them.

    places: where each tensor of the tree is in this order. differentiable: places of those for which a gradient comes back. checksum: the
    same number for what fits together, on every rank.
    """

    tensors: tuple[TensorSpec, ...]
    places: tuple[int, ...]
    differentiable: tuple[int, ...]
    checksum: int


@functools.lru_cache(maxsize=256)
def _in_order(found: tuple[TensorSpec, ...]) -> _Sorted:
    tensors = sorted(found, key=lambda spec: spec.path)
    differentiable = [place for place, spec in enumerate(tensors) if spec.has_gradient]
    checksum = zlib.crc32(", ".join(map(str, tensors)).encode())
    return _Sorted(tuple(tensors), tuple(tensors.index(spec) for spec in found), tuple(differentiable), checksum)


class TransferSpec:
    """Built from the tree that `stage_transfer_spec` returned."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        found = tuple([TensorSpec(path, tuple(tensor.shape), tensor.dtype) for path, tensor in tensors_of(tree)])
        self.tensors, self._places, self.differentiable, self.checksum = _in_order(found)

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or "nothing"

    def flatten(self, tree: Any) -> list[torch.Tensor]:
        """The tensors of what a stage returned, in the order of `tensors`. Raises ModelError for what does not fit."""
        found = dict(tensors_of(tree))
        tensors = []
        for path, shape, dtype in self.tensors:
            tensor = found.get(path)
            if tensor is None or tensor.shape != shape or tensor.dtype != dtype or is_distributed(tensor):
                raise ModelError(self._misfit(found))
            tensors.append(tensor)
        if len(found) != len(tensors):
            raise ModelError(self._misfit(found))
        return tensors

    def _misfit(self, found: Mapping[str, torch.Tensor]) -> str:
        for path, tensor in found.items():
            if is_distributed(tensor):
                return f"the stage returned a DTensor{path and f' at {path}'}, expected plain tensors; take its to_local() or full_tensor()"
        returned = [TensorSpec(path, tuple(tensor.shape), tensor.dtype) for path, tensor in found.items()]
        other = ", ".join([str(spec) for spec in returned if spec not in self.tensors][:3]) or "no other tensor"
        lacking = ", ".join([str(spec) for spec in self.tensors if spec not in returned][:3]) or "nothing of it"
        return f"the stage returned {other}, where its stage_transfer_spec(inputs, 'outgoing') says {lacking}"

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The tree with these tensors."""
        places = iter(self._places)
        return map_tensors(lambda _: tensors[next(places)], self._tree)


def transfer_spec(module: nn.Module, inputs: Any, side: Side) -> TransferSpec:
    """What a module says of its side of a transfer, for a microbatch whose model inputs are `inputs`."""
    tree = module.stage_transfer_spec(inputs, side)  # type: ignore[operator]
    spec = TransferSpec(tree)
    if not spec.tensors:
        raise ModelError(
            f"{written_class(module).__name__}.stage_transfer_spec(inputs, {side!r}) returned {tree!r}, expected a pytree with tensors, "
            "such as torch.empty(shape, dtype=dtype, device='meta')"
        )
    return spec


def check_describes_transfers(module: nn.Module, where: str) -> None:
    """Raise ModelError for a module that says nothing of its transfers. `where`: such as "stage 1 on rank 3"."""
    if not callable(getattr(module, "stage_transfer_spec", None)):
        raise ModelError(
            f"{written_class(module).__name__}, the module of {where}, has no stage_transfer_spec(inputs, boundary), which every stage of "
            "a pipeline needs: return a pytree of meta tensors like what comes from the previous stage (boundary='incoming'), or what goes "
            "to the next one ('outgoing'), for a microbatch with these model inputs"
        )


def tensors_of(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tree with their paths, such as `hidden` or `[0].mask`; in the order of `map_tensors`."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensors_of(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, (list, tuple)) and not is_movable_object(tree):
        for index, value in enumerate(tree):
            yield from tensors_of(value, f"{path}[{index}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not is_movable_object(tree):
        for field in dataclasses.fields(tree):
            yield from tensors_of(getattr(tree, field.name, None), f"{path}.{field.name}" if path else field.name)
