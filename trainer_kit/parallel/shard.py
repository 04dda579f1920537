"""FSDP and HSDP: parameters, gradients and optimizer state are cut over the data ranks and gathered unit by unit, by torch's `fully_shard`.

Not here: when gradients are reduced within a pack (`shard_sync.py`). Before editing: `fully_shard` puts new objects in the place of the
parameters, so what was written onto the old ones is carried over here; and its reduction is a mean unless each unit is told otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.contracts import is_of_expert, set_contract
from trainer_kit.names import alias_table
from trainer_kit.parallel.replicate import check_dimensions
from trainer_kit.torch_private import fsdp_modules, without_views

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


def parallelize_fsdp(
    module: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool | int = True, policy: MixedPrecisionPolicy | None = None
) -> None:
    """Make `module` one FSDP unit over a mesh of one named dimension. Blocks first, the root last; units inside are left alone.

    reshard_after_forward: whether the whole parameters are freed between forward and backward; an int, as for `fully_shard`, shards them
    over that many ranks meanwhile.
    policy: dtypes of computation and reduction, such as `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`;
    None gathers parameters and reduces gradients in their own dtype. With precision="bf16-mixed" that is fp32 and autocast does the
    casting, as on one process; a policy in its place halves what is gathered, and keeps no second copy of the weights for the backward.

    Raises ModelError for parameters that cannot be in one unit.
    """
    check_dimensions(mesh, "parallelize_fsdp", 1)
    _shard(module, mesh, reshard_after_forward, policy)


def parallelize_hsdp(
    module: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool | int = True, policy: MixedPrecisionPolicy | None = None
) -> None:
    """`parallelize_fsdp` over a mesh of two dimensions (replicate, shard): cut over the second, summed over both."""
    check_dimensions(mesh, "parallelize_hsdp", 2)
    _shard(module, mesh, reshard_after_forward, policy)


def fsdp_units(module: nn.Module) -> list[Any]:
    """The FSDP units in a module, itself first if it is one."""
    return fsdp_modules(module)


def _shard(module: nn.Module, mesh: DeviceMesh, reshard_after_forward: bool | int, policy: MixedPrecisionPolicy | None) -> None:
    if module in fsdp_units(module):
        raise ModelError(
            f"this {type(module).__name__} is an FSDP unit already; call parallelize_fsdp or parallelize_hsdp once per module, and build a "
            "new model for a new Trainer on a mesh: pass a callable rather than the module"
        )
    aliases, before = alias_table(module), dict(module.named_parameters(remove_duplicate=False))
    _check_contiguous(before)
    # fully_shard cannot cut a parameter without dims. It stays whole, and the synchroniser sums its gradient.
    scalars = {parameter for parameter in before.values() if parameter.dim() == 0}
    ignored = scalars | {parameter for parameter in before.values() if is_of_expert(parameter)}
    for unit in [*_units_of_other_dtypes(module, ignored), module]:
        _make_unit(unit, mesh, reshard_after_forward, policy, ignored)
    for parameter in scalars:
        set_contract(parameter, mesh, "partial")
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter is not before[name]:
            _carry_over(before[name], parameter)
            set_contract(parameter, mesh, "fsdp")
    _check_ties(module, aliases)


def _make_unit(
    unit: nn.Module, mesh: DeviceMesh, reshard_after_forward: bool | int, policy: MixedPrecisionPolicy | None, ignored: set[nn.Parameter]
) -> None:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    unit.register_forward_hook(_return_no_views)  # before the hook of FSDP
    fully_shard(
        unit,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=policy or MixedPrecisionPolicy(),
        ignored_params=ignored,
    )
    unit.register_forward_hook(_reshard_after_inference)  # after it
    assert isinstance(unit, FSDPModule)
    # Sums everywhere: the one division is by the weight of the pack. gloo has no other reduction, and torch passes neither on to children.
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    # Ranks that use other parameters of a unit must not reduce different sets of them.
    unit.set_reduce_scatter_unused_params(True, recurse=False)


def _return_no_views(_module: nn.Module, _args: Any, output: Any) -> Any:
    """FSDP gathers parameters for the backward in a hook on the outputs, which an in-place change of a view takes off without a word.

    So a view is copied. It costs little: the usual one is that of a linear layer with a bias, which computed for longer.
    """
    return without_views(output) if torch.is_grad_enabled() else None


def _reshard_after_inference(unit: Any, _args: Any, _output: Any) -> None:
    """Without a backward nothing else would free the whole parameters, and the next forward would take them, however the shards changed."""
    if not torch.is_grad_enabled():
        unit.reshard()


def _carry_over(old: nn.Parameter, new: nn.Parameter) -> None:
    """What was written onto a parameter object, contracts among it, moves to the one in its place; not the marks of FSDP itself."""
    for name, value in vars(old).items():
        if not name.startswith("_fsdp"):
            vars(new).setdefault(name, value)


def _units_of_other_dtypes(module: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """The parts of a unit that must be units of their own, since FSDP reduces the gradients of one unit in one dtype."""
    sizes: Counter[torch.dtype] = Counter()
    for _, parameter in _trainable(module, ignored):
        sizes[parameter.dtype] += parameter.numel()
    if len(sizes) < 2:
        return []
    ((usual, _),) = sizes.most_common(1)
    return list(_find_units(module, "", usual, ignored))


def _find_units(module: nn.Module, prefix: str, usual: torch.dtype, ignored: set[nn.Parameter]) -> Iterator[nn.Module]:
    dtypes = {parameter.dtype for _, parameter in _trainable(module, ignored)}
    if dtypes <= {usual}:
        return
    is_called = type(module).forward is not nn.Module.forward  # a ModuleList is not, so no hook would gather its parameters
    if len(dtypes) == 1 and prefix and is_called:
        yield module
        return
    own = [f"{prefix}{name}" for name, parameter in _own_trainable(module, ignored) if parameter.dtype != usual]
    if own:
        raise ModelError(
            f"{type(module).__name__} {prefix[:-1]!r} holds trainable parameters of other dtypes than the {usual} of its FSDP unit: "
            f"{', '.join(own)}. FSDP reduces one dtype per unit; give them that dtype, or put them into a module of their own"
        )
    for name, child in module.named_children():
        if not _is_unit(child):
            yield from _find_units(child, f"{prefix}{name}.", usual, ignored)


def _trainable(module: nn.Module, ignored: set[nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
    """The trainable parameters of a unit: those of the module and its children, without the units inside."""
    yield from _own_trainable(module, ignored)
    for child in module.children():
        if not _is_unit(child):
            yield from _trainable(child, ignored)


def _own_trainable(module: nn.Module, ignored: set[nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
    return (item for item in module.named_parameters(recurse=False) if item[1].requires_grad and item[1] not in ignored)


def _is_unit(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _check_contiguous(parameters: dict[str, nn.Parameter]) -> None:
    if scattered := [name for name, parameter in parameters.items() if not parameter.is_contiguous()]:
        raise ModelError(
            f"the memory of {', '.join(map(repr, scattered[:5]))} is not contiguous, which FSDP cannot cut; build them as "
            "nn.Parameter(tensor.contiguous()). Usual causes: a transposed tensor, or memory_format=torch.channels_last"
        )


def _check_ties(module: nn.Module, aliases: dict[str, str]) -> None:
    if untied := [name for name in aliases if alias_table(module).get(name) != aliases[name]]:
        raise ModelError(
            f"{untied[0]!r} and {aliases[untied[0]]!r} are one tied parameter, but lie in different FSDP units; do not make a unit of the "
            "module that holds one of them, so that both are in the unit of the module around them"
        )
