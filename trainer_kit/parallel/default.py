"""`default_plan`: how a model is laid out whose provider does not say.

Tensor parallelism and experts as the model describes them, then FSDP per repeated block and the root last, or replicas. Before editing:
afterwards every parameter has a contract along every dimension with several ranks, of the dense domain, or of that of experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from trainer_kit.exceptions import UnsupportedError
from trainer_kit.parallel.blocks import repeated_blocks
from trainer_kit.parallel.context import SequenceParts, parallelize_context
from trainer_kit.parallel.expert import parallelize_expert
from trainer_kit.parallel.replicate import parallelize_replicate
from trainer_kit.parallel.shard import parallelize_fsdp, parallelize_hsdp
from trainer_kit.parallel.tensor import parallelize_tensor

if TYPE_CHECKING:
    from trainer_kit.model.provider import StageContext


def default_plan(ctx: StageContext, *, policy: Any = None) -> None:
    """Distribute the module of a stage over the dense domain.

    tp > 1: the module has a method `tensor_plan(num_ranks)`, which gives the plan of `parallelize_tensor`.
    cp_shard, cp_replicate > 1: its attention has a method that `parallelize_context` calls; FSDP and replicas are over these ranks too.
    ep > 1: the module has a method `expert_modules()`, which gives the layers of `parallelize_expert`.
    dp_shard > 1: FSDP, or HSDP with dp_replicate > 1; `policy` is its MixedPrecisionPolicy. dp_replicate alone: replicas.
    """
    module, mesh = ctx.built(), ctx.mesh("dense")
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    if sizes["tp"] > 1:
        if not callable(plan := getattr(module, "tensor_plan", None)):
            raise UnsupportedError(
                f"MeshStrategy(tp={sizes['tp']}) needs to know which modules of {type(module).__name__} are cut. Give it a method "
                "tensor_plan(self, num_ranks) that returns the plan of trainer_kit.parallel.parallelize_tensor, write "
                "parallelize_model_stage in a ModelProvider, or set tp=1"
            )
        parallelize_tensor(module, mesh["tp"], plan(sizes["tp"]))
    if ctx.context.strategy.ep > 1:
        _share_out_experts(module, ctx.mesh("expert"), policy)
    if (parts := SequenceParts.of(ctx.context)) is not None:
        parallelize_context(module, parts, attention=ctx.context.strategy.context_attention or "auto")
    if sizes["cp_replicate"] > 1:
        parallelize_replicate(module, mesh["cp_replicate"])
    if sizes["dp_cp_shard"] > 1:
        _shard(module, mesh, sizes["dp_replicate"] > 1, policy)
    elif sizes["dp_replicate"] > 1:
        parallelize_replicate(module, mesh["dp_replicate"])


def _share_out_experts(module: nn.Module, mesh: Any, policy: Any) -> None:
    """A stage may have no experts; that the model has some is checked when all stages are built."""
    layers = getattr(module, "expert_modules", list)
    for layer in layers():
        parallelize_expert(layer, mesh, policy=policy)


def _shard(module: nn.Module, mesh: Any, is_replicated: bool, policy: Any) -> None:
    function = parallelize_hsdp if is_replicated else parallelize_fsdp
    dense = mesh["dp_replicate", "dp_cp_shard"] if is_replicated else mesh["dp_cp_shard"]
    for block in _separable_blocks(module):
        function(block, dense, policy=policy)
    # The backward begins in the root, right after its forward ended: freeing what it needs would only gather it again.
    function(module, dense, reshard_after_forward=False, policy=policy)


def _separable_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks that share no parameter with anything outside of them, and run as modules."""
    blocks = [block for _, block in repeated_blocks(module)]
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    inside: dict[nn.Module, nn.Module] = {part: block for block in blocks for part in block.modules()}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(inside.get(owner, module))
    shared = {block for found in owners.values() if len(found) > 1 for block in found}
    return [block for block in blocks if block not in shared and type(block).forward is not nn.Module.forward]
