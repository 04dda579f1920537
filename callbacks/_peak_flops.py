"""The peak speed of known devices, for the utilisation that `Throughput` logs.

A device that is not listed by its exact name has no peak: counting it as a similar one would give a wrong number.
"""

from __future__ import annotations

import torch

# Dense bf16 products with fp32 accumulation, FLOPs per second, by the exact name the driver gives; from the makers' data sheets.
PEAK_BF16_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "AMD Instinct MI300X": 1307e12,
    "AMD Instinct MI300X OAM": 1307e12,
}


def device_name(device: torch.device) -> str:
    """The name the driver gives, or the device's type."""
    get_name = getattr(torch.get_device_module(device), "get_device_name", None) if device.type != "cpu" else None
    return get_name(device) if get_name is not None else device.type
