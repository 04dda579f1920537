"""Loads a checkpoint into tensors that exist already.

Everything is checked first (manifest, keys, shapes, dtypes, files), on a mesh by all ranks; only then the tensors are filled, in place.
Values are returned, not applied: who owns a state takes it back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trainer_kit.checkpoint.checks import TensorRecord
from trainer_kit.checkpoint.manifest import Manifest, read_manifest
from trainer_kit.exceptions import CheckpointError
from trainer_kit.mesh.team import Team
from trainer_kit.storage import Folder

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext

MAX_NAMES = 10
T = TypeVar("T")


def load(
    path: str | os.PathLike[str] | Folder,
    templates: Mapping[str, torch.Tensor],
    *,
    verify: bool = True,
    strict: bool = True,
    prefixes: Sequence[str] | None = None,
    manifest: Manifest | None = None,
    context: DistributedContext | None = None,
) -> Any:
    """Fill `templates` (by key, as `flatten_state` names them) in place and return the saved values for `unflatten_state`.

    Any mesh can load what any other one saved. With the `context` of several ranks all of them call it, each with its templates.

    prefixes: only saved tensors whose key begins with one of these belong to this load (`["model/"]`).
    strict: False leaves templates alone that were not saved, and ignores saved tensors without a template.
    manifest: the manifest of this folder if it was read already.
    Raises CheckpointError, on a mesh the same one on every rank, if anything is damaged, missing, unexpected, or of another shape or
    dtype; nothing was changed then.
    """
    from trainer_kit.checkpoint.reader import CheckpointReader, plan_reads

    folder, team = path if isinstance(path, Folder) else Folder(path), Team.of(context)
    found = manifest or _of_the_load(folder, lambda: read_manifest(folder, verify=verify, context=context))

    def checked() -> Callable[[], None]:
        saved = {n: r for n, r in found.tensors.items() if prefixes is None or n.startswith(tuple(prefixes))}
        if strict:
            _check_keys(saved, templates, folder)
        wanted = {name: tensor for name, tensor in templates.items() if name in saved}
        for name, tensor in wanted.items():
            _check_template(name, saved[name], tensor, folder)
        return plan_reads(CheckpointReader(folder, found, verify=verify, team=team), wanted)

    fill = team.everywhere(lambda: _of_the_load(folder, checked))
    team.everywhere(lambda: _of_the_load(folder, fill))
    return found.values


def _of_the_load(folder: Folder, action: Callable[[], T]) -> T:
    try:
        return action()
    except OSError as error:
        raise CheckpointError(f"loading {folder.path()} failed: {error}") from error


def _check_keys(saved: Mapping[str, TensorRecord], templates: Mapping[str, torch.Tensor], folder: Folder) -> None:
    missing = [name for name in templates if name not in saved]
    unexpected = [name for name in saved if name not in templates]
    if missing or unexpected:
        parts = [f"{what}: {_listed(names)}" for what, names in (("not in it", missing), ("not in this run", unexpected)) if names]
        raise CheckpointError(
            f"{folder.path()} does not fit this run; {'; '.join(parts)}. The model, the optimizer or the callbacks differ from those "
            "that were saved: build the same ones, or load only some parts"
        )


def _check_template(name: str, record: TensorRecord, tensor: torch.Tensor, folder: Folder) -> None:
    if tuple(tensor.shape) != record.shape or tensor.dtype != record.dtype:
        raise CheckpointError(
            f"{name} is {record.dtype} of shape {record.shape} in {folder.path()}, but {tensor.dtype} of shape {tuple(tensor.shape)} "
            "in this run; a checkpoint is never converted. Build the model and the optimizer with the saved shape and precision="
        )
    if tensor.is_meta or tensor.layout != torch.strided:
        raise CheckpointError(f"{name} cannot be loaded into a tensor on {tensor.device} with layout {tensor.layout}; allocate it first")


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f", and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return ", ".join(found[:MAX_NAMES]) + more
