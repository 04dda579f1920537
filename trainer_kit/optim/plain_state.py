"""The state of a torch LRScheduler as a checkpoint can hold it: subclasses of the plain types become plain, and what they were on a load.

Not here: what may be in a checkpoint (`checkpoint/tree.py`), which refuses, by name, whatever is left over. The types to restore come
from the live state, never from the file: MultiStepLR keeps a Counter and counts on its answer for absent keys.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


def to_plain(value: Any) -> Any:
    """Mappings become dicts, sets sorted lists, numbers int or float; containers are new, so the result does not change later."""
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_plain, value))
    if isinstance(value, (set, frozenset)):
        return sorted(map(to_plain, value), key=repr)
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def comparable(value: Any) -> Any:
    """Plain and without tensors: equal states are equal by `==`, also after a checkpoint."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    return value


def restored_like(live: Any, saved: Any) -> Any:
    """`saved`, from `to_plain`, with the types of containers that `live` has at the same places."""
    if isinstance(saved, dict) and isinstance(live, MutableMapping):
        items = {key: restored_like(live[key], item) if key in live else item for key, item in saved.items()}
        if type(live) is dict:
            return items
        filled = copy.copy(live)  # keeps what else it holds, such as the factory of a defaultdict
        filled.clear()
        filled.update(items)
        return filled
    if isinstance(saved, (list, tuple)) and type(live) is type(saved) and len(live) == len(saved):
        return type(saved)(map(restored_like, live, saved))
    return type(live)(saved) if isinstance(live, (set, frozenset)) else saved
