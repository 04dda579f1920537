"""The parameter table: one row per parameter, read by everything that deals with parameters one by one.

A tied parameter has one row, under its first name in the order of the model; the other names are aliases. Names are global: a
stage numbers its layers as the whole model does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.names import state_tensors


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
        self._stages = list(stages)
        self.rows: list[ParameterRow] = []
        self.buffers: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}  # every second name -> canonical name
        names: dict[torch.Tensor, list[str]] = {}
        stage_of: dict[torch.Tensor, int] = {}
        for index, stage in enumerate(stages):
            for name, tensor in state_tensors(stage):
                names.setdefault(tensor, []).append(name)
                stage_of.setdefault(tensor, index)
        for tensor, (name, *aliases) in names.items():
            self.aliases |= dict.fromkeys(aliases, name)
            if isinstance(tensor, nn.Parameter):
                self.rows.append(ParameterRow(name, tuple(aliases), tensor, stage_of[tensor]))
            else:
                self.buffers[name] = tensor
        self._check_complete(stages)
        self._by_parameter = {row.parameter: row for row in self.rows}

    def _check_complete(self, stages: Sequence[nn.Module]) -> None:
        known = {row.parameter for row in self.rows}
        lost = [name for stage in stages for name, parameter in stage.named_parameters() if parameter not in known]
        if lost:
            raise ModelError(
                f"state_dict() of the model leaves out {', '.join(map(repr, lost[:5]))}: these parameters could not be saved or exported. "
                "Usual cause: a state-dict hook that drops or renames entries; register it after training, or export through a mapper"
            )

    def extra_states(self) -> dict[str, nn.Module]:
        """Name -> module, for the modules with `get_extra_state`, which a checkpoint keeps too."""
        own = nn.Module.get_extra_state
        named = (item for stage in self._stages for item in stage.named_modules())
        return {name: module for name, module in named if type(module).get_extra_state is not own}

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

    def shapes(self) -> list[tuple[str, torch.Size]]:
        """Name and shape of every tensor of the state, which tell one model from another."""
        return [(name, tensor.shape) for name, tensor in self.tensors().items()]

    def counts(self) -> tuple[int, int]:
        """Numbers of elements: all, trainable."""
        return sum(r.parameter.numel() for r in self.rows), sum(r.parameter.numel() for r in self.trainable())
