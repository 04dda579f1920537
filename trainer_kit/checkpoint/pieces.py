"""Moves a region between a tensor and the bytes of a file, with little memory beside the tensor itself.

A contiguous CPU tensor is read and written in place. Anything else (a device, a transposed view, a part of a saved chunk) passes
through host memory in slabs of a few megabytes, so that one huge tensor costs no more than a small one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO

import torch

from trainer_kit.checkpoint.checksum import PIECE_BYTES
from trainer_kit.exceptions import CheckpointError
from trainer_kit.storage import read_into
from trainer_kit.weights.format import num_bytes, tensor_bytes


def host_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The elements in row-major order as pieces of host memory. Pieces of a contiguous CPU tensor are its own memory: keep it alive."""
    if _is_plain(tensor):
        data = tensor_bytes(tensor)
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]
        return
    for slab in _slabs(tensor):
        if slab.numel():
            copy, data = _host_buffer(slab.dtype, slab.shape)
            copy.copy_(slab)
            yield data


def read_region(
    file: IO[bytes], target: torch.Tensor, start: int, sizes: Sequence[int], offsets: Sequence[int], label: str
) -> None:
    """Fill `target` with the box at `offsets` of a chunk of shape `sizes` whose bytes begin at `start` of the file.

    Raises CheckpointError, naming `label`, if the file ends early.
    """
    if target.numel() == 0:
        return
    row_bytes = num_bytes(target.dtype, sizes[1:])
    if tuple(target.shape[1:]) == tuple(sizes[1:]):  # whole rows: one range of bytes
        _read_range(file, target, start + (offsets[0] * row_bytes if offsets else 0), label)
    elif row_bytes <= PIECE_BYTES:  # parts of rows: reading the whole rows takes far fewer calls
        num_rows = PIECE_BYTES // row_bytes
        for first in range(0, len(target), num_rows):
            part = target[first : first + num_rows]
            rows, data = _host_buffer(target.dtype, (len(part), *sizes[1:]))
            _read_exactly(file, data, start + (offsets[0] + first) * row_bytes, label)
            box = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], target.shape[1:], strict=True))
            part.copy_(rows[(slice(None), *box)])
    else:
        for index, row in enumerate(target):
            read_region(file, row, start + (offsets[0] + index) * row_bytes, sizes[1:], offsets[1:], label)


def _read_range(file: IO[bytes], target: torch.Tensor, start: int, label: str) -> None:
    if _is_plain(target):
        _read_exactly(file, tensor_bytes(target), start, label)
        return
    for slab in _slabs(target):
        rows, data = _host_buffer(slab.dtype, slab.shape)
        _read_exactly(file, data, start, label)
        slab.copy_(rows)
        start += len(data)


def _read_exactly(file: IO[bytes], data: memoryview, start: int, label: str) -> None:
    file.seek(start)
    count = read_into(file, data)
    if count != len(data):
        raise CheckpointError(f"{label} ends at byte {start + count}, expected at least {start + len(data)}; it was truncated meanwhile")


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _host_buffer(dtype: torch.dtype, shape: Sequence[int]) -> tuple[torch.Tensor, memoryview]:
    """A new tensor and its memory; the view keeps the memory alive, whoever holds it."""
    memory = bytearray(num_bytes(dtype, shape))
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape)), memoryview(memory)


def _slabs(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut along the first dims into views of at most PIECE_BYTES, in row-major order."""
    total = tensor.numel() * tensor.element_size()
    if total <= PIECE_BYTES:
        yield tensor
        return
    num_rows = PIECE_BYTES * len(tensor) // total
    if num_rows:
        yield from tensor.split(num_rows)
    else:
        for row in tensor:
            yield from _slabs(row)


