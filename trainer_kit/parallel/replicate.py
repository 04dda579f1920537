"""Replicas: every rank holds all of the parameters and other data. The gradient synchroniser sums what the ranks computed.

Not here: any communication. The parameters stay the objects they are, so this works on top of any other distribution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.contracts import is_of_expert, set_contract

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


def parallelize_replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Say that each rank along the dimensions of `mesh` computes gradients from data of its own, which are to be summed.

    Parameters that `parallelize_expert` distributed are left alone.
    """
    check_dimensions(mesh, "parallelize_replicate")
    for parameter in module.parameters():
        if not is_of_expert(parameter):
            set_contract(parameter, mesh, "partial")


def check_dimensions(mesh: DeviceMesh, function: str, num_dims: int | None = None) -> None:
    """Raise ConfigurationError if the dimensions of a mesh have no names, by which contracts are kept, or are not `num_dims`."""
    names = mesh.mesh_dim_names
    if not names or (num_dims is not None and len(names) != num_dims):
        expected = "a mesh with named dimensions" if num_dims is None else f"a mesh of {num_dims} named dimension{'s' * (num_dims > 1)}"
        raise ConfigurationError(
            f"{function}(mesh=...) got a mesh of shape {tuple(mesh.shape)} with the dimensions {names}, expected {expected}; take a slice "
            'of a domain, such as ctx.mesh("dense")["dp_cp_shard"]'
        )
