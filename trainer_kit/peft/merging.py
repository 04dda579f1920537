"""`merge` and `unmerge`: the adapters of a live model in its weights, for fast inference, and out of them again, bit by bit.

Not the export, which merges on the fly and needs none of this. Before editing: subtracting what was added does not give the old bits back,
so the old weights are kept, on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainer_kit.exceptions import ModelError, StateError
from trainer_kit.mesh.layout import layout_of, local_of
from trainer_kit.peft.inject import Adapted, adapted_weights
from trainer_kit.peft.mapping import merged as merged_weight
from trainer_kit.torch_private import fsdp_modules, whole_tensor


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add scale * B @ A to every adapted weight, in float32 and then in its dtype; adapters are not computed from then on.

    The old weights are kept in the memory of the host for `unmerge`. On a mesh all ranks call it. Evaluate and predict with a merged model;
    training, saving and exporting it is for the time after `unmerge`.
    """
    found = _settled(model)
    if any(adapted.lora.original is not None for adapted in found):
        raise StateError("the adapters of this model are merged already; unmerge(model) takes them out")
    for adapted in found:
        weight = getattr(adapted.owner, adapted.weight)
        local = local_of(weight)
        delta = adapted.lora.delta(whole_tensor(adapted.lora.A), whole_tensor(adapted.lora.B), layout_of(weight).box)
        adapted.lora.original = local.to("cpu", copy=True)
        local.copy_(merged_weight(local, delta))


@torch.no_grad()
def unmerge(model: nn.Module) -> None:
    """Put the weights of before `merge` back, every bit of them."""
    for adapted in _settled(model):
        if adapted.lora.original is None:
            raise StateError("the adapters of this model are not merged; merge(model) comes first")
        local_of(getattr(adapted.owner, adapted.weight)).copy_(adapted.lora.original)
        adapted.lora.original = None


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """The model with its adapters merged, inside of the block."""
    merge(model)
    try:
        yield
    finally:
        unmerge(model)


def _settled(model: nn.Module) -> list[Adapted]:
    """The adapted weights. FSDP may have left some of them whole after a forward."""
    for unit in fsdp_modules(model):
        unit.reshard()
    found = list(adapted_weights(model))
    if not found:
        raise ModelError(f"{type(model).__name__} has no adapters; give the Trainer adapt(model, LoRA(...))")
    return found
