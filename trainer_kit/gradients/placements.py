"""What autograd returned for a DTensor parameter, against what its gradient contract promises.

A gradient has placements of its own: partial sums of a weight whose activations are cut, the whole of one that is a shard. Here it is
brought to the placements of its parameter, or refused with the name. Not here: the sums over ranks, see `synchroniser.py`.
Before editing: placements are metadata and the same on every rank of a mesh, so all of them come to the same verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.layout import is_distributed, is_shard, like
from trainer_kit.parameters import ParameterRow
from trainer_kit.torch_private import local_tensor


def mesh_dims(parameter: torch.Tensor) -> tuple[str, ...]:
    """The names of the dimensions of a DTensor's own mesh; none for a plain tensor."""
    if not is_distributed(parameter):
        return ()
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    return mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))


def dims_to_sum(row: ParameterRow) -> tuple[str, ...]:
    """The mesh dimensions over which its gradient is still to be summed when backward and FSDP are through, in the order of names."""
    # FSDP brings a gradient to the placements of its parameter before it reduces, which sums along the parameter's own dimensions.
    own = mesh_dims(row.parameter) if reduced_by_fsdp(row) else ()
    return tuple(sorted(dim for dim, (kind, size) in row.contracts.items() if kind == "partial" and size > 1 and dim not in own))


def reduced_by_fsdp(row: ParameterRow) -> bool:
    """Whether FSDP makes its gradient."""
    return any(contract.kind == "fsdp" for contract in row.contracts.values())


def summand(row: ParameterRow, view: torch.Tensor) -> torch.Tensor:
    """`view` as the gradient of `row.parameter` while backward adds to it: partial along the dimensions that are summed later.

    Were it declared a whole there, DTensor would sum each addend over the ranks by itself.
    """
    names, dims = mesh_dims(row.parameter), dims_to_sum(row)
    if not set(names) & set(dims):
        return like(row.parameter, view)
    from torch.distributed.tensor import DTensor, Partial

    placements = row.parameter.placements  # type: ignore[attr-defined]
    partial = [Partial() if name in dims else placement for name, placement in zip(names, placements, strict=True)]
    return DTensor.from_local(view, row.parameter.device_mesh, partial, run_check=False)  # type: ignore[attr-defined]


def check_returned(row: ParameterRow, placements: Sequence[Any]) -> None:
    """Raise ModelError if a gradient with these placements does not keep the contract of its parameter."""
    dims = dims_to_sum(row)
    for name, own, returned in zip(mesh_dims(row.parameter), row.parameter.placements, placements, strict=True):  # type: ignore[attr-defined]
        if not returned.is_partial():
            if name not in dims:
                continue
            found = "'partial' is its gradient contract, so it would be added up once per rank"
            fix = "give the parameter the contract 'complete' there, as the activations it works on are the same on all ranks"
        elif name in dims and getattr(returned, "reduce_op", "sum") == "sum" and not is_shard(own):
            continue
        else:
            found = f"its gradient contract is {row.contracts[name].kind!r}" if name in row.contracts else "it has no gradient contract"
            fix = "give a replicated parameter the contract 'partial' there, or redistribute the activations it works on"
        raise ModelError(
            f"autograd returned a gradient of {row.name!r} with the placement {returned} on the mesh dimension {name!r}, where {found}. "
            f"To fix, {fix}; set_contract is called where the parameter is distributed"
        )


def in_place_of(row: ParameterRow, gradient: torch.Tensor) -> torch.Tensor:
    """A DTensor gradient in the placements of its parameter. Raises ModelError if partial sums would have to be added for that."""
    placements = row.parameter.placements  # type: ignore[attr-defined]
    if gradient.placements == placements:  # type: ignore[attr-defined]
        return gradient
    check_returned(row, gradient.placements)  # type: ignore[attr-defined]
    moved = local_tensor(gradient.redistribute(placements=placements))  # type: ignore[attr-defined]
    # A copy, as it may be a part of the whole whose memory is not needed any more, or still under way.
    return like(row.parameter, torch.empty(moved.shape, dtype=moved.dtype, device=moved.device).copy_(moved))
