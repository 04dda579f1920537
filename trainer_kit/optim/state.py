"""The state of an optimizer as a checkpoint needs it: tensors and plain values by parameter name, and back without a cast.

Not `Optimizer.state_dict`: it numbers the parameters, and its loading casts moments to the dtype of the parameter.
A key is `<parameter name>/<state key>`. A loaded tensor keeps its saved dtype and bits, whatever the fresh state had.
Creating the state before a load is in `materialize.py`; the hyperparameters of the groups are in `group_values.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trainer_kit.exceptions import CheckpointError, UnsupportedError
from trainer_kit.optim.combined import CombinedOptimizer

Names = Mapping[torch.nn.Parameter, str]
PLAIN = (bool, int, float, str, type(None))


def named_parameters(optimizer: torch.optim.Optimizer, names: Names) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The optimizer's parameters with their names, in its order."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, torch.Tensor]:
    """The live tensors of the state, by `<parameter name>/<state key>`."""
    return {key: value for key, value in _entries(optimizer, names) if isinstance(value, torch.Tensor)}


def optimizer_values(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """The rest, in plain values: `optimizer`, the class names of its parts, in order; `state` by key as for the tensors; and `stateless`,
    the parameters without any state yet."""
    return {
        "optimizer": _kinds(optimizer),
        "state": {key: value for key, value in _entries(optimizer, names) if not isinstance(value, torch.Tensor)},
        "stateless": [name for name, parameter in named_parameters(optimizer, names) if not optimizer.state.get(parameter)],
    }


def _kinds(optimizer: torch.optim.Optimizer) -> list[str]:
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)
    return [type(part).__name__ for part in parts]


def _entries(optimizer: torch.optim.Optimizer, names: Names) -> Iterator[tuple[str, Any]]:
    for name, parameter in named_parameters(optimizer, names):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, (torch.Tensor, *PLAIN)):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r} of {name!r}; only tensors and plain values "
                    "can be saved and shared among ranks. Use another optimizer="
                )
            yield f"{name}/{key}", value


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
    parameters = dict(named_parameters(optimizer, names))
    for name in values.get("stateless", ()):
        optimizer.state.pop(parameters[name], None)
    changed: dict[str, int] = {}
    for key, fresh in dict(_entries(optimizer, names)).items():
        name, state_key = key.rsplit("/", 1)
        value = saved[key]
        if isinstance(fresh, torch.Tensor) and fresh.dtype != value.dtype:
            remark = f"optimizer state {state_key!r} is {value.dtype} in the checkpoint and {fresh.dtype} by the settings: kept as saved"
            changed[remark] = changed.get(remark, 0) + 1
        optimizer.state[parameters[name]][state_key] = _placed(fresh, value)
    return [f"{remark} ({count} parameters)" for remark, count in changed.items()]


@torch.no_grad()
def _placed(fresh: Any, value: Any) -> Any:
    """The saved value at the place of the fresh one: same object if the dtype fits, else a new tensor on the same device."""
    if not isinstance(fresh, torch.Tensor):
        return value
    if fresh is value:
        return fresh
    if fresh.dtype == value.dtype:
        return fresh.copy_(value)
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
    stateless = set(values.get("stateless", ()))
    foreign = stateless - {name for name, _ in named_parameters(optimizer, names)}
    live = {key: value for key, value in _entries(optimizer, names) if key.rsplit("/", 1)[0] not in stateless}
    plain = values.get("state", {})
    _check_keys(type(optimizer).__name__, live, [*shapes, *(key for key in plain if key not in shapes)], sorted(foreign))
    for key, fresh in live.items():
        if isinstance(fresh, torch.Tensor) != (key not in plain):
            found = type(plain[key]).__name__ if key in plain else "Tensor"
            raise CheckpointError(f"optimizer state {key!r} is a {found} in the checkpoint, expected a {type(fresh).__name__}")
        if isinstance(fresh, torch.Tensor) and tuple(fresh.shape) != tuple(shapes[key]):
            raise CheckpointError(
                f"optimizer state {key!r} has shape {tuple(shapes[key])} in the checkpoint, expected {tuple(fresh.shape)}; "
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
