"""The calls into torch that are not public, each with its reason. Tests run them on every supported version."""

from __future__ import annotations

import ctypes

import torch


def flag_non_finite(tensors: list[torch.Tensor], flag: torch.Tensor) -> None:
    """Set `flag` (one float32 element) to 1 if any element is inf or nan; all tensors of one device and dtype.

    `torch.amp.GradScaler` uses the same kernel. The public way (a norm per tensor, stacked) costs five times as much for small models.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, torch.ones_like(flag))


def read_cpu_scalar(tensor: torch.Tensor) -> float:
    """The value of a one-element float32 or float64 CPU tensor, from its memory.

    `item()` is a host synchronisation in the eyes of a dispatch mode and of readers; on a CPU there is nothing to wait for.
    """
    kind = ctypes.c_double if tensor.dtype == torch.float64 else ctypes.c_float
    return float(kind.from_address(tensor.data_ptr()).value)
