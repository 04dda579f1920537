"""`StateItem`: one tensor of a model state that is about to leave, known by name, shape and dtype before any value moves.

All ranks have the same items in the same order. Before editing: they differ in memory and functions alone, since every rank plans from
them who sends what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainer_kit.exceptions import ConfigurationError, ModelError
from trainer_kit.mesh.team import Team
from trainer_kit.weights.format import DTYPE_NAMES
from trainer_kit.weights.sources import Mosaic, all_of, find_sources

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext


@dataclass(frozen=True, slots=True, eq=False)
class GroupCall:
    """A group of a state mapper that has to be applied to values.

    ranks: those that have the mapper. apply: from whole inputs to all outputs of the group, on these ranks.
    """

    inputs: Mapping[str, Mosaic]
    ranks: Sequence[int]
    apply: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None


class StateItem(NamedTuple):
    """One tensor to hand out. source: what it is put together from, the group that makes it, or a function that gives it.

    A function is called once, on each rank that gets the tensor; so it must not need other ranks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Mosaic | GroupCall | Callable[[], torch.Tensor]


def items_of(tensors: Mapping[str, torch.Tensor], context: DistributedContext | None = None) -> list[StateItem]:
    """Items for tensors that are at hand, or distributed over the ranks of `context`; then it is a collective."""
    sources = find_sources(tensors, Team.of(context))
    return [StateItem(name, source.shape, source.dtype, all_of(name, source)) for name, source in sources.items()]


def checked_items(items: Sequence[StateItem], dtype: torch.dtype | None) -> list[StateItem]:
    """The items with the dtypes that they leave in: floating point becomes `dtype`, except quantised weights, those of one byte."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(f"dtype={dtype!r}: a floating-point dtype was expected; other tensors are written as they are")
    final: dict[str, StateItem] = {}
    for item in items:
        item = StateItem(*item)
        if item.name in final or item.name == "__metadata__":
            raise ModelError(f"tensor name {item.name!r} is used twice, or reserved; unique names were expected")
        if item.dtype not in DTYPE_NAMES:
            raise ModelError(f"tensor {item.name!r} has dtype {item.dtype}, which safetensors cannot hold; leave it out or convert it")
        if dtype is not None and item.dtype.is_floating_point and item.dtype.itemsize > 1:
            item = item._replace(dtype=dtype)
        final[item.name] = item
    if not final:
        raise ModelError("there are no tensors to write; a model with parameters or persistent buffers was expected")
    return list(final.values())


def check_announced(name: str, shape: Sequence[int], dtype: torch.dtype, tensor: torch.Tensor) -> None:
    """Raise ModelError unless a tensor that was just made is what was said before; floating point of any width is."""
    if tuple(tensor.shape) != tuple(shape):
        raise ModelError(f"tensor {name!r} was announced as {list(shape)} and came as {list(tensor.shape)}")
    if tensor.dtype != dtype and not (tensor.dtype.is_floating_point and dtype.is_floating_point):
        raise ModelError(f"tensor {name!r} was announced as {dtype} and came as {tensor.dtype}")
