"""Copies the tensors of a pack to an accelerator, ahead of time where packs are fetched ahead.

A CPU needs none of this: there the stream leaves packs as they are. The one thing to know before editing: memory that was allocated
on the copying stream and is used on the main one must be announced with `record_stream`, or the allocator hands it out again while
it is still read. That can't be done for tensors inside foreign objects, so those are moved on the main stream, when handed out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trainer_kit.data.pack import iterate_tensors, map_tensors


@dataclass(slots=True)
class Copy:
    """Microbatches on their way, and the event after which they have arrived; None: in order on the main stream."""

    microbatches: list[Any]
    arrived: torch.Event | None = None


class DeviceTransfer:
    """Starts copies and waits for them on the device, never on the host. `ahead`: copy on a side stream if the device has any."""

    def __init__(self, device: torch.device, *, pin_memory: bool, ahead: bool) -> None:
        self._device = device
        has_streams = hasattr(torch.get_device_module(device), "Stream") if device.type != "meta" else False
        self._pins = pin_memory and has_streams
        self._non_blocking = has_streams
        self._side_stream = torch.Stream(device=device) if ahead and has_streams else None

    def start(self, microbatches: list[Any]) -> Copy:
        """Begin to copy; on the host this only queues the work, given pinned memory."""
        if self._side_stream is None:
            return Copy([map_tensors(self._copy, m, self._move_object) for m in microbatches])
        with self._side_stream:
            copied = [map_tensors(self._copy, m) for m in microbatches]
            return Copy(copied, self._side_stream.record_event())

    def finish(self, copy: Copy) -> list[Any]:
        """The microbatches, safe to use on the main stream."""
        if copy.arrived is None:
            return copy.microbatches
        main = torch.accelerator.current_stream(self._device)
        main.wait_event(copy.arrived)
        for tensor in iterate_tensors(copy.microbatches):
            if tensor.device.type == self._device.type:
                tensor.record_stream(main)
        return [map_tensors(_same, m, self._move_object) for m in copy.microbatches]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._pins and tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=self._non_blocking)

    def _move_object(self, movable: Any) -> Any:
        return movable.to(self._device)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
