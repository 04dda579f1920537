"""Activations between the ranks of a tensor group: gathered, summed, cut, and the opposite in the backward.

torch's DTensor does the communication; what comes in and goes out are plain tensors. Before editing: the placement of a gradient is part
of the meaning. A whole activation that each rank uses for its part of the work gets partial gradients, which are to be summed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.exceptions import ModelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

SEQUENCE_DIM = 1  # of activations (B, T, ...)


def share(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A whole input that each rank uses for its part of the output: the same, and gradients are summed over the ranks."""
    from torch.distributed.tensor import Partial, Replicate

    return _Move.apply(x, mesh, (Replicate(), Replicate()), (Partial(), Replicate())) if x.requires_grad else x


def gather_sequence(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The whole sequence, of which each rank has a part and from which it computes its part of the output."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    part = Shard(SEQUENCE_DIM)
    return _Move.apply(x, mesh, (part, Replicate()), (Partial(), part))


def gather_sequence_alike(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The whole sequence, of which each rank has a part and with which all of them compute the same."""
    from torch.distributed.tensor import Replicate, Shard

    move = (Shard(SEQUENCE_DIM), Replicate())
    return _Move.apply(x, mesh, move, move[::-1])


def sum_parts(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum over the ranks, on each of them."""
    from torch.distributed.tensor import Partial, Replicate

    return _Move.apply(x, mesh, (Partial(), Replicate()), (Replicate(), Replicate()))


def scatter_sum(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of the sequence in the sum over the ranks."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    num_ranks = mesh.size()
    if x.dim() < 3 or x.shape[SEQUENCE_DIM] % num_ranks:
        raise ModelError(
            f"an activation of shape {tuple(x.shape)} cannot be cut along its sequence over tp={num_ranks} ranks; expected (B, T, ...), "
            f'T a multiple of {num_ranks}. Pad the batches, or take the "sequence" modules out of the plan of parallelize_tensor'
        )
    part = Shard(SEQUENCE_DIM)
    return _Move.apply(x, mesh, (Partial(), part), (part, Replicate()))


class _Move(torch.autograd.Function):
    """Local tensors from one placement to another; and their gradients, whose placements are told apart.

    In place of `from_local(...).redistribute(...).to_local()`: the result is no view, so that a model may change it in place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mesh: DeviceMesh, move: tuple[Placement, Placement], backward: tuple[Placement, Placement]
    ) -> torch.Tensor:
        ctx.mesh, ctx.backward_move = mesh, backward
        return _moved(x, mesh, *move)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _moved(gradient, ctx.mesh, *ctx.backward_move), None, None, None


def _moved(x: torch.Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    if source == target:
        return x.view_as(x)
    return DTensor.from_local(x, mesh, [source], run_check=False).redistribute(placements=[target]).to_local()
