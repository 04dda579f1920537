"""`MeshStrategy`: the degrees of parallelism a user asks for. Only numbers; `build()` makes the context."""

from __future__ import annotations

import math
import os

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from trainer_kit.exceptions import ConfigurationError, UnsupportedError, explain_settings
from trainer_kit.mesh.context import DistributedContext

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp_shard", "cp_replicate", "tp")


class MeshStrategy(BaseModel):
    """Degrees of parallelism. Exactly one of `dp_replicate` and `dp_shard` may be -1: what is left of the world.

    Without a launcher the world is one process, and the default needs no process group.
    `device` is a device or its type, such as "cpu"; None takes the accelerator if there is one. A given name always wins.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    pp: int = 1
    dp_replicate: int = -1
    dp_shard: int = 1
    cp_shard: int = 1
    cp_replicate: int = 1
    tp: int = 1
    ep: int = 1
    device: str | None = None

    def __init__(self, **degrees: object) -> None:
        if degrees.get("dp_shard") == -1 and "dp_replicate" not in degrees:
            degrees["dp_replicate"] = 1
        try:
            super().__init__(**degrees)
        except ValidationError as error:
            raise explain_settings("MeshStrategy", error, type(self).model_fields) from None

    @field_validator(*DEGREES, "ep")
    @classmethod
    def _is_degree(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError("a degree is a positive number, or -1 for what is left of the world")
        return value

    def resolve(self, world_size: int) -> MeshStrategy:
        """The same strategy with every degree given; raises ConfigurationError unless they multiply to the world size."""
        degrees = {name: getattr(self, name) for name in DEGREES}
        free = [name for name, degree in degrees.items() if degree == -1]
        if len(free) > 1 or any(name not in ("dp_replicate", "dp_shard") for name in free):
            raise ConfigurationError(f"only one of dp_replicate and dp_shard of MeshStrategy may be -1, found -1 in {', '.join(free)}")
        known = math.prod(degree for degree in degrees.values() if degree != -1)
        if free and world_size % known == 0:
            degrees[free[0]] = world_size // known
        if math.prod(degrees.values()) != world_size or -1 in degrees.values():
            product = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree != 1) or "1"
            raise ConfigurationError(
                f"the degrees of MeshStrategy are {product}, without -1 {known}, but the world has {world_size} "
                f"rank{'s' if world_size > 1 else ''}; change a degree, or the number of processes given to torchrun"
            )
        return self.model_copy(update=degrees)

    def build(self) -> DistributedContext:
        """The context of this process, from the launcher's environment."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        resolved = self.resolve(world_size)
        if world_size > 1:
            raise UnsupportedError(f"{world_size} ranks were started, but this version of trainer_kit trains on one process")
        if resolved.ep != 1:
            raise ConfigurationError(f"ep={resolved.ep} of MeshStrategy has no effect on one rank; leave it at 1")
        return DistributedContext(strategy=resolved, device=_device(self.device))


def _device(name: str | None) -> torch.device:
    if name is None:
        if torch.accelerator.is_available():
            return torch.accelerator.current_accelerator() or torch.device("cpu")
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"device={name!r} of MeshStrategy is no torch device: {error}") from None
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device.type != "cpu" and (here is None or here.type != device.type):
        raise ConfigurationError(f"device={name!r} of MeshStrategy is not available here; available: cpu{f', {here.type}' if here else ''}")
    return device
