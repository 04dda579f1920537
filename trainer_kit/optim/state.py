"""The state of an optimizer as a checkpoint needs it: tensors and plain values by parameter name, and back without a cast.

Not `Optimizer.state_dict`: it numbers the parameters, and its loading casts moments to the dtype of the parameter.
A key is `<parameter name>/<state key>`. A loaded tensor keeps its saved dtype and bits, whatever the fresh state had.
The optimizer holds local tensors; outside, a state tensor has the layout of its parameter, and its whole shape, around the same memory.
What a parameter on the meta device stands for is updated on another rank, which has its state. All functions take, for each parameter
that the optimizer holds, its name, or on a mesh its row (`Update.parameters`).
Creating the state before a load is in `materialize.py`; the hyperparameters of the groups are in `group_values.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer_kit.exceptions import CheckpointError, UnsupportedError
from trainer_kit.optim.combined import CombinedOptimizer
from trainer_kit.parameters import ParameterRow

Names = Mapping[torch.nn.Parameter, str] | Mapping[torch.nn.Parameter, ParameterRow]
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One value in the state of a parameter. `row`: None where the parameter is known to be whole."""

    parameter: torch.nn.Parameter
    row: ParameterRow | None
    state_key: str
    value: Any

    @property
    def is_cut(self) -> bool:
        """Whether it is a part of a tensor that is cut as its parameter is."""
        return self.row is not None and not self.row.layout.is_whole and self.value.shape == self.parameter.shape

    def outside(self, local: torch.Tensor) -> torch.Tensor:
        """`local` in the layout that this state has outside."""
        return self.row.laid_out(local) if self.row is not None and self.is_cut else local

    def inside(self, saved: torch.Tensor) -> torch.Tensor:
        """The part of a tensor from outside, in the layout of the parameter or whole, that belongs here."""
        return self.row.part_of(saved) if self.row is not None and self.is_cut else saved

    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.row.layout.shape if self.row is not None and self.is_cut else tuple(self.value.shape)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, torch.Tensor]:
    """The live tensors of the state, by `<parameter name>/<state key>`; those that are cut over ranks as DTensors around their memory."""
    entries = _entries(optimizer, names)
    return {key: entry.outside(entry.value) for key, entry in entries if isinstance(entry.value, torch.Tensor)}


def optimizer_templates(optimizer: torch.optim.Optimizer, names: Names, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Tensors to load saved state into, for `load_optimizer_state`: the live ones, or new ones where the saved dtype is another.

    dtypes: of the saved tensors, by key; those whose state is not here are left out.
    """
    templates = {}
    for key, entry in _entries(optimizer, names):
        if isinstance(entry.value, torch.Tensor) and key in dtypes:
            fits = entry.value.dtype == dtypes[key]
            templates[key] = entry.outside(entry.value if fits else torch.empty_like(entry.value, dtype=dtypes[key]))
    return templates


def optimizer_values(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """The rest, in plain values: `optimizer`, the class names of its parts, in order; `state` by key as for the tensors; and `stateless`,
    the parameters without any state yet."""
    held = _held(optimizer, names)
    return {
        "optimizer": _kinds(optimizer),
        "state": {key: entry.value for key, entry in _entries(optimizer, names) if not isinstance(entry.value, torch.Tensor)},
        "stateless": [name for name, parameter, _ in held if not parameter.is_meta and not optimizer.state.get(parameter)],
    }


def merge_optimizer_values(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values of the whole run from those of all ranks, of which each knows the parameters whose state it has.

    Raises CheckpointError if two ranks differ about the same state.
    """
    stateless = dict.fromkeys(name for values in of_ranks for name in values["stateless"])
    merged: dict[str, Any] = {"optimizer": of_ranks[0]["optimizer"], "state": {}, "stateless": list(stateless)}
    known: dict[str, tuple[int, str]] = {}
    for rank, values in enumerate(of_ranks):
        _check_kinds(values["optimizer"], merged["optimizer"])
        found = {**values["state"], **dict.fromkeys(values["stateless"], "no state")}
        for key, value in found.items():
            first, text = known.setdefault(key, (rank, repr(value)))
            if text != repr(value):
                raise CheckpointError(f"optimizer state {key!r} is {text} on rank {first} and {value!r} on rank {rank}; it cannot be saved")
        merged["state"] |= values["state"]
    return merged


def _held(optimizer: torch.optim.Optimizer, names: Names) -> Iterator[tuple[str, torch.nn.Parameter, ParameterRow | None]]:
    """The optimizer's parameters with their names and, if given, rows; in its order."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            known = names[parameter]
            yield (known, parameter, None) if isinstance(known, str) else (known.name, parameter, known)


def _kinds(optimizer: torch.optim.Optimizer) -> list[str]:
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)
    return [getattr(part, "saved_as", type(part).__name__) for part in parts]


def _entries(optimizer: torch.optim.Optimizer, names: Names) -> Iterator[tuple[str, _Entry]]:
    """The state that is here, by key."""
    for name, parameter, row in _held(optimizer, names):
        if parameter.is_meta:
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, (torch.Tensor, *PLAIN)):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r} of {name!r}; only tensors and plain values "
                    "can be saved and shared among ranks. Use another optimizer="
                )
            entry = _Entry(parameter, row, key, value)
            if isinstance(value, torch.Tensor):
                _check_kind(entry, name, type(optimizer).__name__)
            yield f"{name}/{key}", entry


def _check_kind(entry: _Entry, name: str, kind: str) -> None:
    if entry.row is not None and not entry.row.layout.is_whole and entry.value.numel() != 1 and not entry.is_cut:
        raise UnsupportedError(
            f"{kind} keeps a tensor of shape {tuple(entry.value.shape)} as {entry.state_key!r} of {name!r}, of which this rank holds a "
            f"part of shape {tuple(entry.parameter.shape)}: that is neither one number nor cut as the parameter is. Set "
            "elementwise = False in the provider of this optimizer, so that it gets whole parameters"
        )


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Names, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any] | None = None
) -> list[str]:
    """Put saved state in place of the state of a materialised optimizer; returns remarks to print, one per difference in dtype.

    Tensors are copied into the live ones where the dtype is the same, so tensors read in place cost nothing.
    Raises CheckpointError, before anything changes, as `check_optimizer_state` does.
    """
    values = values or {}
    check_optimizer_state(optimizer, names, {key: tuple(tensor.shape) for key, tensor in tensors.items()}, values)
    saved = {**tensors, **values.get("state", {})}
    parameters = {name: parameter for name, parameter, _ in _held(optimizer, names)}
    for name in values.get("stateless", ()):
        optimizer.state.pop(parameters[name], None)
    changed: dict[str, int] = {}
    for key, entry in list(_entries(optimizer, names)):
        value, fresh = saved[key], entry.value
        if isinstance(fresh, torch.Tensor) and fresh.dtype != value.dtype:
            remark = (
                f"optimizer state {entry.state_key!r} is {value.dtype} in the checkpoint and {fresh.dtype} by the settings: kept as saved"
            )
            changed[remark] = changed.get(remark, 0) + 1
        optimizer.state[entry.parameter][entry.state_key] = _placed(entry, value)
    return [f"{remark} ({count} parameters)" for remark, count in changed.items()]


@torch.no_grad()
def _placed(entry: _Entry, value: Any) -> Any:
    """The saved value at the place of the fresh one: same object if the dtype fits, else a new tensor on the same device."""
    fresh = entry.value
    if not isinstance(fresh, torch.Tensor):
        return value
    value = entry.inside(value)
    if fresh.dtype == value.dtype:
        return fresh if fresh.data_ptr() == value.data_ptr() and fresh.stride() == value.stride() else fresh.copy_(value)
    return torch.empty_like(fresh, dtype=value.dtype).copy_(value)


def check_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Names, shapes: Mapping[str, Sequence[int]], values: Mapping[str, Any] | None = None
) -> None:
    """Whether saved state fits a materialised optimizer, known before any tensor is read.

    shapes: of the saved tensors, by `<parameter name>/<state key>`. values: as `optimizer_values` gave them.
    Raises CheckpointError if it is of another kind of optimizer, or naming state that is missing, unexpected or of another shape.
    """
    values = values or {}
    _check_kinds(values.get("optimizer"), _kinds(optimizer))
    held = {name: parameter for name, parameter, _ in _held(optimizer, names)}
    elsewhere = {name for name, parameter in held.items() if parameter.is_meta}
    stateless = set(values.get("stateless", ()))
    live = {key: entry for key, entry in _entries(optimizer, names) if key.rsplit("/", 1)[0] not in stateless}
    plain = values.get("state", {})
    saved = [key for key in dict.fromkeys((*shapes, *plain)) if key.rsplit("/", 1)[0] not in elsewhere]
    _check_keys(type(optimizer).__name__, live, saved, sorted(stateless - held.keys()))
    for key, entry in live.items():
        fresh = entry.value
        if isinstance(fresh, torch.Tensor) != (key not in plain):
            found = type(plain[key]).__name__ if key in plain else "Tensor"
            raise CheckpointError(f"optimizer state {key!r} is a {found} in the checkpoint, expected a {type(fresh).__name__}")
        if isinstance(fresh, torch.Tensor) and entry.shape() != tuple(shapes[key]):
            raise CheckpointError(
                f"optimizer state {key!r} has shape {tuple(shapes[key])} in the checkpoint, expected {entry.shape()}; "
                "was the model changed?"
            )


def _check_kinds(saved: list[str] | None, now: list[str]) -> None:
    """Equal keys are not enough: Adam's state would fit AdamW, and the absent one of plain SGD any optimizer."""
    if saved is not None and saved != now:
        raise CheckpointError(
            f"the optimizer state of the checkpoint is that of {' and '.join(saved)}, this run has {' and '.join(now)}. "
            "Set optimizer= to the saved one, or load without the part 'optimizer' to start it afresh"
        )


def _check_keys(kind: str, live: Mapping[str, Any], saved: Sequence[str], foreign: list[str]) -> None:
    known = set(saved)
    missing = [key for key in live if key not in known]
    unexpected = [key for key in saved if key not in live] + foreign
    if missing or unexpected:
        parts = [f"{label} {_shown(keys)}" for label, keys in (("missing", missing), ("unexpected", unexpected)) if keys]
        raise CheckpointError(
            f"the optimizer state of the checkpoint does not fit {kind}: {'; '.join(parts)}. "
            "Was it saved with another optimizer= or model? Load without the part 'optimizer' to start it afresh"
        )


def _shown(keys: list[str]) -> str:
    return ", ".join(map(repr, keys[:4])) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
