"""Which kernel an optimizer of torch runs: fused where the device has it, foreach otherwise, a loop on demand.

Whether torch has a fused kernel for a device is found by trying one on a single element: its list of devices is private.
Decided once, when the optimizer is built.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.optim.provider import NamedParameters

Kernel = Literal["auto", "fused", "foreach", "loop"]


def kernel_arguments(kernel: Kernel, optimizer: type[torch.optim.Optimizer], parameters: NamedParameters) -> dict[str, bool]:
    """The arguments `fused` and `foreach` of a torch optimizer. Raises ConfigurationError if "fused" was asked for and cannot be."""
    if kernel == "auto":
        kernel = "fused" if _obstacle(optimizer, parameters) is None else "foreach"
    elif kernel == "fused" and (obstacle := _obstacle(optimizer, parameters)):
        raise ConfigurationError(f"kernel='fused' is not possible for {optimizer.__name__}: {obstacle}; use kernel='auto'")
    if kernel == "fused":
        return {"fused": True}
    return {"foreach": kernel == "foreach", "fused": False}


def _obstacle(optimizer: Callable[..., torch.optim.Optimizer], parameters: NamedParameters) -> str | None:
    """Why no fused kernel can take these parameters, or None. Those on the meta device are updated on other ranks."""
    parameters = [(name, parameter) for name, parameter in parameters if not parameter.is_meta] or parameters
    devices = {parameter.device.type for _, parameter in parameters}
    if len(devices) > 1:
        return f"the parameters are on several kinds of device, {sorted(devices)}"
    for name, parameter in parameters:
        if not parameter.is_floating_point():
            return f"{name!r} is {parameter.dtype}, not a floating point number"
        if not _has_fused(optimizer, parameter.device.type, parameter.dtype):
            return f"torch has none for {parameter.dtype} on {parameter.device.type} (parameter {name!r})"
    return None


@cache
def _has_fused(optimizer: Callable[..., torch.optim.Optimizer], device_type: str, dtype: torch.dtype) -> bool:
    if device_type == "meta":
        return False
    probe = torch.nn.Parameter(torch.zeros(1, device=device_type, dtype=dtype))
    probe.grad = torch.zeros_like(probe)
    try:
        optimizer([probe], lr=0.0, fused=True).step()
    except (RuntimeError, NotImplementedError, TypeError):  # what torch raises for a device, dtype or class without one
        return False
    return True


def check_dtypes(owner: str, parameters: NamedParameters) -> None:
    """Refuse fp16, and warn once about bf16 parameters whose updates are rounded to nearest."""
    for name, parameter in parameters:
        if parameter.dtype == torch.float16:
            raise ConfigurationError(f"parameter {name!r} is float16, whose range is too small to train; use bfloat16 or float32")
    low = [name for name, parameter in parameters if parameter.dtype == torch.bfloat16]
    if low:
        warnings.warn(
            f"{len(low)} parameters are bfloat16 (such as {low[0]!r}) and {owner} rounds each update to nearest: "
            "one below 1/512 of a weight is lost. Use optimizer=StochasticAdamW(...), which keeps it on average, "
            "or fp32 parameters with precision='bf16-mixed'",
            stacklevel=3,
        )
