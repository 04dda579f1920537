"""Which run a checkpoint belongs to: name, seed, and a digest of the parameters' names and shapes.

Not here: where the values come from. A checkpoint of another run is refused; whatever else differs (mesh, learning rate, workers,
size of the data set) is only told, since changing it on a resume is legitimate.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.exceptions import CheckpointError
from trainer_kit.mesh.team import Team
from trainer_kit.weights.format import tensor_crc32
from trainer_kit.weights.whole import make_groups, whole_on_first

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext

_ADVICE = {
    "run_name": "set run_name= to the saved one, or use another folder",
    "seed": "set seed= to the saved one, or use another folder",
    "parameters": "the model has other parameters (names or shapes) than the saved one: build the same model, or use another folder",
}


def parameter_digest(parameters: Iterable[tuple[str, Sequence[int]]]) -> str:
    """A short text that changes with any name or shape; the order does not matter."""
    rows = sorted((name, list(shape)) for name, shape in parameters)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


def tensors_checksum(tensors: Iterable[tuple[str, torch.Tensor]], context: DistributedContext | None = None) -> str:
    """A text that changes with any bit of any tensor; costs one pass over the bytes.

    With the `context` of several ranks all of them call it, each with the tensors of its stages; distributed tensors are brought together
    one by one, so that the text is the same on any mesh.
    """
    own, found = dict(tensors), {}
    make_groups(own.values(), context)
    is_first = context is None or context.rank == context.first_rank_of_stage
    for name in sorted(own):
        whole = whole_on_first(own[name], context)
        if whole is not None and is_first:  # a replicated one is whole on every rank, and one of them is enough
            found[name] = tensor_crc32(whole, zlib.crc32(name.encode()))
    of_model = {name: checksum for of_rank in Team.of(context).exchange(found) for name, checksum in of_rank.items()}
    return f"{zlib.crc32(repr(sorted(of_model.items())).encode()):08x}"


def check_identity(found: Mapping[str, Any], expected: Mapping[str, Any], label: str) -> list[str]:
    """Compare the identity in the checkpoint `label` with that of this run.

    Raises CheckpointError if `run_name`, `seed` or `parameters` differs. Returns one line for everything else that does.
    """
    wrong = [key for key in _ADVICE if key in expected and found.get(key) != expected[key]]
    if wrong:
        lines = [f"{key}: {found.get(key)!r} in the checkpoint, {expected[key]!r} now; {_ADVICE[key]}" for key in wrong]
        raise CheckpointError(f"{label} belongs to another run.\n  " + "\n  ".join(lines))
    before, now = _leaves(found), _leaves(expected)
    keys = [key for key in {**before, **now} if before.get(key, _ABSENT) != now.get(key, _ABSENT) and key.split(".")[0] not in _ADVICE]
    return [f"{key}: {before.get(key, _ABSENT)} in the checkpoint, {now.get(key, _ABSENT)} now" for key in keys]


_ABSENT = "absent"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
