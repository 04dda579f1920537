"""A model of uneven shapes, its shards on a mesh, and gradients that are the same whatever the mesh; jobs of several tests use it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trainer_kit import MeshStrategy
from trainer_kit.mesh import DistributedContext
from trainer_kit.mesh.layout import fill
from trainer_kit.optim import Update, build_update
from trainer_kit.optim.provider import OptimizerProvider
from trainer_kit.parameters import ParameterRow, ParameterTable

SHAPES = {
    "embed.weight": (7, 4), "up.weight": (5, 4), "up.bias": (5,), "down.weight": (3, 6), "one.weight": (1, 3), "cube.weight": (4, 2, 3),
}  # fmt: skip
# Per mesh: the dims of the tensors that tp cuts; FSDP cuts dim 0 on top. With 2 and 3 shards "one.weight" is empty on most ranks.
MESHES: dict[str, dict[str, int]] = {
    "fsdp 2": {"dp_shard": 2}, "fsdp 3": {"dp_shard": 3},
    "hsdp 2x2": {"dp_replicate": 2, "dp_shard": 2}, "tp 2 x fsdp 2": {"tp": 2, "dp_shard": 2},
}  # fmt: skip
TP_DIMS = {"embed.weight": 0, "up.weight": 0, "down.weight": 1, "cube.weight": 2}


def values_of(name: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A whole tensor of the shape of a parameter; of one name and seed always the same."""
    generator = torch.Generator().manual_seed(1000 * seed + sorted(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(dtype)


class Model(nn.Module):
    """Only its parameters are used."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name in SHAPES:
            module, parameter = name.split(".")
            if not hasattr(self, module):
                self.add_module(module, nn.Module())
            getattr(self, module).register_parameter(parameter, nn.Parameter(values_of(name, dtype)))


def context_of(degrees: dict[str, int]) -> DistributedContext:
    """The context of this rank."""
    return MeshStrategy(device="cpu", **{"dp_replicate": 1, **degrees}).build()


def rows_of(context: DistributedContext, dtype: torch.dtype, degrees: dict[str, int]) -> list[ParameterRow]:
    """The rows of the model on this rank: cut by tp where the mesh has it, then by FSDP."""
    model = Model(dtype)
    if context.world_size > 1:
        shard(model, context, degrees)
    return ParameterTable([model]).trainable()


def shard(model: nn.Module, context: DistributedContext, degrees: dict[str, int]) -> None:
    """What parallelize functions leave behind, made by torch alone."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = context.mesh_for("dense")
    if degrees.get("tp", 1) > 1:
        for name, dim in TP_DIMS.items():
            owner, parameter = model.get_submodule(name.split(".")[0]), name.split(".")[1]
            cut = distribute_tensor(getattr(owner, parameter).detach(), mesh["tp"], [Shard(dim)], src_data_rank=None)
            owner.register_parameter(parameter, nn.Parameter(cut))
    fully_shard(model, mesh=mesh["dp_replicate", "dp_cp_shard"] if degrees.get("dp_replicate", 1) > 1 else mesh["dp_cp_shard"])


def set_gradients(rows: Iterable[ParameterRow], step: int) -> None:
    """This rank's part of gradients that depend on name and step alone; those of bf16 parameters are fp32."""
    for row in rows:
        row.local.grad_dtype = torch.promote_types(row.local.dtype, torch.float32)
        row.local.grad = values_of(row.name, row.local.grad_dtype, seed=step + 1)[row.layout.box].clone()


def train(update: Update, rows: list[ParameterRow], steps: Iterable[int]) -> None:
    """Some steps."""
    for step in steps:
        set_gradients(rows, step)
        update.step()


def parts_of(rows: list[ParameterRow]) -> dict[str, tuple[tuple[slice, ...], torch.Tensor]]:
    """What this rank holds: by name the box and its values."""
    return {row.name: (row.layout.box, row.local.detach().clone()) for row in rows}


def put(rows: list[ParameterRow], values: dict[str, torch.Tensor]) -> None:
    """Set the parameters from whole ones."""
    with torch.no_grad():
        for row in rows:
            fill(row.parameter, values[row.name])


def trained(provider: OptimizerProvider, dtype: torch.dtype, num_steps: int, degrees: dict[str, int]) -> dict[str, Any]:
    """What this rank holds after some steps on the mesh; without degrees in one process."""
    context = context_of(degrees)
    rows = rows_of(context, dtype, degrees)
    train(build_update(provider, rows, context), rows, range(num_steps))
    return parts_of(rows)
