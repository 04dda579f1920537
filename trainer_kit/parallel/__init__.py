"""Functions that distribute a module over a mesh. Placements and gradient contracts are all that they leave behind.

Inner ones first: tensor parallelism, experts, then the FSDP units from the blocks to the root.
"""

from trainer_kit.mesh.contracts import set_contract
from trainer_kit.parallel.context import SequenceParts, parallelize_context
from trainer_kit.parallel.context_attention import context_attention
from trainer_kit.parallel.default import default_plan
from trainer_kit.parallel.expert import parallelize_expert
from trainer_kit.parallel.expert_dispatch import Dispatch, DispatchBackend
from trainer_kit.parallel.replicate import parallelize_replicate
from trainer_kit.parallel.shard import fsdp_units, parallelize_fsdp, parallelize_hsdp
from trainer_kit.parallel.shard_sync import FSDPSync
from trainer_kit.parallel.tensor import parallelize_tensor

__all__ = [
    "Dispatch",
    "DispatchBackend",
    "FSDPSync",
    "SequenceParts",
    "context_attention",
    "default_plan",
    "fsdp_units",
    "parallelize_context",
    "parallelize_expert",
    "parallelize_fsdp",
    "parallelize_hsdp",
    "parallelize_replicate",
    "parallelize_tensor",
    "set_contract",
]
