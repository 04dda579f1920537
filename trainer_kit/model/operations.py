"""Names and effects of tensor operations as a dispatch mode sees them: which are random, which overwrite, what they write to.

Tensors are recognised by their storage, since `.data`, views and `detach` make new tensor objects of the same memory. Of a DTensor
that is the storage of its local tensor: each DTensor object has a storage of its own, with nothing in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from trainer_kit.mesh.layout import is_distributed
from trainer_kit.torch_private import local_tensor

RANDOM = frozenset({"normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "geometric_", "cauchy_", "random_"})
# After these nothing is left of the old values. Indexed writes (index_put_, masked_fill_) are not among them: they set some elements only.
OVERWRITING = RANDOM | {"zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_", "trunc_normal_"}
# These take only the shape and type of their argument, or give the same memory back.
HARMLESS = frozenset(
    {"detach", "alias", "lift_fresh", "empty_like", "new_empty", "zeros_like", "new_zeros", "ones_like", "new_ones", "full_like"}
)


@dataclass(frozen=True, slots=True)
class Write:
    """One in-place operation: its name, its numbers, how many elements it touched, and whether the tensor's own module did it."""

    operation: str
    numbers: tuple[Any, ...]
    num_elements: int
    by_owner: bool = field(compare=False, default=True)

    @property
    def overwrites(self) -> bool:
        """Whether nothing is left of the old values."""
        return self.operation in OVERWRITING


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory, also on the meta device and for empty tensors."""
    if is_distributed(tensor):
        tensor = local_tensor(tensor)
    if tensor.layout is not torch.strided:
        return id(tensor)  # sparse tensors have no storage of their own
    return StorageWeakRef(tensor.untyped_storage()).cdata


def object_key(tensor: torch.Tensor) -> int:
    """The identity of what a tensor object holds itself: of a DTensor not the local tensor. Changes when `.data = ...` is assigned."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


def operation_name(func: Any) -> str:
    """`aten::normal_` -> `normal_`."""
    return func.overloadpacket.__name__


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operation; lists of tensors are the deepest nesting there is."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))


def destinations(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to: the first argument of an in-place one, `out=` of the others."""
    if "out" in kwargs:
        return list(tensors_in((kwargs["out"],), {}))
    return list(tensors_in(args[:1], {})) if name.endswith("_") and not name.endswith("__") else []


def write_of(name: str, tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], *, by_owner: bool = True) -> Write:
    """The record of a write to `tensor`."""
    operation = "copy_" if "out" in kwargs else name
    return Write(operation, tuple(value for value in args[1:] if isinstance(value, (bool, int, float))), tensor.numel(), by_owner)
