"""State of which every data rank has its own: random streams, metrics in progress. Each is one tensor under a key of its own.

The values of a checkpoint are those of rank 0, and equal keys of tensors are taken to be equal; so what differs is encoded, plain values
and small tensors together, as bytes that its rank writes itself. The format is the same for one process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from trainer_kit.checkpoint.tree import flatten_state, unflatten_state
from trainer_kit.exceptions import CheckpointError
from trainer_kit.weights.format import DTYPE_NAMES, DTYPES, on_host, tensor_bytes


def rank_key(part: str, data_rank: int | str) -> str:
    """The key of what a data rank has for a part of the state; how all of them begin, for an empty text."""
    return f"{part}/ranks/{data_rank}"


def rank_keys(part: str, num_data_ranks: int) -> list[str]:
    """The keys of all data ranks."""
    return [rank_key(part, data_rank) for data_rank in range(num_data_ranks)]


def share_of(data_rank: int, num_data_ranks: int, num_saved: int) -> range:
    """Which of the saved data ranks one of now stands for: itself if their number is the same, else a share in their order."""
    return range(data_rank * num_saved // num_data_ranks, (data_rank + 1) * num_saved // num_data_ranks)


def encode_state(state: Any) -> torch.Tensor:
    """A nested state of plain values and small tensors as bytes. Raises CheckpointError as `flatten_state` does."""
    tensors, values = flatten_state(state)
    content = {"tensors": {name: _encoded(name, tensor) for name, tensor in tensors.items()}, "values": values}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def decode_state(data: torch.Tensor) -> Any:
    """What `encode_state` took. Raises CheckpointError for bytes that it did not write."""
    try:
        content = json.loads(bytes(tensor_bytes(data)))
        tensors = {name: _decoded(*item) for name, item in content["tensors"].items()}
        return unflatten_state(tensors, content["values"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the state of a data rank in the checkpoint cannot be read: {type(error).__name__}: {error}") from error


def _encoded(name: str, tensor: torch.Tensor) -> list[Any]:
    if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided or tensor.is_meta:
        raise CheckpointError(f"{name} is {tensor.dtype}, {tensor.layout}, on {tensor.device}; dense tensors with data were expected")
    host = on_host(tensor)
    return [DTYPE_NAMES[tensor.dtype], list(tensor.shape), tensor_bytes(host).hex()]


def _decoded(dtype: str, shape: Iterable[int], text: str) -> torch.Tensor:
    data = bytearray.fromhex(text)
    found = torch.frombuffer(data, dtype=DTYPES[dtype]) if data else torch.empty(0, dtype=DTYPES[dtype])
    return found.view(tuple(shape))
