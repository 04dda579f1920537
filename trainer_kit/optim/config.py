"""Optimizer settings as data: which provider a JSON object means.

`OptimizerConfig` is the type for a field of a pydantic model; `parse_optimizer` gives the same with errors that name the path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from trainer_kit.exceptions import ConfigurationError, nearest
from trainer_kit.optim.muon import Muon
from trainer_kit.optim.settings import settings_error
from trainer_kit.optim.stochastic import StochasticAdamW
from trainer_kit.optim.torch_optimizers import SGD, Adam, AdamW

OptimizerConfig = Annotated[AdamW | Adam | SGD | Muon | StochasticAdamW, Field(discriminator="name")]

_BY_NAME: dict[str, type[AdamW | Adam | SGD | Muon | StochasticAdamW]] = {
    provider.model_fields["name"].default: provider for provider in (AdamW, Adam, SGD, Muon, StochasticAdamW)
}


def parse_optimizer(settings: Mapping[str, Any], path: str = "optimizer") -> AdamW | Adam | SGD | Muon | StochasticAdamW:
    """A provider from plain values, chosen by `name`: `{"name": "adamw", "lr": 1e-3}`.

    Raises ConfigurationError in which every problem has its path, and an unknown key the nearest valid one.
    """
    if not isinstance(settings, Mapping):
        raise ConfigurationError(f"{path}: found {settings!r}, expected settings such as {{'name': 'adamw', 'lr': 1e-3}}")
    name = settings.get("name")
    if not isinstance(name, str) or name not in _BY_NAME:
        found = "no 'name'" if name is None else f"name {name!r}"
        raise ConfigurationError(f"{path}.name: found {found}, expected which optimizer; {nearest(str(name), _BY_NAME)}")
    try:
        return _BY_NAME[name](**settings)
    except ConfigurationError as error:
        raise (settings_error(path, error.problems) if error.problems else error) from None
