"""The records of a manifest, and the checks that make them trustworthy.

Not here: JSON and files. A manifest may come from anybody: what it says must be proven possible here, so that the code that
reads tensors can use offsets without looking at them again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer_kit.exceptions import CheckpointError
from trainer_kit.weights.format import DTYPES, num_bytes

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor (`offsets`, `sizes` per dim) and the bytes `start` to `end` of a file that hold it, row-major."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor by its global shape, cut into chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and CRC-32 of a file."""

    size: int
    crc32: int


def check_files(content: Mapping[str, Any]) -> dict[str, FileRecord]:
    """File records from JSON. Names that lead out of the folder are refused."""
    for name in content:
        if not PLAIN_NAME.fullmatch(name):
            raise CheckpointError(f"it lists the file {name!r}, which is no plain name inside the folder")
    return {name: FileRecord(*_counts([item["size"], item["crc32"]])) for name, item in content.items()}


def check_tensors(content: Mapping[str, Any], files: Mapping[str, FileRecord]) -> dict[str, TensorRecord]:
    """Tensor records from JSON. Every chunk lies inside its file and its tensor, and each tensor is covered exactly once."""
    records = {}
    for name, item in content.items():
        try:
            records[name] = _record(item, files)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"tensor {name!r} is described wrongly: {type(error).__name__}: {error}") from error
    return records


def _record(item: Mapping[str, Any], files: Mapping[str, FileRecord]) -> TensorRecord:
    dtype, shape = DTYPES[item["dtype"]], _counts(item["shape"])
    chunks = [
        Chunk(_counts(c["offsets"]), _counts(c["sizes"]), c["file"], *_counts([c["start"], c["end"]])) for c in item["chunks"]
    ]
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            raise ValueError(f"a chunk has {len(chunk.sizes)} dims, the tensor {len(shape)}")
        if any(offset + size > whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise ValueError(f"a chunk at {chunk.offsets} of {chunk.sizes} leaves the shape {shape}")
        if chunk.end > files[chunk.file].size or chunk.end - chunk.start != num_bytes(dtype, chunk.sizes):
            raise ValueError(f"bytes {chunk.start} to {chunk.end} of {chunk.file} are not {num_bytes(dtype, chunk.sizes)} bytes inside it")
    _check_cover(shape, [chunk for chunk in chunks if math.prod(chunk.sizes)])
    return TensorRecord(dtype, shape, tuple(chunks))


def _check_cover(shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    """Equal volumes and no overlap mean that every element is there once. Sorted along the dim that is cut most, few pairs are compared."""
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError("its chunks do not hold as many elements as the tensor")
    if len(chunks) < 2 or not shape:
        return
    dim = max(range(len(shape)), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
    chunks = sorted(chunks, key=lambda chunk: chunk.offsets[dim])
    for index, first in enumerate(chunks):
        for second in chunks[index + 1 :]:
            if second.offsets[dim] >= first.offsets[dim] + first.sizes[dim]:
                break
            if all(a < b + m and b < a + n for a, n, b, m in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)):
                raise ValueError(f"chunks at {first.offsets} and {second.offsets} overlap")


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"found {values!r:.100}, expected a list of sizes")
    return tuple(values)
