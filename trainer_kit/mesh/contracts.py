"""Gradient contracts: what is left to be done for the gradient of a parameter along each mesh dimension.

The parallelize functions set them, the gradient synchroniser and the norm read them. Placements alone do not say it: a weight that is
replicated over tensor ranks has a complete gradient where its activations are replicated, and a partial one where they are cut.
Before editing: a contract is written onto the parameter object, so whoever replaces that object must carry it over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from trainer_kit.exceptions import ModelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Kind = Literal["complete", "partial", "fsdp"]
_ATTRIBUTE = "trainer_kit_gradient_contract"


class Contract(NamedTuple):
    """Along one mesh dimension of `size` ranks: "complete" (nothing to do), "partial" (the synchroniser sums it), "fsdp" (FSDP sums it)."""

    kind: Kind
    size: int


Contracts = Mapping[str, Contract]  # by the name of the mesh dimension


def contracts_of(parameter: torch.Tensor) -> Contracts:
    """The contracts of a parameter by mesh dimension; empty if nobody set one."""
    return getattr(parameter, _ATTRIBUTE, {})


def set_contract(parameter: torch.Tensor, mesh: DeviceMesh, kind: Kind) -> None:
    """Say for every dimension of `mesh`, which must be named, how the gradient of `parameter` comes out of a backward.

    Raises ModelError if another contract was set for a dimension before.
    """
    known = dict(contracts_of(parameter))
    for name in mesh.mesh_dim_names or ():
        contract = Contract(kind, mesh.size((mesh.mesh_dim_names or ()).index(name)))
        if known.setdefault(name, contract) != contract:
            raise ModelError(
                f"a parameter of shape {tuple(parameter.shape)} has the gradient contract {known[name].kind!r} along {name!r} and was to "
                f"get {kind!r}; it was distributed twice along this dimension"
            )
    setattr(parameter, _ATTRIBUTE, known)


def clear_contracts(parameter: torch.Tensor) -> None:
    """Forget all contracts of a parameter, which is to be distributed over another domain."""
    vars(parameter).pop(_ATTRIBUTE, None)


def is_of_expert(parameter: torch.Tensor) -> bool:
    """Whether a parameter lies on the expert domain, so that the functions for the dense one leave it alone."""
    return "ep" in contracts_of(parameter)


def missing_dimensions(contracts: Contracts, sizes: Mapping[str, int]) -> list[str]:
    """The mesh dimensions (name -> size) along which nothing is said about a gradient; empty if all ranks are accounted for."""
    if math.prod(contract.size for contract in contracts.values()) == math.prod(sizes.values()):
        return []
    return [name for name, size in sizes.items() if size > 1 and name not in contracts]
