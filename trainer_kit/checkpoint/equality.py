"""Whether plain tensors are the same on all ranks, before a save takes those of any one of them for all.

Not a proof for large tensors, of which a sample is compared: it is there to find state that is kept per rank by mistake, which differs
everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from trainer_kit.exceptions import CheckpointError
from trainer_kit.mesh.context import DistributedContext
from trainer_kit.mesh.layout import is_distributed
from trainer_kit.weights.format import tensor_crc32

SAMPLE = 4096  # elements; smaller tensors are compared whole


def check_equal_on_ranks(tensors: Mapping[str, torch.Tensor], context: DistributedContext) -> None:
    """Raise CheckpointError, on every rank, for a plain tensor that differs between ranks or that rank 0 does not have. A collective."""
    if context.world_size == 1:
        return
    mine = {name: _digest(tensor) for name, tensor in sorted(tensors.items()) if not is_distributed(tensor)}
    if len(set(context.host.exchange(zlib.crc32(repr(mine).encode())))) == 1:
        return
    of_ranks, ranks_per_stage = context.host.exchange(mine), context.world_size // context.num_pipeline_ranks
    known: dict[str, tuple[int, int]] = {}  # by name, the first rank that has it
    for rank, found in enumerate(of_ranks):
        first = rank - rank % ranks_per_stage  # of the same stage
        for name, digest in found.items():
            known_rank, known_digest = known.setdefault(name, (rank, digest))
            if digest != known_digest or name not in of_ranks[first]:
                how = f"differs from that on rank {known_rank}" if digest != known_digest else f"is not there on rank {first}"
                raise CheckpointError(
                    f"{name} on rank {rank} {how}, and a checkpoint holds one tensor for all ranks. In state_dict(), reduce it over the "
                    "ranks, or put the rank into its key"
                )


def _digest(tensor: torch.Tensor) -> int:
    step = -(-tensor.numel() // SAMPLE)
    sample = tensor.detach().reshape(-1)[::step] if step > 1 else tensor
    return tensor_crc32(sample, zlib.crc32(repr((tensor.dtype, tuple(tensor.shape))).encode()))
