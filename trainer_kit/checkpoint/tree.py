"""Takes a nested state apart into tensors, which are stored as bytes, and plain values, which are stored as JSON; and back.

Not here: what belongs into a state. Plain types come back as they were (bool, int of any size, float with inf and nan, str, None,
list, tuple, dict with str or int keys); an OrderedDict comes back as a dict, a Parameter as a Tensor. Anything else is refused
when saving, with its full key: a checkpoint is data, and a class that is rebuilt from a name in a file would be code.

What JSON cannot say is written as an object with one key that begins with `$`: `{"$tuple": [...]}`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from trainer_kit.exceptions import CheckpointError

MAX_PLAIN_INT = 2**63  # larger ones are written in hexadecimal: other JSON readers cut them, and Python limits decimal digits
FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def flatten_state(nested: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Split a nested state into tensors by key (`model/layers.0.weight`) and JSON-able values that point to them.

    The values of a part, `values["model"]`, can be given to `unflatten_state` alone. Tensors are not copied.
    Raises CheckpointError naming the key of the first thing that is neither a tensor nor plain.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        return tensors, _encode(nested, "", tensors)
    except RecursionError:
        raise CheckpointError("the state to save is nested too deeply; the usual cause is a dict or list that contains itself") from None


def _encode(value: Any, key: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if abs(value) < MAX_PLAIN_INT else {"$int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, torch.Tensor):
        if key in tensors:
            raise CheckpointError(f"two tensors to save have the key {key!r}; a name that contains '/' is the usual cause, rename one")
        tensors[key] = value.detach()
        return {"$tensor": key}
    if type(value) in (list, tuple):
        items = [_encode(item, _join(key, index), tensors) for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in (dict, OrderedDict):
        return _encode_dict(value, key, tensors)
    raise CheckpointError(
        f"{key or 'the state'}: found {type(value).__module__}.{type(value).__qualname__}, which cannot be saved; "
        "a state_dict() may hold tensors, None, bool, int, float, str, and lists, tuples and dicts of these. Convert it there"
    )


def _encode_dict(value: Mapping[Any, Any], key: str, tensors: dict[str, torch.Tensor]) -> Any:
    for name in value:
        if type(name) not in (str, int):
            raise CheckpointError(f"{key or 'the state'}: found the key {name!r} of type {type(name).__name__}; keys must be str or int")
    items = [(name, _encode(item, _join(key, name), tensors)) for name, item in value.items()]
    return _dict_of([[name if type(name) is str else _encode(name, key, tensors), item] for name, item in items])


def _dict_of(items: list[list[Any]]) -> dict[str, Any]:
    """The dict with these encoded keys and values; JSON keeps neither keys that are not texts, nor what has the meaning of a tag."""
    if all(type(name) is str and not name.startswith("$") for name, _ in items):
        return dict(items)
    return {"$dict": items}


def _items_of(values: Any) -> list[list[Any]] | None:
    """The encoded keys and values of what was a dict; None for anything else."""
    if not isinstance(values, dict):
        return None
    if len(values) == 1 and next(iter(values)).startswith("$"):
        return values.get("$dict")
    return [[name, item] for name, item in values.items()]


def _join(key: str, name: object) -> str:
    return f"{key}/{name}" if key else str(name)


def merge_values(of_ranks: Sequence[Any]) -> Any:
    """The values of several ranks as one: all entries of their dicts, in lists of one length too; where two say different things, what the
    first one says."""
    first = of_ranks[0]
    if isinstance(first, list):
        alike = [values for values in of_ranks if isinstance(values, list) and len(values) == len(first)]
        return [merge_values(items) for items in zip(*alike, strict=True)]
    if _items_of(first) is None:
        return first
    found: dict[str, tuple[Any, list[Any]]] = {}
    for name, item in (pair for values in of_ranks for pair in _items_of(values) or ()):
        found.setdefault(repr(name), (name, []))[1].append(item)
    return _dict_of([[name, merge_values(items)] for name, items in found.values()])


_LEFT_OUT = object()


def unflatten_state(tensors: Mapping[str, torch.Tensor], values: Any, *, without: Collection[str] = ()) -> Any:
    """Put together what `flatten_state` took apart. Raises CheckpointError for values it did not write, or a tensor that is not given.

    without: keys of tensors; what dicts have in their place is left out.
    """
    try:
        return _decode({**tensors, **dict.fromkeys(without, _LEFT_OUT)}, values)
    except RecursionError:
        raise CheckpointError("the values of the checkpoint are nested too deeply; no save writes such a file, it was altered") from None


def _decode(tensors: Mapping[str, Any], values: Any) -> Any:
    if isinstance(values, list):
        return [_decode(tensors, item) for item in values]
    if not isinstance(values, dict):
        return values
    tag, content = next(iter(values.items())) if len(values) == 1 else ("", None)
    if not tag.startswith("$"):
        return {name: item for name, value in values.items() if (item := _decode(tensors, value)) is not _LEFT_OUT}
    try:
        return _untag(tensors, tag, content)
    except (KeyError, ValueError, TypeError) as error:
        what = f"the tensor {error} is missing" if tag == "$tensor" else f"{content!r:.100} is no {tag}"
        raise CheckpointError(f"the values of the checkpoint cannot be put together: {what}") from error


def _untag(tensors: Mapping[str, Any], tag: str, content: Any) -> Any:
    match tag:
        case "$tensor":
            return tensors[content]
        case "$int":
            return int(content, 16)
        case "$float":
            return FLOATS[content]
        case "$tuple":
            return tuple(_decode(tensors, list(content)))
        case "$dict":
            items = ((_decode(tensors, name), _decode(tensors, value)) for name, value in content)
            return {name: item for name, item in items if item is not _LEFT_OUT}
    raise CheckpointError(f"the checkpoint holds a value of the unknown kind {tag!r}; it was written by a newer version or altered")
