"""`Pack`, all microbatches of one step on one rank, and the helpers that look into a microbatch.

A microbatch is any pytree of mappings, lists, tuples and dataclasses. Not here: moving to a device, which `transfer.py` does.
The one thing to know before editing: whatever is neither a tensor nor one of these containers is a leaf and passes unchanged;
an object with a `.to` method (other than a mapping) is a leaf too, because it knows better than we do which of its parts may move.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer_kit.exceptions import ConfigurationError

Position = dict[str, Any] | Callable[[], dict[str, Any]]


@dataclass(slots=True)
class Pack:
    """The microbatches of one step on this rank.

    epoch: the pass over the data it belongs to, from 0.
    position: the state after this pack, from which `DataProvider.packs` goes on with the next one; a dict of plain values, or a
    callable that gives it, called only when needed. None: the stream counts packs and resumes by skipping.
    is_last: whether it is the last pack of its epoch; None when that is not known yet.
    num_on_all: how many microbatches every data rank runs in this step, those of the rank that has most; None: just these.
    filler: a microbatch for a rank that has none of its own in this step to run in their place, without any effect.
    """

    microbatches: list[Any]
    epoch: int = 0
    position: Position | None = None
    is_last: bool | None = None
    num_on_all: int | None = None
    filler: Any = None


def as_pack(found: Any, epoch: int, provider_name: str) -> Pack:
    """What `DataProvider.packs` yielded, as a Pack with at least one microbatch, or else a filler."""
    if isinstance(found, list):
        found = Pack(found, epoch)
    if not isinstance(found, Pack):
        raise ConfigurationError(
            f"{provider_name}.packs yielded a {type(found).__name__}, expected a Pack or a list of microbatches; "
            "yield [microbatch] for a single one"
        )
    if not found.microbatches and found.filler is None:
        raise ConfigurationError(f"{provider_name}.packs yielded a pack without microbatches in epoch {found.epoch}; leave it out")
    return found


def is_movable_object(value: Any) -> bool:
    """Whether this is an object that moves itself to a device, such as a `PackedSequence`."""
    return callable(getattr(value, "to", None)) and not isinstance(value, (torch.Tensor, Mapping, type))


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any, on_object: Callable[[Any], Any] | None = None) -> Any:
    """The tree with `fn` applied to each tensor; containers are new and keep their type, other leaves are the same objects.

    `on_object` is applied to leaves that move themselves (see `is_movable_object`).
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if type(tree) is dict:
        return {key: map_tensors(fn, value, on_object) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(fn, value, on_object) for value in tree)
    if is_movable_object(tree):
        return tree if on_object is None else on_object(tree)
    return _map_special(fn, tree, on_object)


def _map_special(fn: Callable[[torch.Tensor], Any], tree: Any, on_object: Callable[[Any], Any] | None) -> Any:
    """Subclasses of the plain containers, and dataclasses: copied, then filled, so that no constructor runs twice."""
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(fn, value, on_object) for key, value in tree.items()}
        if not isinstance(tree, MutableMapping):
            return mapped
        filled = copy.copy(tree)
        for key, value in mapped.items():  # not `update`, which some containers of model outputs forbid
            filled[key] = value
        return filled
    if isinstance(tree, tuple):
        values = [map_tensors(fn, value, on_object) for value in tree]
        return type(tree)._make(values) if hasattr(tree, "_make") else type(tree)(values)
    if isinstance(tree, list):
        copied = copy.copy(tree)
        copied[:] = [map_tensors(fn, value, on_object) for value in tree]
        return copied
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        new = copy.copy(tree)
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                object.__setattr__(new, field.name, map_tensors(fn, getattr(tree, field.name), on_object))
        return new
    return tree


def iterate_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree, in order, without those inside objects that move themselves."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from iterate_tensors(value)
    elif isinstance(tree, (list, tuple)) and not is_movable_object(tree):
        for value in tree:
            yield from iterate_tensors(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not is_movable_object(tree):
        for field in dataclasses.fields(tree):
            yield from iterate_tensors(getattr(tree, field.name, None))


def batch_size(tree: Any) -> int | None:
    """The size of dim 0 of the first tensor that has one, or None."""
    return next((tensor.shape[0] for tensor in iterate_tensors(tree) if tensor.dim() > 0), None)
