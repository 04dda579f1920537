"""Which parameter gets which learning rate and weight decay: torch param_groups from names and shapes.

Rules, first match wins: the user's `groups` in order; then `no_decay` patterns and, by default, everything with fewer than two dims
(norms, biases), whose weight decay is 0. A pattern without effect is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from pydantic import Field, model_validator

from trainer_kit.exceptions import ConfigurationError, nearest
from trainer_kit.optim.provider import NamedParameters
from trainer_kit.optim.settings import Settings


class ParameterGroup(Settings):
    """Own values for the parameters whose name matches `pattern` (shell style: `*`, `?`, `[...]`); None keeps the optimizer's.

    A weight decay given here holds for norms and biases too.
    """

    pattern: str = Field(min_length=1)
    lr: float | None = Field(default=None, ge=0)
    weight_decay: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _check_effect(self) -> ParameterGroup:
        if self.lr is None and self.weight_decay is None:
            raise ConfigurationError(f"the group of {self.pattern!r} sets nothing; give it lr= or weight_decay=")
        return self


def matching(pattern: str, names: Sequence[str], argument: str) -> set[str]:
    """The names that match; ConfigurationError naming the pattern if there are none."""
    found = {name for name in names if fnmatchcase(name, pattern)}
    if not found:
        hint = nearest(pattern, names) if len(names) <= 8 else f"the first names are {', '.join(map(repr, list(names)[:4]))}"
        raise ConfigurationError(f"{argument}: the pattern {pattern!r} matches none of the {len(names)} parameters here; {hint}")
    return found


def build_groups(
    parameters: NamedParameters,
    *,
    lr: float,
    weight_decay: float,
    no_decay: Sequence[str] = (),
    decay_vectors: bool = False,
    groups: Sequence[ParameterGroup] = (),
) -> list[dict[str, Any]]:
    """Groups in torch's form, with `name` and named `params`; in the order of first use, none empty."""
    names = [name for name, _ in parameters]
    owner = _owners(names, groups)
    exempt = set().union(*(matching(pattern, names, "no_decay") for pattern in no_decay))
    if not decay_vectors:
        exempt |= {name for name, parameter in parameters if parameter.ndim < 2}
    result: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters:
        label, values = _values(owner.get(name), lr, weight_decay, name in exempt)
        result.setdefault(label, {"name": label, "params": [], **values})["params"].append((name, parameter))
    return list(result.values())


def _owners(names: Sequence[str], groups: Sequence[ParameterGroup]) -> dict[str, ParameterGroup]:
    owner: dict[str, ParameterGroup] = {}
    for index, group in enumerate(groups):
        taken = len(owner)
        for name in matching(group.pattern, names, f"groups[{index}]"):
            owner.setdefault(name, group)
        if len(owner) == taken:
            raise ConfigurationError(
                f"groups[{index}]: every parameter that {group.pattern!r} matches belongs to an earlier group; "
                "put the narrower pattern first, or remove it"
            )
    return owner


def _values(group: ParameterGroup | None, lr: float, weight_decay: float, exempt: bool) -> tuple[str, dict[str, float]]:
    """The label and the values of one parameter: its group's, and no decay unless that group asks for some."""
    base = group.pattern if group else ""
    if group and group.lr is not None:
        lr = group.lr
    if group and group.weight_decay is not None:
        return base, {"lr": lr, "weight_decay": group.weight_decay}
    if exempt and weight_decay:
        return f"{base}/no_decay".lstrip("/"), {"lr": lr, "weight_decay": 0.0}
    return base or "default", {"lr": lr, "weight_decay": weight_decay}
