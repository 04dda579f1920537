"""What surrounds the model in a run: process-wide switches, undone when it ends, and the precision of its inputs and operations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from trainer_kit.config import TrainerConfig
from trainer_kit.data import map_tensors
from trainer_kit.exceptions import ConfigurationError


@contextmanager
def run_environment(config: TrainerConfig, device: torch.device) -> Iterator[None]:
    """Switch on what the settings ask for; give everything back at the end, however it comes."""
    with _deterministic(config.deterministic), _host_sync_errors(config.detect_host_syncs, device):
        yield


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    # cuBLAS reads this when its first handle is made; without it deterministic mode refuses matrix products.
    absent = "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]
        if absent:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]


@contextmanager
def _host_sync_errors(wanted: bool, device: torch.device) -> Iterator[None]:
    if not wanted:
        yield
        return
    check_host_sync_support(wanted, device)
    module = torch.get_device_module(device)
    before = module.get_sync_debug_mode()
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode(before)


def check_host_sync_support(wanted: bool, device: torch.device) -> None:
    """Raise ConfigurationError where the device cannot tell host synchronisations."""
    if wanted and device.type != "cuda":
        raise ConfigurationError(
            f"detect_host_syncs=True needs CUDA, which reports its synchronisations; the run is on {device}; leave it out"
        )


def make_autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[object]] | None:
    """What forwards and losses run in: bf16 autocast for "bf16-mixed", None for the others."""
    if precision != "bf16-mixed":
        return None
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


class InputsAs:
    """Calls a model with the floating-point tensors of its inputs in one dtype, as that of its parameters asks for."""

    def __init__(self, dtype: torch.dtype, model: Callable[[Any, Any], Any]) -> None:
        self._dtype, self._model = dtype, model

    def __call__(self, inputs: Any, shared: Any) -> Any:
        return self._model(map_tensors(self._cast, inputs), map_tensors(self._cast, shared))

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor
