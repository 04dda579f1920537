"""What a reset finds in its module: plain whole tensors, whatever the module really holds.

A reset may compute anything, and on a part of a tensor most of it would come out wrong without an error. So a tensor that is cut over
ranks is replaced by a whole one while the reset of its module runs; afterwards each rank keeps its part. The same goes for tensors
stored in another dtype than the constructor's, and for tied ones that another module fills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.layout import fill, is_distributed
from trainer_kit.model.operations import storage_key
from trainer_kit.model.reset_mode import ResetMode, TensorRecord
from trainer_kit.names import direct_tensors


@dataclass(frozen=True, slots=True)
class StandIn:
    """What a reset finds under `holder.attribute` in place of `tensor`: the tensor itself, or a scratch one."""

    holder: nn.Module
    attribute: str
    tensor: torch.Tensor
    shown: torch.Tensor
    record: TensorRecord
    is_kept: bool
    key: int  # of the storage of `shown`, which `.data = ...` may replace


def show(holder: nn.Module, records: Mapping[int, TensorRecord], is_filled: Callable[[int], bool], mode: ResetMode) -> Iterator[StandIn]:
    """Put the stand-ins into a module. records: by the id of the tensor; is_filled: whether the values of that one will be kept."""
    for attribute, tensor in direct_tensors(holder):
        record, is_kept = records[id(tensor)], is_filled(id(tensor))
        shown = tensor
        if not is_kept or is_distributed(tensor) or tensor.dtype != record.dtype:
            shown = _whole(tensor, record.dtype)
            if isinstance(tensor, nn.Parameter):
                shown = nn.Parameter(shown, requires_grad=tensor.requires_grad)
                vars(shown).update(vars(tensor))
            setattr(holder, attribute, shown)
            if is_kept:
                mode.known[storage_key(shown)] = record
        yield StandIn(holder, attribute, tensor, shown, record, is_kept, storage_key(shown))


def _whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if is_distributed(tensor):
        return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    return torch.empty_like(tensor, dtype=dtype)


def take_back(stand_in: StandIn, mode: ResetMode) -> None:
    """Keep the values, or this rank's part of them, and put the real tensor back."""
    tensor, record = stand_in.tensor, stand_in.record
    found = getattr(stand_in.holder, stand_in.attribute, None)
    is_new = found is not stand_in.shown or storage_key(stand_in.shown) != stand_in.key
    if isinstance(found, torch.Tensor) and stand_in.is_kept:
        if found.shape != tensor.shape:
            raise ModelError(
                f"{record.name!r} has the shape {tuple(tensor.shape)}, but its reset gives it {tuple(found.shape)}; keep the shape"
            )
        if found is not tensor:
            fill(tensor, found)
        if is_new:  # assigned instead of written to: complete by itself
            record.num_written = tensor.numel()
    if found is not tensor:
        setattr(stand_in.holder, stand_in.attribute, tensor)
    if stand_in.shown is not tensor:
        mode.known.pop(stand_in.key, None)
    mode.known[storage_key(tensor)] = record
