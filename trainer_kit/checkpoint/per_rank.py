"""State of which every loss rank, and each of its pipeline ranks, has its own: random streams, metrics in progress.

The values of a checkpoint are those of rank 0, and equal keys of tensors are taken to be equal; so what differs is encoded, plain values
and small tensors together, as bytes that its rank writes itself: one tensor under a key of its own. The format is the same for one process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainer_kit.checkpoint.tree import flatten_state, unflatten_state
from trainer_kit.exceptions import CheckpointError
from trainer_kit.weights.format import DTYPE_NAMES, DTYPES, on_host, tensor_bytes

if TYPE_CHECKING:
    from trainer_kit.checkpoint.manifest import Manifest
    from trainer_kit.mesh.context import DistributedContext


PARTS = ("random", "task")  # that have such state


class RankCounts(NamedTuple):
    """How many ranks have state of their own: the pipeline ranks of each context rank of each data rank."""

    num_data_ranks: int
    num_pipeline_ranks: int
    num_context_ranks: int = 1

    @classmethod
    def of(cls, context: DistributedContext) -> RankCounts:
        """Those of this run."""
        return cls(context.num_data_ranks, context.num_pipeline_ranks, context.num_context_ranks)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> RankCounts:
        """Those that were saved as `values`."""
        return cls(*(values.get(name, cls._field_defaults.get(name)) for name in cls._fields))

    def values(self) -> dict[str, int]:
        """In plain values."""
        return dict(zip(self._fields, self, strict=True))

    @property
    def total(self) -> int:
        """All of them."""
        return self.num_loss_ranks * self.num_pipeline_ranks

    @property
    def num_loss_ranks(self) -> int:
        """Data ranks times context ranks."""
        return self.num_data_ranks * self.num_context_ranks

    def __str__(self) -> str:
        several = {"context": self.num_context_ranks, "pipeline": self.num_pipeline_ranks}
        inside = " and ".join(f"{number} {name} ranks" for name, number in several.items() if number > 1)
        return f"{self.num_data_ranks} data ranks{f' with {inside} each' if inside else ''}"

    def keys(self, part: str) -> list[str]:
        """What they all save for a part of the state, loss rank by loss rank."""
        return [rank_key(part, rank) for rank in range(self.total)]

    def share(self, saved: RankCounts, rank: int) -> range:
        """Which of the ranks that saved a checkpoint one of these stands for: itself if they are as many, else all of some loss ranks."""
        if saved == self:
            return range(rank, rank + 1)
        of_loss = share_of(rank // self.num_pipeline_ranks, self.num_loss_ranks, saved.num_loss_ranks)
        return range(of_loss.start * saved.num_pipeline_ranks, of_loss.stop * saved.num_pipeline_ranks)


def saved_counts(manifest: Manifest) -> RankCounts:
    """The ranks that saved a checkpoint. Raises CheckpointError unless it has exactly what they all save for themselves."""
    progress = manifest.values.get("progress") if isinstance(manifest.values, dict) else None
    told = RankCounts.from_values(progress if isinstance(progress, dict) else {})
    counts = RankCounts(*(number if type(number) is int and number > 0 else 0 for number in told))
    for part in PARTS:
        found = {name for name in manifest.tensors if name.startswith(rank_key(part, ""))}
        if not counts.total or len(found) != counts.total or found != set(counts.keys(part)):
            raise CheckpointError(
                f"the checkpoint says that it is of {told.num_data_ranks} data ranks with {told.num_pipeline_ranks} pipeline and "
                f"{told.num_context_ranks} context ranks each, and holds {part!r} of {len(found)}; no run saves such a one: it was "
                "altered, or saved by something else than a Trainer"
            )
    return counts


def rank_key(part: str, rank: int | str) -> str:
    """The key of what a rank has for a part of the state; how all of them begin, for an empty text."""
    return f"{part}/ranks/{rank}"


def share_of(rank: int, num_ranks: int, num_saved: int) -> range:
    """Which of the saved loss ranks one of now stands for: itself if their number is the same, else a share in their order."""
    return range(rank * num_saved // num_ranks, (rank + 1) * num_saved // num_ranks)


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
        raise CheckpointError(f"the state of a rank in the checkpoint cannot be read: {type(error).__name__}: {error}") from error


def _encoded(name: str, tensor: torch.Tensor) -> list[Any]:
    if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided or tensor.is_meta:
        raise CheckpointError(f"{name} is {tensor.dtype}, {tensor.layout}, on {tensor.device}; dense tensors with data were expected")
    host = on_host(tensor)
    return [DTYPE_NAMES[tensor.dtype], list(tensor.shape), tensor_bytes(host).hex()]


def _decoded(dtype: str, shape: Iterable[int], text: str) -> torch.Tensor:
    data = bytearray.fromhex(text)
    found = torch.frombuffer(data, dtype=DTYPES[dtype]) if data else torch.empty(0, dtype=DTYPES[dtype])
    return found.view(tuple(shape))
