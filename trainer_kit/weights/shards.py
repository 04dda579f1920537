"""How a model state is cut into files: sizes as text, the shards, their names, the index. No file is touched here.

Before editing: the result depends on names, shapes and dtypes alone, so every rank of a run computes the same shards and the same
bytes. Inside a file wider dtypes come first: readers that view the bytes in place need each tensor aligned to its element size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from trainer_kit.exceptions import ConfigurationError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shard(Generic[T]):
    """One file: its name, its tensors in the order of their bytes, and how many bytes these have."""

    file: str
    tensors: Sequence[T]
    size: int


def parse_size(value: int | str, argument: str = "max_shard_size") -> int:
    """Bytes from a number or a text such as "5GB" (10**9), "512 MiB" (2**20). ConfigurationError, naming `argument`, for others."""
    size = value if type(value) is int else 0
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", value)):
        size = int(float(match[1]) * UNITS.get(match[2].upper(), 0))
    if size < 1:
        raise ConfigurationError(f'{argument}={value!r}: a positive number of bytes, or a text such as "4GB" or "500MiB", was expected')
    return size


def fill(sized: Iterable[tuple[T, int]], limit: int) -> list[list[T]]:
    """Cut (thing, bytes) in the given order into lists of up to `limit` bytes; a larger one is alone."""
    lists: list[list[T]] = []
    total = 0
    for thing, size in sized:
        if not lists or total + size > limit:
            lists.append([])
            total = 0
        lists[-1].append(thing)
        total += size
    return lists


def cut(tensors: Iterable[tuple[T, int, int]], limit: int) -> list[Shard[T]]:
    """Fill files in the given order up to `limit` bytes; a larger tensor gets a file of its own. Input: (tensor, bytes, element size)."""
    groups = fill(((tensor, tensor[1]) for tensor in tensors), limit)
    files = file_names(len(groups))
    return [_shard(file, group) for file, group in zip(files, groups, strict=True)]


def _shard(file: str, group: list[tuple[T, int, int]]) -> Shard[T]:
    ordered = sorted(group, key=lambda tensor: -tensor[2])
    return Shard(file, [tensor for tensor, _, _ in ordered], sum(size for _, size, _ in group))


def file_names(count: int) -> list[str]:
    """The names other tools expect."""
    return ["model.safetensors"] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def index_bytes(weight_map: Mapping[str, str], metadata: Mapping[str, object]) -> bytes:
    """The index as the field writes it."""
    return (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n").encode()
