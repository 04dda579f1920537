"""The calls into torch that are not public, each with its reason. Tests run them on every supported version."""

from __future__ import annotations

import ctypes

import torch


def flag_non_finite(tensors: list[torch.Tensor], flag: torch.Tensor) -> None:
    """Set `flag` (one float32 element) to 1 if any element is inf or nan; all tensors of one device and dtype.

    `torch.amp.GradScaler` uses the same kernel. The public way (a norm per tensor, stacked) costs five times as much for small models.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, torch.ones_like(flag))


_CTYPES = {
    torch.float64: ctypes.c_double, torch.float32: ctypes.c_float, torch.bool: ctypes.c_bool, torch.uint8: ctypes.c_uint8,
    torch.int64: ctypes.c_int64, torch.int32: ctypes.c_int32, torch.int16: ctypes.c_int16, torch.int8: ctypes.c_int8,
}  # fmt: skip


def read_cpu_scalar(tensor: torch.Tensor) -> float:
    """The value of a one-element CPU tensor, from its memory.

    `item()` is a host synchronisation in the eyes of a dispatch mode and of readers; on a CPU there is nothing to wait for.
    """
    if tensor.dtype not in _CTYPES:
        tensor = tensor.to(torch.float32)
    return float(_CTYPES[tensor.dtype].from_address(tensor.data_ptr()).value)
