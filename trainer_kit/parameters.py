"""The parameter table: one row per parameter, read by everything that deals with parameters one by one.

A row tells where its parameter lies (`layout`), what its gradient still needs along each mesh dimension (`contracts`), and gives the
local tensor that optimizers, norms and finite checks work on (`local`).

A tied parameter has one row, under its first name in the order of the model; the other names are aliases. Names are global: a
stage numbers its layers as the whole model does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.contracts import Contracts, contracts_of, missing_dimensions
from trainer_kit.mesh.layout import Layout, is_distributed, layout_of, like, local_of
from trainer_kit.names import state_tensors


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter: its canonical name, its other names, the tensor, and the stage that holds it.

    local: the part of this rank, a parameter of its own that shares the storage; `parameter` itself if that is plain.
    """

    name: str
    aliases: tuple[str, ...]
    parameter: nn.Parameter
    stage: int
    local: nn.Parameter
    layout: Layout
    contracts: Contracts

    @property
    def trainable(self) -> bool:
        """Whether it gets gradients."""
        return self.parameter.requires_grad

    def laid_out(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape of `self.local` as the whole that it is a part of: a DTensor around its memory if the parameter is one."""
        return like(self.parameter, local)

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of this rank, sharing memory, of a tensor that is whole or laid out as the parameter is."""
        return local_of(tensor) if is_distributed(tensor) else tensor.detach()[self.layout.box]


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
                row = ParameterRow(
                    name, tuple(aliases), tensor, stage_of[tensor], _local_parameter(tensor), layout_of(tensor), contracts_of(tensor)
                )
                self.rows.append(row)
            else:
                self.buffers[name] = tensor
        self._check_complete(stages)

    def _check_complete(self, stages: Sequence[nn.Module]) -> None:
        known = {row.parameter for row in self.rows}
        lost = [name for stage in stages for name, parameter in stage.named_parameters() if parameter not in known]
        if lost:
            raise ModelError(
                f"state_dict() of the model leaves out {', '.join(map(repr, lost[:5]))}: these parameters could not be saved or exported. "
                "Usual cause: a state-dict hook that drops or renames entries; register it after training, or export through a mapper"
            )

    def check_contracts(self, sizes: Mapping[str, int]) -> None:
        """Raise ModelError for a trainable parameter whose gradient nobody would bring together along a mesh dimension.

        sizes: the ranks along each dimension of the dense domain that training data or tensors are cut over.
        """
        lost = {row.name: dims for row in self.trainable() if (dims := missing_dimensions(row.contracts, sizes))}
        if lost:
            name, dims = next(iter(lost.items()))
            raise ModelError(
                f"{len(lost)} trainable parameters, such as {name!r}, are plain tensors along the mesh dimensions {', '.join(dims)}: "
                "nothing would bring their gradients together. In parallelize_model_stage, give the modules that own them to "
                "parallelize_replicate, parallelize_fsdp, parallelize_hsdp or parallelize_tensor, or freeze them with requires_grad_(False)"
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


def _local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    if not is_distributed(parameter):
        return parameter
    return nn.Parameter(local_of(parameter), requires_grad=parameter.requires_grad)
