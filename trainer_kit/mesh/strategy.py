"""`MeshStrategy`: the degrees of parallelism a user asks for. Only numbers; `build()` makes the context."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from trainer_kit.exceptions import ConfigurationError, explain_settings
from trainer_kit.mesh.context import DistributedContext
from trainer_kit.mesh.domains import DEGREES, domains_of
from trainer_kit.mesh.place import Place, find_place
from trainer_kit.mesh.stages import StageLayout
from trainer_kit.mesh.world import World

if TYPE_CHECKING:
    from trainer_kit.pipeline.schedules import Schedule

_logger = logging.getLogger("trainer_kit")

DEFAULT_PIPELINE = "1f1b"


class MeshStrategy(BaseModel):
    """Degrees of parallelism. Exactly one of `dp_replicate` and `dp_shard` may be -1: what is left of the world.

    Without a launcher the world is one process, and the default needs no process group.
    `device` is a device or its type, such as "cpu"; None takes the accelerator if there is one. A given name always wins.
    `ep`: over how many ranks of a stage the experts of a model are shared out, with those of all other degrees but pp; no factor of the
    world.
    `pipeline`: the schedule of the stages with pp > 1, by its name in `trainer_kit.pipeline.schedules`; None is "1f1b".
    `stages_per_rank`: how many stages each pipeline rank hosts; None takes the number that the schedule needs, or 1.
    `fsdp_sync`: FSDP gathers weights and reduces gradients in each microbatch, or once per pack, which takes memory for whole ones.
    `context_attention`: how attention works with sequences that are cut over cp ranks: "ring", "ulysses", or None for whichever sends less.
    `backend`: of torch.distributed, such as "cpu:gloo,cuda:nccl"; None takes gloo, and on an accelerator its own next to it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    pp: int = 1
    dp_replicate: int = -1
    dp_shard: int = 1
    cp_shard: int = 1
    cp_replicate: int = 1
    tp: int = 1
    ep: int = 1
    pipeline: str | None = None
    stages_per_rank: int | None = None
    fsdp_sync: Literal["microbatch", "pack"] = "microbatch"
    context_attention: Literal["ring", "ulysses"] | None = None
    device: str | None = None
    backend: str | None = None

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

    @field_validator("pipeline")
    @classmethod
    def _is_schedule(cls, value: str | None) -> str | None:
        return None if value is None else _schedule(value).name

    @field_validator("stages_per_rank")
    @classmethod
    def _is_count(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError("a number of stages is 1 or more")
        return value

    @property
    def schedule(self) -> str:
        """The name of the pipeline schedule."""
        return self.pipeline or DEFAULT_PIPELINE

    def stage_layout(self) -> StageLayout:
        """Which stages each pipeline rank hosts; raises ConfigurationError for a number that the schedule does not take."""
        return _schedule(self.schedule).layout(self.pp, self.stages_per_rank)

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

    def build(self, *, setup_timeout: float = 1800.0, step_timeout: float = 300.0) -> DistributedContext:
        """The context of this process, from the launcher's environment. With several ranks it is a collective.

        setup_timeout, step_timeout: seconds that a collective may take while things are set up or saved, and in the loop.
        """
        place = find_place()
        resolved = self.resolve(place.world_size)
        self._check_effect(resolved, place)
        domains, stages = domains_of(resolved), resolved.stage_layout()
        if place.world_size == 1:
            return DistributedContext(strategy=resolved, device=_device(self.device))
        batch, device = domains["batch"], _device_of_rank(self.device, place)
        world = World(place, domains, device.type, self.backend, setup_timeout, step_timeout)
        return DistributedContext(
            strategy=resolved,
            device=device,
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            node=place.node,
            data_rank=batch.coordinate(place.rank, "dp"),
            num_data_ranks=batch.size("dp"),
            context_rank=batch.coordinate(place.rank, "cp"),
            num_context_ranks=batch.size("cp"),
            tensor_rank=batch.coordinate(place.rank, "tp"),
            num_tensor_ranks=batch.size("tp"),
            pipeline_rank=batch.coordinate(place.rank, "pp"),
            stage_layout=stages,
            host=world.host,
            failures=world.failures,
            world=world,
        )

    def _check_effect(self, resolved: MeshStrategy, place: Place) -> None:
        """Refuse what cannot be had, and what was asked for and does nothing; tell of what does nothing in this world only."""
        if resolved.ep != 1 and place.world_size == 1:
            raise ConfigurationError(f"ep={resolved.ep} of MeshStrategy has no effect on one rank; leave it at 1")
        for name in ("pipeline", "stages_per_rank"):
            if getattr(resolved, name) is not None and resolved.pp == 1:
                raise ConfigurationError(
                    f"{name}={getattr(resolved, name)!r} of MeshStrategy has no effect with pp=1; leave it out, or set pp"
                )
        if resolved.context_attention is not None and resolved.cp_shard * resolved.cp_replicate == 1:
            raise ConfigurationError(
                f"context_attention={resolved.context_attention!r} of MeshStrategy has no effect without context ranks; leave it out, "
                "or set cp_shard or cp_replicate"
            )
        shards = resolved.dp_shard * resolved.cp_shard > 1 or (resolved.ep > 1 and domains_of(resolved)["expert"].size("ep_shard") > 1)
        if shards and resolved.fsdp_sync == "microbatch" and resolved.pp > 1 and _schedule(resolved.schedule).splits_backward:
            raise ConfigurationError(
                f"pipeline={resolved.schedule!r} of MeshStrategy computes gradients of weights apart, so FSDP cannot reduce them in each "
                "microbatch; set fsdp_sync='pack', or choose a schedule that does not split, such as '1f1b'"
            )
        if resolved.fsdp_sync == "pack" and not shards:
            if self.dp_shard != -1:
                raise ConfigurationError("fsdp_sync='pack' of MeshStrategy has no effect, nothing is sharded (dp_shard is 1); leave it out")
            if place.rank == 0:
                _logger.warning("fsdp_sync='pack' of MeshStrategy has no effect: one rank is left for dp_shard=-1, so nothing is sharded")
        if resolved.backend is not None and place.world_size == 1:
            _logger.warning("backend=%r of MeshStrategy has no effect: one process has no process group", resolved.backend)


def _schedule(name: str) -> Schedule:
    from trainer_kit.pipeline.schedules import find_training_schedule  # mesh/ knows nothing of pipeline/ but the names

    return find_training_schedule(name)


def _device_of_rank(name: str | None, place: Place) -> torch.device:
    """The device of this rank: on accelerators that of its local rank, made the current one, unless the name has an index."""
    device = _device(name)
    if device.type == "cpu":
        return device
    if device.index is None:
        count = torch.accelerator.device_count()
        if place.local_rank >= count:
            raise ConfigurationError(
                f"this is local rank {place.local_rank} (LOCAL_RANK), but the number of {device.type} devices here is {count}; start fewer "
                "processes per machine, or name the device with its index in MeshStrategy(device=...)"
            )
        device = torch.device(device.type, place.local_rank)
    torch.accelerator.set_device_index(device.index)
    return device


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
