"""The step of the build that lays a model out over the mesh: what must be true before it, and what it must leave as it was.

The provider's `parallelize_model_stage` does the work. Before editing: it runs before memory is allocated, so an error here costs
nothing; torch makes new parameter objects when it distributes, without what was written onto the old ones.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.context import DistributedContext
from trainer_kit.mesh.layout import as_bytes, is_distributed, is_shard, layout_of
from trainer_kit.model.allocate import check_aliases
from trainer_kit.model.provider import CallableProvider, ModelProvider, ModuleProvider, StageContext
from trainer_kit.names import alias_table, all_tensors


def distribute(ctx: StageContext, provider: ModelProvider) -> None:
    """Run the provider's `parallelize_model_stage`. A module or callable that gave DTensors was distributed by its author, and stays so.

    Raises ModelError for parameters that come out in a way that nothing here could initialise, synchronise or save.
    """
    module = ctx.built()
    aliases = alias_table(module)
    before = {name: (tuple(parameter.shape), dict(vars(parameter))) for name, parameter in module.named_parameters()}
    if not (has_distributed(module) and isinstance(provider, (ModuleProvider, CallableProvider))):
        provider.parallelize_model_stage(ctx)
    check_aliases(module, aliases)
    for name, parameter in module.named_parameters():
        if name in before:
            _carry_over(name, parameter, *before[name])
    for name, tensor in all_tensors(module):
        if is_distributed(tensor):
            _check_placements(name, tensor)


def has_distributed(module: nn.Module) -> bool:
    """Whether any parameter or buffer is a DTensor."""
    return any(is_distributed(tensor) for _, tensor in all_tensors(module))


def _carry_over(name: str, parameter: nn.Parameter, shape: tuple[int, ...], attributes: dict[str, Any]) -> None:
    if tuple(parameter.shape) != shape:
        raise ModelError(
            f"parallelize_model_stage changed the shape of {name!r} from {shape} to {tuple(parameter.shape)}; a distributed parameter "
            "keeps its global shape. Usual cause: a local part was assigned in place of the DTensor; use distribute_tensor, or "
            "DTensor.from_local, which gives it the whole shape"
        )
    for attribute, value in attributes.items():
        if attribute not in vars(parameter):
            setattr(parameter, attribute, value)


def _check_placements(name: str, tensor: Any) -> None:
    try:
        layout_of(tensor)
    except ModelError as error:
        raise ModelError(f"{name!r} cannot be kept as it was distributed: {error}") from None
    for dim, size in enumerate(tensor.shape):
        cuts = [tensor.device_mesh.size(axis) for axis, placement in enumerate(tensor.placements) if _cuts(placement, dim, tensor.ndim)]
        if dim > 0 and size % math.prod(cuts):
            raise ModelError(
                f"{name!r} of shape {tuple(tensor.shape)} is cut into {math.prod(cuts)} parts along dim {dim}, which does not divide; only "
                "dim 0 may be uneven. Change the size, the degree of parallelism in MeshStrategy, or the plan that cuts it along this dim"
            )


def _cuts(placement: Any, dim: int, num_dims: int) -> bool:
    return is_shard(placement) and placement.dim % num_dims == dim


def broadcast_values(module: nn.Module, context: DistributedContext) -> None:
    """Give every rank the values of the first one of its stage, tensor by tensor: each rank loaded or drew its own. Plain tensors only; a
    collective."""
    import torch.distributed as dist

    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in all_tensors(module):
        tensors.setdefault(id(tensor), (name, tensor.detach()))
    _check_same([(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.values()], context)
    group = context.stage_group
    for _, tensor in tensors.values() if group is not None else ():
        if tensor.numel():
            values = tensor.contiguous()
            dist.broadcast(as_bytes(values), group=group, group_src=0)
            if values is not tensor:
                tensor.copy_(values)


def _check_same(tensors: list[tuple[str, str, tuple[int, ...]]], context: DistributedContext) -> None:
    """Tensors that differ in number or size would make the ranks wait for each other for ever."""
    place = context.pipeline_rank  # each has stages of its own
    found = context.host.exchange((place, hashlib.sha256(repr(tensors).encode()).hexdigest()))
    if len(set(found)) == len({place for place, _ in found}):
        return
    first: dict[int, tuple[int, list[tuple[str, str, tuple[int, ...]]]]] = {}
    for rank, (stages, theirs) in enumerate(context.host.exchange((place, tensors))):
        known_rank, known = first.setdefault(stages, (rank, theirs))
        if theirs != known:
            differing = [f"{name} {dtype} {list(shape)}" for name, dtype, shape in sorted(set(known) ^ set(theirs))]
            raise ModelError(
                f"ranks {known_rank} and {rank} were given models that differ: {', '.join(differing[:4]) or 'the order of their tensors'}; "
                "the same script must build the same module on every rank"
            )
