"""One document of a user, as the tensors that packing works on, or an error that names it.

The one thing to know before editing: every document comes through here each time it is read, so checks that look at all tokens cost time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from trainer_kit.exceptions import ConfigurationError


class Document(NamedTuple):
    """Tokens (n,) and labels (n,), both int64; labels as in transformers, not shifted."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def read_document(found: Any, number: int) -> Document:
    """A sequence of integers, or a mapping with `input_ids` and perhaps `labels`."""
    name = f"document {number} of documents="
    if not isinstance(found, Mapping):
        tokens = _integers(found, name)
        return Document(tokens, tokens)
    if "input_ids" not in found:
        raise ConfigurationError(f"{name} is a mapping with {sorted(map(str, found))}, expected the entry 'input_ids'")
    tokens = _integers(found["input_ids"], f"'input_ids' of {name}")
    if found.get("labels") is None:
        return Document(tokens, tokens)
    labels = _integers(found["labels"], f"'labels' of {name}")
    if labels.shape != tokens.shape:
        raise ConfigurationError(f"{name} has {len(tokens)} 'input_ids' and {len(labels)} 'labels', expected as many of both")
    return Document(tokens, labels)


def _integers(values: Any, name: str) -> torch.Tensor:
    """`values` as int64 of shape (n,), n at least 1."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
        hint = "; tokenize it first" if isinstance(values, str) else ""
        raise ConfigurationError(f"{name} is a {type(values).__name__}, expected a sequence of integers{hint}")
    if len(values) == 0:
        raise ConfigurationError(f"{name} is empty, expected at least one token; leave empty documents out")
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"{name} is no sequence of integers: {error}") from error
    if tensor.ndim != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ConfigurationError(f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype}, expected integers of shape (num_tokens,)")
    return tensor.to(torch.int64)
