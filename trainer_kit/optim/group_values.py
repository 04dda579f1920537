"""The hyperparameters of the param_groups in a checkpoint: what was set by the user, and what a callback changed during the run.

Both are saved. On a resume a value that the settings still have is put back as it was at the save (a callback may have changed it);
a value that the settings changed stays as set now, and is reported. `lr` under a schedule is then set again by the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

CONFIGURED = "configured"
# Where the values came from or how the step is computed, not what the update is.
_NOT_SAVED = {"params", "param_names", "name", "initial_lr", "base_lr", "fused", "foreach", "capturable", "differentiable", CONFIGURED}


def plain_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, flags and texts of a group, in the form that they have after a round trip through JSON."""
    return {key: plain for key, value in group.items() if key not in _NOT_SAVED and (plain := _plain(value)) is not NotImplemented}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else NotImplemented
    if isinstance(value, (tuple, list)):
        parts = [_plain(part) for part in value]
        return NotImplemented if NotImplemented in parts else parts
    return value if isinstance(value, (bool, int, float, str, type(None))) else NotImplemented


def remember_configured(optimizer: torch.optim.Optimizer) -> None:
    """Keep each group's values as the settings made them, under the group's key "configured"."""
    for group in optimizer.param_groups:
        group.setdefault(CONFIGURED, plain_values(group))


def group_values(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """For each group, by its name (or `group0`, ...): its values now, and as configured."""
    return {
        label: {"values": plain_values(group), CONFIGURED: dict(group.get(CONFIGURED, plain_values(group)))}
        for label, group in _labelled(optimizer).items()
    }


def load_group_values(optimizer: torch.optim.Optimizer, saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Put back what `group_values` gave; returns one remark per difference between the settings then and now."""
    groups = _labelled(optimizer)
    remarks = [f"optimizer group {label!r} is not in the checkpoint" for label in groups if label not in saved]
    remarks += [f"optimizer group {label!r} of the checkpoint is no longer there" for label in saved if label not in groups]
    for label, group in groups.items():
        if label not in saved:
            continue
        now, then, values = group.get(CONFIGURED, plain_values(group)), saved[label][CONFIGURED], saved[label]["values"]
        for key, setting in now.items():
            if key in then and then[key] != setting:
                remarks.append(f"optimizer group {label!r}: {key} was {then[key]}, is {setting} now")
            elif key in values:
                _put(group, key, values[key])
    return remarks


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    current = group[key]
    if isinstance(current, torch.Tensor):
        current.fill_(value)
    else:
        group[key] = tuple(value) if isinstance(current, tuple) else value


def _labelled(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {str(group.get("name", f"group{index}")): group for index, group in enumerate(optimizer.param_groups)}
