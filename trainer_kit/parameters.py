"""The parameter table: one row per parameter, read by everything that deals with parameters one by one.

A tied parameter has one row, under its first name in the order of the model; the other names are aliases. Names are global: a
stage numbers its layers as the whole model does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter: its canonical name, its other names, the tensor, and the stage that holds it."""

    name: str
    aliases: tuple[str, ...]
    parameter: nn.Parameter
    stage: int

    @property
    def trainable(self) -> bool:
        """Whether it gets gradients."""
        return self.parameter.requires_grad


class ParameterTable:
    """Rows of all parameters and the persistent buffers of the stages of this rank."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        self.rows: list[ParameterRow] = []
        self.buffers: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}  # every second name -> canonical name
        for index, stage in enumerate(stages):
            names: dict[nn.Parameter, list[str]] = {}
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                names.setdefault(parameter, []).append(plain_name(name))
            self.rows += [ParameterRow(found[0], tuple(found[1:]), parameter, index) for parameter, found in names.items()]
            self._add_buffers(stage)
        self.aliases |= {alias: row.name for row in self.rows for alias in row.aliases}
        self._by_parameter = {row.parameter: row for row in self.rows}

    def _add_buffers(self, stage: nn.Module) -> None:
        first: dict[int, str] = {}
        for prefix, module in stage.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is None or name in module._non_persistent_buffers_set:
                    continue
                full = plain_name(f"{prefix}.{name}" if prefix else name)
                canonical = first.setdefault(id(buffer), full)
                if canonical == full:
                    self.buffers[full] = buffer
                else:
                    self.aliases[full] = canonical

    def __iter__(self) -> Iterator[ParameterRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def trainable(self) -> list[ParameterRow]:
        """The rows that get gradients."""
        return [row for row in self.rows if row.trainable]

    def name_of(self, parameter: nn.Parameter) -> str:
        """The canonical name of a parameter."""
        return self._by_parameter[parameter].name

    def names(self) -> dict[nn.Parameter, str]:
        """Parameter -> canonical name."""
        return {row.parameter: row.name for row in self.rows}

    def tensors(self, *, trainable_only: bool = False) -> dict[str, torch.Tensor]:
        """Canonical name -> tensor, of parameters and persistent buffers, in the order of the model."""
        rows = self.trainable() if trainable_only else self.rows
        found: dict[str, torch.Tensor] = {row.name: row.parameter.detach() for row in rows}
        return found | self.buffers

    def digest(self) -> str:
        """A short text that is equal for models with equal parameter names, shapes and buffers."""
        lines = [f"{name} {list(tensor.shape)}" for name, tensor in sorted(self.tensors().items())]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()

    def counts(self) -> tuple[int, int]:
        """Numbers of elements: all, trainable."""
        return sum(r.parameter.numel() for r in self.rows), sum(r.parameter.numel() for r in self.trainable())


def plain_name(name: str) -> str:
    """The name without what torch.compile puts in."""
    return name.replace("_orig_mod.", "")
