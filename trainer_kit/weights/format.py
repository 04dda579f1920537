"""The safetensors file format, by hand: headers, and tensors as raw bytes without a copy.

The `safetensors` library maps whole files into memory and serialises from whole buffers; streaming and slicing need neither.
Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header, then the data; offsets are
relative to the data).
"""

from __future__ import annotations

import ctypes
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

from trainer_kit.exceptions import CheckpointError
from trainer_kit.storage import read_into

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `start` and `end` are byte offsets from the beginning of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def num_bytes(dtype: torch.dtype, shape: Iterable[int]) -> int:
    """Bytes of a dense tensor."""
    return math.prod(shape) * dtype.itemsize


def build_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[TensorEntry]]:
    """The first bytes of a file that holds these tensors in this order, and where each will lie. The data starts 8-byte aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset, places = 0, []
    for name, dtype, shape in tensors:
        end = offset + num_bytes(dtype, shape)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        places.append((name, dtype, tuple(shape), offset, end))
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    entries = [TensorEntry(name, dtype, shape, base + start, base + end) for name, dtype, shape, start, end in places]
    return len(text).to_bytes(8, "little") + text, entries


def read_header(file: IO[Any], size: int, label: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Entries by name and the metadata of an open file of `size` bytes. Everything is checked before any data is read.

    Raises CheckpointError, naming `label`, for a file that is truncated or no safetensors file.
    """
    start = bytearray(8)
    if size < 8 or read_into(file, memoryview(start)) < 8:
        raise CheckpointError(f"{label} has {size} bytes: too short for a safetensors file, it was truncated")
    length = int.from_bytes(start, "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(f"{label} announces a header of {length} bytes but has {size}: truncated, or no safetensors file")
    text = bytearray(length)
    read_into(file, memoryview(text))
    try:
        header = json.loads(bytes(text))
        metadata = header.pop("__metadata__", {})
        entries = {name: _entry(name, item, 8 + length) for name, item in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{label} has a header that is no safetensors header: {error}") from error
    position = 8 + length
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.end)):
        if entry.start != position or entry.end - entry.start != num_bytes(entry.dtype, entry.shape):
            raise CheckpointError(f"{label}: tensor {entry.name!r} does not lie where its dtype and shape say; the file is corrupt")
        position = entry.end
    if position != size:
        raise CheckpointError(f"{label} should have {position} bytes but has {size}: it was truncated or altered")
    return entries, metadata


def _entry(name: str, item: Mapping[str, Any], base: int) -> TensorEntry:
    start, end = item["data_offsets"]
    shape = tuple(item["shape"])
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise ValueError(f"tensor {name!r} has a negative or fractional size")
    return TensorEntry(name, DTYPES[item["dtype"]], shape, base + start, base + end)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes, without a copy. The tensor must outlive the view."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous CPU tensor, found {tensor.device}, strides {tensor.stride()}")
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * count).from_address(tensor.data_ptr())).cast("B")


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU tensor whose memory holds the elements: the tensor itself if it is one, else a copy."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def tensor_crc32(tensor: torch.Tensor, start: int = 0) -> int:
    """CRC-32 of the elements in row-major order, going on from `start`. A tensor on a device is copied to the host."""
    host = on_host(tensor)  # outlives the view of its memory
    return zlib.crc32(tensor_bytes(host), start)
