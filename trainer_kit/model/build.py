"""`build_stage`: from a provider to a model on its device, with initial values.

The order is fixed: construct, distribute, allocate, initialise, check. A module that has weights already is moved, gets the values of
rank 0 on every rank, and is distributed. The build leaves the global random streams as they were; what a constructor draws itself is a
function of the seed too, so all ranks draw the same. Not here: loading a model state, which comes after.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.team import Team
from trainer_kit.model.allocate import allocate, check_aliases, set_parameter_dtype
from trainer_kit.model.constructor_log import ConstructorLog, check_repeated
from trainer_kit.model.distribute import broadcast_values, distribute, has_distributed
from trainer_kit.model.initialise import initialise
from trainer_kit.model.operations import storage_key, tensors_in
from trainer_kit.model.provider import ModelProvider, ModuleProvider, StageContext, StageInfo, as_model_provider
from trainer_kit.model.torch_init import trunc_normal_replaced
from trainer_kit.names import alias_table, all_tensors
from trainer_kit.random_state import derive_seed, forked, seed_all
from trainer_kit.torch_private import fsdp_modules, settle_fsdp_memory, written_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_kit.mesh.context import DistributedContext


def build_stage(
    provider: ModelProvider | nn.Module | Callable[..., nn.Module],
    context: DistributedContext,
    stage: StageInfo | None = None,
    *,
    seed: int,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The model of one stage on `context.device`, this rank's part of it. `dtype`: that of its floating parameters; buffers keep theirs.

    A model whose parameters are all on a real device has weights, which are kept: a module given as it is, or a callable that
    loads one. Any other comes from the meta device and gets initial values from its `reset_parameters` methods, the same on any mesh.
    A module or callable that gives DTensors has distributed its model itself, which is taken as it is. With several ranks a collective.
    """
    provider = as_model_provider(provider)
    ctx = StageContext(context, stage or StageInfo())
    if isinstance(provider, ModuleProvider):
        ctx.module = provider.initialize_model_stage(ctx)
        _place(ctx, provider, dtype)
    else:
        with forked(context.device):
            seed_all(derive_seed(seed, "constructor"), context.device)
            _build(ctx, provider, seed, dtype)
    _check_places(ctx.built(), context.device)
    return ctx.built()


def _build(ctx: StageContext, provider: ModelProvider, seed: int, dtype: torch.dtype | None) -> None:
    log = ConstructorLog()
    if not _construct_everywhere(ctx, provider, log):
        _place(ctx, provider, dtype)
        return
    module = ctx.built()
    _check_memory(module)
    aliases = alias_table(module)
    dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
    # A tied weight is filled by its first owner, whoever filled it in the constructor.
    constructed = {name: log.writes_to(p) for name, p in module.named_parameters() if name not in aliases.values()}
    set_parameter_dtype(module, dtype)  # FSDP and DTensors keep the dtype that they were made with
    distribute(ctx, provider)
    ready = allocate(module, ctx.context.device, dtype)
    records = initialise(module, seed, ctx.context.device, dtypes=dtypes, ready=ready)
    check_repeated(constructed, records, written_class(module).__name__)
    check_aliases(module, aliases)


def _construct_everywhere(ctx: StageContext, provider: ModelProvider, log: ConstructorLog) -> bool:
    """Construct the module; whether it is on the meta device. If that fails for one stage of a pipeline, all ranks raise the error."""
    context = ctx.context

    def construct() -> bool | None:
        try:
            ctx.module = _construct(ctx, provider, log)
            return _is_on_meta(ctx.module)
        except Exception as error:
            if context.num_pipeline_ranks > 1:
                context.failures.tell(error)  # should another constructor be in a collective
            raise

    if context.num_pipeline_ranks == 1:
        return bool(construct())
    team = Team.of(context)
    on_meta = team.everywhere(construct)
    kinds = team.exchange((ctx.stage.index, on_meta))
    if {True, False} <= {kind for _, kind in kinds}:
        loaded, empty = (sorted({stage for stage, kind in kinds if kind is wanted}) for wanted in (False, True))
        raise ModelError(
            f"the stages {loaded} have weights, and the stages {empty} are on the meta device; expected all of one kind. Build all of them "
            "without a device= argument and load the weights with source_model="
        )
    return bool(on_meta) if on_meta is not None else any(kind for _, kind in kinds)


def _construct(ctx: StageContext, provider: ModelProvider, log: ConstructorLog) -> nn.Module:
    try:
        with trunc_normal_replaced(log.truncated_normal), torch.device("meta"), log:
            module = provider.initialize_model_stage(ctx)
    except Exception as error:
        if "meta" in str(error):
            error.add_note(
                "trainer_kit builds the model of a callable on the meta device, where tensors have no values; compute numbers that the "
                "constructor reads (.item(), .tolist(), tests of tensors) with python's math or with device='cpu', or pass a built "
                "nn.Module"
            )
        raise
    if not isinstance(module, nn.Module):
        raise ModelError(f"{type(provider).__name__}.initialize_model_stage returned {type(module).__name__}, expected an nn.Module")
    _check_lazy(module)
    return module


def _is_on_meta(module: nn.Module) -> bool | None:
    """Whether the model needs memory and values; an error if only a part of its parameters does. None: it has no tensors."""
    meta = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    real = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    if not meta and not real:
        buffers = list(module.buffers())
        return any(buffer.is_meta for buffer in buffers) if buffers else None
    if meta and real:
        raise ModelError(
            f"the callable's model has parameters with weights ({_few(real)}) and parameters on the meta device ({_few(meta)}); expected "
            "all of one kind. Build all of it in the callable without a device= argument and load the weights with source_model=, or "
            "pass a built nn.Module"
        )
    return bool(meta)


def _place(ctx: StageContext, provider: ModelProvider, dtype: torch.dtype | None) -> None:
    """A model that has weights: move it, keep its values. One that was distributed already is on its device."""
    module, context = ctx.built(), ctx.context
    _check_lazy(module)
    for unit in fsdp_modules(module):
        unit.reshard()  # after a forward, the root may have been left with whole parameters
    if empty := [name for name, tensor in all_tensors(module) if tensor.is_meta]:
        raise ModelError(
            f"{written_class(module).__name__} has tensors on the meta device, which have no values: {_few(empty)}; load or initialise "
            "them before, or pass a callable that builds the model, so that it is allocated and initialised here"
        )
    is_distributed = has_distributed(module)
    if not is_distributed:
        module.to(context.device)
    set_parameter_dtype(module, dtype)
    if context.world_size > 1 and not is_distributed:
        broadcast_values(module, context)
    distribute(ctx, provider)
    settle_fsdp_memory(module)


def _check_lazy(module: nn.Module) -> None:
    if lazy := [name for name, tensor in all_tensors(module) if is_lazy(tensor)]:
        raise ModelError(
            f"{written_class(module).__name__} has parameters without a shape: {_few(lazy)}; lazy modules get theirs from the first "
            "forward. Run one forward with a sample input and pass that module, or give the sizes (nn.Linear in place of nn.LazyLinear)"
        )


def _check_memory(module: nn.Module) -> None:
    """Parameters that share memory without being one object would be torn apart when they are allocated."""
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in all_tensors(module):
        other, known = first.setdefault(storage_key(tensor), (name, tensor))
        if known is not tensor:
            raise ModelError(
                f"{other!r} and {name!r} share memory but are two tensors; tie them by assigning the same nn.Parameter: "
                "self.head.weight = self.embedding.weight"
            )


def _check_places(module: nn.Module, device: torch.device) -> None:
    if astray := [f"{name} on {tensor.device}" for name, tensor in all_tensors(module) if tensor.device.type != device.type]:
        raise ModelError(f"{written_class(module).__name__} was built on {device}, but some of its tensors are elsewhere: {_few(astray)}")
    for name, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            held = tuple(value.values()) if isinstance(value, dict) else (value,)
            if any(tensor.is_meta for tensor in tensors_in(held, {})):
                raise ModelError(
                    f"{written_class(owner).__name__} {name!r} keeps a tensor in the plain attribute {attribute!r}, made on the meta "
                    f"device, so it has no values; use self.register_buffer({attribute!r}, ..., persistent=False) and compute it in "
                    "reset_parameters"
                )


def _few(names: Iterable[str], limit: int = 5) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
