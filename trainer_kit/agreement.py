"""The check that all ranks were started with the same settings: digests first, and the settings themselves only if those differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh import DistributedContext

MAX_LINES = 10


def check_same_settings(context: DistributedContext, settings: Mapping[str, Any]) -> None:
    """Raise ConfigurationError, on every rank, naming what differs. All ranks call it; plain values only."""
    if context.world_size == 1:
        return
    text = json.dumps(settings, sort_keys=True)
    digests = context.host.exchange(hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    leaves = [_leaves(json.loads(found)) for found in context.host.exchange(text)]
    names = [name for name in dict.fromkeys(name for rank in leaves for name in rank) if len({rank.get(name) for rank in leaves}) > 1]
    lines = [f"  {name}: " + ", ".join(f"{rank.get(name)} on rank {number}" for number, rank in enumerate(leaves)) for name in names]
    raise ConfigurationError(
        "the ranks were started with different settings; every rank must run the same script with the same arguments:\n"
        + "\n".join(lines[:MAX_LINES])
        + (f"\n  and {len(lines) - MAX_LINES} more" if len(lines) > MAX_LINES else "")
    )


def _leaves(tree: Any, prefix: str = "") -> dict[str, str]:
    """Dotted name -> value as text."""
    if not isinstance(tree, Mapping):
        return {prefix.removesuffix("."): json.dumps(tree)}
    return {name: value for key, item in tree.items() for name, value in _leaves(item, f"{prefix}{key}.").items()}
