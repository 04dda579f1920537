"""The names of a module's tensors: which one is canonical, and which are other names of the same tensor.

The canonical name is the first in the order of `named_parameters` and `named_buffers`, which is the order of the modules. Weights are
initialised, counted, saved and exported under it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def all_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, then every buffer, under each of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def direct_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers that a module holds itself, by attribute."""
    return [*module.named_parameters(recurse=False, remove_duplicate=False), *module.named_buffers(recurse=False, remove_duplicate=False)]


def alias_table(module: nn.Module) -> dict[str, str]:
    """Other name -> canonical name, for parameters and buffers that have several (tied weights, modules used twice)."""
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in all_tensors(module):
        canonical = first.setdefault(id(tensor), name)
        if canonical != name:
            aliases[name] = canonical
    return aliases


def state_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The model state: parameters and persistent buffers under each of their names, those of a compiled module as if it were not."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            yield name.replace("_orig_mod.", ""), tensor


def state_names(module: nn.Module) -> list[str]:
    """The canonical names of the model state."""
    first: dict[int, str] = {}
    for name, tensor in state_tensors(module):
        first.setdefault(id(tensor), name)
    return list(first.values())
