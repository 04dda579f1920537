"""Memory for a model on the meta device: each tensor is allocated once, and every name of it leads to the same object again.

Not here: values (`initialise.py`). Before editing: `to_empty` makes a new object per name, which unties tied weights, and drops what
was written onto a parameter object; some modules (the RNNs) must see it called to renew what they derive from their parameters.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.names import alias_table, all_tensors, direct_tensors


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
        values = {name: tensor.detach().clone() for name, tensor in found if not tensor.is_meta}
        owner.to_empty(device=device, recurse=False)
        for name, original in found:
            originals.append(original)
            if id(original) in placed:
                setattr(owner, name, placed[id(original)])
                continue
            tensor = placed[id(original)] = getattr(owner, name)
            if tensor is not original and isinstance(tensor, nn.Parameter):
                vars(tensor).update(vars(original))
            if name in values:
                tensor.copy_(values[name])
    check_aliases(module, aliases)
    return ready


def set_parameter_dtype(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Store the floating parameters in `dtype`; buffers keep theirs (tables and counters need their precision)."""
    for parameter in module.parameters():
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def check_aliases(module: nn.Module, expected: dict[str, str]) -> None:
    """Tied tensors must still be one object under each of their names."""
    found = alias_table(module)
    if found != expected:
        differing = sorted(set(found.items()) ^ set(expected.items()))
        raise ModelError(
            "the build changed which names share a tensor: " + ", ".join(f"{alias!r} and {name!r}" for alias, name in differing)
            + "; parallelize_model_stage and reset_parameters must keep tied parameters the same object"
        )
