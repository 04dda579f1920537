"""Where this process stands in the world, as the launcher's environment or an existing process group says it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trainer_kit.exceptions import ConfigurationError

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Place:
    """Numbers of this process. `local_rank` counts on one machine, `node` numbers the machines."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: int = 0


def find_place(environment: Mapping[str, str] = os.environ) -> Place:
    """The place in an existing default process group, which must agree with the environment, else the one in the environment."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return _from_environment(environment)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        said = _number(environment, name, default=value)
        if said != value:
            raise ConfigurationError(
                f"{name}={said} in the environment, but the default process group, which exists already, says {value}; "
                "destroy that group, or start all processes with one launcher"
            )
    local_rank = _number(environment, "LOCAL_RANK", default=rank)
    return Place(rank, world_size, local_rank, _number(environment, "GROUP_RANK", default=0))


def _from_environment(environment: Mapping[str, str]) -> Place:
    world_size = _number(environment, "WORLD_SIZE", default=1)
    if "WORLD_SIZE" not in environment and "RANK" in environment:
        raise ConfigurationError(
            f"RANK={environment['RANK']} is set but WORLD_SIZE is not; start with torchrun or trainer_kit.launch, "
            "or unset RANK for one process"
        )
    if world_size == 1:
        return Place()
    if missing := [name for name in _NEEDED if not environment.get(name)]:
        raise ConfigurationError(
            f"WORLD_SIZE={world_size} is set but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not; "
            "start with torchrun or trainer_kit.launch, which set all of them"
        )
    rank = _number(environment, "RANK", default=0)
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"RANK={rank} and WORLD_SIZE={world_size}: expected a rank from 0 to {world_size - 1}")
    return Place(rank, world_size, _number(environment, "LOCAL_RANK", default=0), _number(environment, "GROUP_RANK", default=0))


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} in the environment: expected a number") from None
