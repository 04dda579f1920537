"""Memory for a model on the meta device: each tensor is allocated once, and every name of it leads to the same object again.

Of a distributed tensor only the part of this rank is allocated, in the memory that FSDP will use from then on. Not here: values
(`initialise.py`). Before editing: `to_empty` makes a new object per name, which unties tied weights, and drops what was written onto a
parameter object; some modules (the RNNs) must see it called to renew what they derive from their parameters.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.layout import is_distributed, like, local_of
from trainer_kit.names import alias_table, all_tensors, direct_tensors
from trainer_kit.torch_private import settle_fsdp_memory

_Found = list[tuple[str, torch.Tensor]]  # what a module holds itself, by attribute


def allocate(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> set[str]:
    """Replace the meta tensors of `module` by uninitialised ones on `device`; floating parameters in `dtype`, if given.

    Tensors with values (buffers made from files or numpy) keep them. Gives their names.
    """
    aliases = alias_table(module)
    ready = {name for name, tensor in all_tensors(module) if not tensor.is_meta}
    set_parameter_dtype(module, dtype)
    placed: dict[int, torch.Tensor] = {}
    originals: list[torch.Tensor] = []  # kept until the end, so that no id is used twice
    for owner in module.modules():
        found = direct_tensors(owner)
        originals += [original for _, original in found]
        if any(is_distributed(original) for _, original in found):
            _place_each(owner, found, placed, device, dtype)
        else:
            _place_by_to_empty(owner, found, placed, device)
    settle_fsdp_memory(module)
    check_aliases(module, aliases)
    return ready


def _place_by_to_empty(owner: nn.Module, found: _Found, placed: dict[int, torch.Tensor], device: torch.device) -> None:
    values = {name: tensor.detach().clone() for name, tensor in found if not tensor.is_meta}
    owner.to_empty(device=device, recurse=False)
    for name, original in found:
        if id(original) in placed:
            setattr(owner, name, placed[id(original)])
            continue
        tensor = placed[id(original)] = getattr(owner, name)
        if tensor is not original and isinstance(tensor, nn.Parameter):
            vars(tensor).update(vars(original))
        if name in values:
            tensor.copy_(values[name])


def _place_each(
    owner: nn.Module, found: _Found, placed: dict[int, torch.Tensor], device: torch.device, dtype: torch.dtype | None
) -> None:
    """Without `to_empty`, which would swap the inside of DTensors."""
    for name, original in found:
        if id(original) not in placed:
            placed[id(original)] = _in_memory(original, device, dtype)
        setattr(owner, name, placed[id(original)])


def _in_memory(original: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    if not original.is_meta and original.device == device:
        return original
    is_parameter = isinstance(original, nn.Parameter)
    stored = dtype if dtype is not None and is_parameter and original.is_floating_point() else original.dtype
    local = local_of(original)
    memory = torch.empty_like(local, device=device, dtype=stored) if original.is_meta else local.to(device)
    tensor = like(original, memory)
    if not is_parameter:
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=original.requires_grad)
    vars(parameter).update(vars(original))
    return parameter


def set_parameter_dtype(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Store the floating parameters in `dtype`; buffers keep theirs (tables and counters need their precision).

    Distributed ones without memory get it when they are allocated. Raises ModelError for those that have values.
    """
    for name, parameter in module.named_parameters():
        if dtype is None or not parameter.is_floating_point() or parameter.dtype == dtype:
            continue
        if not is_distributed(parameter):
            parameter.data = parameter.data.to(dtype)
        elif not parameter.is_meta:
            raise ModelError(
                f"{name!r} was distributed in {parameter.dtype}, but this precision stores parameters in {dtype}; convert the module "
                f"before it is distributed: module.to({dtype})"
            )


def check_aliases(module: nn.Module, expected: dict[str, str]) -> None:
    """Tied tensors must still be one object under each of their names."""
    found = alias_table(module)
    if found == expected:
        return
    differing = sorted(set(found.items()) ^ set(expected.items()))
    tensors = dict(all_tensors(module))
    apart = any(name in tensors and is_distributed(tensors[name]) for pair in differing for name in pair)
    raise ModelError(
        "the build changed which names share a tensor: " + ", ".join(f"{alias!r} and {name!r}" for alias, name in differing)
        + "; parallelize_model_stage and reset_parameters must keep tied parameters the same object"
        + (_TIE_AGAIN if apart else "")
    )


_TIE_AGAIN = (
    ". Leave the modules that share a parameter to one FSDP unit, such as the root. For tensor parallelism name both in the plan, cut in "
    "the same way, and tie them again afterwards: head.weight = embedding.weight"
)
