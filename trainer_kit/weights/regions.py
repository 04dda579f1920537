"""Moves a region between a tensor and the bytes of a file, with little memory beside the tensor itself.

A contiguous CPU tensor is read and written in place. Anything else (a device, a transposed view, narrow parts of rows) passes through
host memory in slabs of a few megabytes, so that one huge tensor costs no more than a small one. Model states and training checkpoints
read the boxes of a rank with it; which boxes is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO

import torch

from trainer_kit.exceptions import CheckpointError
from trainer_kit.mesh.layout import box_index
from trainer_kit.storage import read_into
from trainer_kit.weights.format import num_bytes, tensor_bytes

PIECE_BYTES = 4 * 2**20
SEEK_BYTES = 4096  # one more call costs about as much as reading so many bytes for nothing


def host_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The elements in row-major order as pieces of host memory. Pieces of a contiguous CPU tensor are its own memory: keep it alive."""
    if is_plain(tensor):
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

    Bytes outside of the box are passed over where that is worth a seek. Raises CheckpointError, naming `label`, if the file ends early.
    """
    if target.numel() == 0:
        return
    row_bytes, part_bytes = num_bytes(target.dtype, sizes[1:]), num_bytes(target.dtype, target.shape[1:])
    if offsets:
        start += offsets[0] * row_bytes
    if tuple(target.shape[1:]) == tuple(sizes[1:]):  # whole rows: one range of bytes
        _read_range(file, target, start, label)
    elif row_bytes <= PIECE_BYTES and row_bytes - part_bytes < SEEK_BYTES:
        _read_whole_rows(file, target, start, sizes[1:], offsets[1:], label)
    elif is_plain(target) and tuple(target.shape[2:]) == tuple(sizes[2:]):
        data, start = tensor_bytes(target), start + offsets[1] * num_bytes(target.dtype, sizes[2:])
        for index in range(len(target)):
            _read_exactly(file, data[index * part_bytes : (index + 1) * part_bytes], start + index * row_bytes, label)
    else:
        for index, row in enumerate(target):
            read_region(file, row, start + index * row_bytes, sizes[1:], offsets[1:], label)


def _read_whole_rows(
    file: IO[bytes], target: torch.Tensor, start: int, row_sizes: Sequence[int], offsets: Sequence[int], label: str
) -> None:
    """The parts of rows that `target` has, by way of the whole rows from `start` on, many in one call."""
    row_bytes = num_bytes(target.dtype, row_sizes)
    box = box_index(offsets, target.shape[1:])
    for part in target.split(PIECE_BYTES // row_bytes):
        rows, data = _host_buffer(target.dtype, (len(part), *row_sizes))
        _read_exactly(file, data, start, label)
        part.copy_(rows[(slice(None), *box)])
        start += len(data)


def _read_range(file: IO[bytes], target: torch.Tensor, start: int, label: str) -> None:
    if is_plain(target):
        _read_exactly(file, tensor_bytes(target), start, label)
        return
    for slab in _slabs(target):
        rows, data = _host_buffer(slab.dtype, slab.shape)
        _read_exactly(file, data, start, label)
        slab.copy_(rows)
        start += len(data)


def _read_exactly(file: IO[bytes], data: memoryview, start: int, label: str) -> None:
    file.seek(start)
    for position in range(0, len(data), PIECE_BYTES):  # files behind a URL copy what they hand over: a bounded piece at a time
        piece = data[position : position + PIECE_BYTES]
        if (count := read_into(file, piece)) != len(piece):
            found, expected = start + position + count, start + len(data)
            raise CheckpointError(f"{label} ends at byte {found}, expected at least {expected}; it was truncated meanwhile")


def is_plain(tensor: torch.Tensor, device_type: str = "cpu") -> bool:
    """Whether its memory is there, and holds the elements in row-major order, as a file does."""
    return tensor.device.type == device_type and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


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


def box_slabs(box: torch.Tensor, offsets: Sequence[int]) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Views of at most PIECE_BYTES of a box that lies at `offsets` of something larger, each with its own offsets there."""
    total = box.numel() * box.element_size()
    if total <= PIECE_BYTES:
        yield box, tuple(offsets)
        return
    num_rows = max(PIECE_BYTES * len(box) // total, 1)
    for start in range(0, len(box), num_rows):
        part, place = box[start : start + num_rows], (offsets[0] + start, *offsets[1:])
        if part.numel() * part.element_size() <= PIECE_BYTES:
            yield part, place
        else:  # a row larger than a slab
            for inner, deeper in box_slabs(part[0], place[1:]):
                yield inner.unsqueeze(0), (place[0], *deeper)
