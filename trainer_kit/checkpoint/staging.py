"""Host copies of a state, in buffers that the next save uses again.

An asynchronous save writes from these while training goes on. A buffer is reused by key, shape and dtype; what is new gets a new
one and what is gone is released, so that the state may change its structure between two saves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainer_kit.mesh.layout import local_of


class Staging:
    """Owns the copies. Only one save may use them at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the local tensors (of a DTensor its shard), complete when this returns. torch copies with all its threads."""
        sources = {name: local_of(tensor) for name, tensor in tensors.items()}
        self._buffers = {name: self._buffer(name, source) for name, source in sources.items()}
        for name, source in sources.items():
            self._buffers[name].copy_(source, non_blocking=True)
        for device in {source.device for source in sources.values() if source.device.type not in ("cpu", "meta")}:
            torch.accelerator.synchronize(device)
        return dict(self._buffers)

    def release(self) -> None:
        """Give the memory back."""
        self._buffers = {}

    def _buffer(self, name: str, source: torch.Tensor) -> torch.Tensor:
        old = self._buffers.get(name)
        if old is not None and old.shape == source.shape and old.dtype == source.dtype:
            return old
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type == "cuda")  # pinned: copied without a detour
