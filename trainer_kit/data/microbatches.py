"""Reading one microbatch of a map-style dataset: fetch the samples, collate them.

Not here: which samples (`sampler.py`), and in which process (`provider.py`, `workers.py`). The one thing to know before editing:
this is the hot path of small models, so nothing is done per sample beyond the dataset's own work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate

Indices = torch.Tensor | range | list[int]


class MicrobatchReader:
    """A dataset and the way its samples become a microbatch. It can be pickled if both of them can."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._dataset = dataset
        self._collate = default_collate if collate_fn is None else collate_fn
        self._get_items = getattr(dataset, "__getitems__", None)
        self._tensors = _plain_tensors(dataset) if collate_fn is None else None

    @property
    def runs_user_code(self) -> bool:
        """Whether reading calls code that may draw random numbers."""
        return self._tensors is None

    def read(self, indices: Indices) -> Any:
        """The microbatch of these samples. Errors keep their type and traceback and get a note that names the samples."""
        if self._tensors is not None:
            return _select(self._tensors, indices)
        chosen = indices.tolist() if isinstance(indices, torch.Tensor) else list(indices)
        try:
            samples = self._get_items(chosen) if self._get_items is not None else [self._dataset[index] for index in chosen]
        except Exception as error:
            error.add_note(f"raised by {type(self._dataset).__name__} while fetching the samples {chosen}")
            raise
        try:
            return self._collate(samples)
        except Exception as error:
            name = getattr(self._collate, "__qualname__", type(self._collate).__name__)
            error.add_note(f"raised by collate_fn={name} for the samples {chosen}")
            raise


def _plain_tensors(dataset: Any) -> tuple[torch.Tensor, ...] | None:
    """The tensors of a TensorDataset that can be indexed at once, with the result of collating sample by sample."""
    if type(dataset) is not TensorDataset:
        return None
    plain = all(type(t) is torch.Tensor and t.layout is torch.strided and not t.is_quantized for t in dataset.tensors)
    return dataset.tensors if plain else None


def _select(tensors: tuple[torch.Tensor, ...], indices: Indices) -> list[torch.Tensor]:
    """Copies of the rows, as a list, which is what `default_collate` makes of tuples."""
    if isinstance(indices, range):  # positions of an unshuffled epoch: neighbours
        return [t[indices.start : indices.stop].clone(memory_format=torch.contiguous_format) for t in tensors]
    index = indices if isinstance(indices, torch.Tensor) else torch.tensor(indices)
    return [t.index_select(0, index if t.device.type == "cpu" else index.to(t.device)) for t in tensors]
