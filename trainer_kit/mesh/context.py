"""`DistributedContext`: which rank this is, on which device. One process needs no process group and no mesh.

Every component gets it through its constructor; nothing reads it from global state.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from trainer_kit.exceptions import StateError
from trainer_kit.mesh.domains import DEGREES, domains_of
from trainer_kit.mesh.failure import Failures, NoFailures
from trainer_kit.mesh.host import HostChannel, LocalChannel
from trainer_kit.mesh.place_logger import PlaceLogger
from trainer_kit.mesh.stages import StageLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from trainer_kit.mesh.strategy import MeshStrategy
    from trainer_kit.mesh.world import World

_logger = logging.getLogger("trainer_kit")


@dataclass(frozen=True, slots=True)
class AddedLoss:
    """A loss term that a module added during a forward."""

    name: str
    value: torch.Tensor
    coefficient: float


@dataclass
class DistributedContext:
    """The place of this process in the run. With the defaults: one process, where everything works and costs nothing.

    local_rank: on its machine. node: number of its machine. data_rank: which samples it gets, of `num_data_ranks` parts.
    context_rank: which part of each sequence it gets, of `num_context_ranks`.
    stage_layout: which stages of the model each pipeline rank hosts; pipeline_rank: this one's place among them.
    host: small exchanges between the ranks. failures: ends this rank when another one fails.
    world: what several ranks hold open; None in one process.
    """

    strategy: MeshStrategy
    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: int = 0
    data_rank: int = 0
    num_data_ranks: int = 1
    context_rank: int = 0
    num_context_ranks: int = 1
    tensor_rank: int = 0
    num_tensor_ranks: int = 1
    pipeline_rank: int = 0
    stage_layout: StageLayout = field(default_factory=StageLayout)
    host: HostChannel = field(default_factory=LocalChannel, repr=False)
    failures: Failures = field(default_factory=NoFailures, repr=False)
    world: World | None = field(default=None, repr=False)
    _added: list[AddedLoss] | None = field(default=None, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes logs and prints."""
        return self.rank == 0

    @property
    def is_counted(self) -> bool:
        """Whether the losses, weights and metrics of this rank count: those of tensor peers, which are the same, count once, and in a
        pipeline only those of the last stage. Context ranks have other parts of the sequences, so all of them count."""
        return self.tensor_rank == 0 and self.hosts_last_stage

    @property
    def forwards_meet(self) -> bool:
        """Whether ranks exchange activations within a stage, so that all of them must run the same forwards and backwards."""
        return self.num_tensor_ranks > 1 or self.num_context_ranks > 1 or self.strategy.ep > 1

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of the model that this rank hosts, in the order of the model."""
        return self.stage_layout.stages_of(self.pipeline_rank)

    @property
    def num_pipeline_ranks(self) -> int:
        """How many ranks share the stages of the model."""
        return self.stage_layout.num_ranks

    @property
    def hosts_last_stage(self) -> bool:
        """Whether losses, metrics and predictions come from this rank."""
        return self.stage_layout.ranks[-1] == self.pipeline_rank

    def mesh_for(self, domain: str) -> DeviceMesh:
        """The device mesh of a domain: "regular", "dense", "expert", "batch" or "flat"; slice it by the names of its dimensions.

        The first use of a domain is a collective.
        """
        if self.world is None:
            raise StateError(f"one process has no mesh, so there is none for the domain {domain!r}; test context.world_size > 1 first")
        return self.world.meshes.mesh_for(domain)

    def group(self, domain: str, *dims: str) -> ProcessGroup | None:
        """This rank's process group over the product of some dimensions of a domain; None if it is alone in it.

        The first use is a collective. Domains share the groups of equal ranks.
        """
        return None if self.world is None else self.world.meshes.group(domain, *dims)

    def domain_with(self, dims: Collection[str]) -> str | None:
        """The name of a domain that has all of these mesh dimensions; None if none has. Which one makes no difference to their group."""
        return next((name for name, domain in domains_of(self.strategy).items() if set(dims) <= set(domain.dims)), None)

    @property
    def data_group(self) -> ProcessGroup | None:
        """The ranks that hold different samples and are otherwise peers; None if there is one."""
        return self.group("batch", "dp")

    @property
    def loss_rank(self) -> int:
        """Which samples, or parts of them, it has, of `num_loss_ranks`: losses and weights are summed over these."""
        return self.data_rank * self.num_context_ranks + self.context_rank

    @property
    def num_loss_ranks(self) -> int:
        """Data ranks times context ranks."""
        return self.num_data_ranks * self.num_context_ranks

    @property
    def loss_group(self) -> ProcessGroup | None:
        """The loss ranks that are otherwise peers; None if there is one."""
        return self.group("batch", "dp", "cp")

    @property
    def random_rank(self) -> int:
        """Which random streams it has: tensor peers share them, context and pipeline ranks don't."""
        return self.loss_rank * self.num_pipeline_ranks + self.pipeline_rank

    @property
    def num_random_ranks(self) -> int:
        """How many different random streams there are."""
        return self.num_loss_ranks * self.num_pipeline_ranks

    @property
    def first_rank_of_stage(self) -> int:
        """The first of the ranks that host the same stages as this one."""
        return self.pipeline_rank * (self.world_size // self.num_pipeline_ranks)

    @property
    def stage_group(self) -> ProcessGroup | None:
        """The ranks that host the same stages as this one; None if it is alone."""
        return self.group("regular", *(dim for dim in DEGREES if dim != "pp"))

    @property
    def pipeline_group(self) -> ProcessGroup | None:
        """The ranks that share the stages of the model, in the order of their places; None without pipeline ranks."""
        return self.group("regular", "pp")

    def transfer_device(self, group: ProcessGroup) -> torch.device:
        """Where what is sent in a group lies: on the host, unless the group was made for devices alone."""
        import torch.distributed as dist

        return torch.device("cpu") if "cpu" in dist.get_backend_config(group) else self.device

    def dense_sizes(self) -> dict[str, int]:
        """The sizes of the dimensions of the dense domain within a pipeline stage, by name."""
        dense = domains_of(self.strategy.resolve(self.world_size))["dense"]
        return {dim: size for dim, size in zip(dense.dims, dense.shape, strict=True) if dim != "pp"}

    def coordinates(self) -> dict[str, int]:
        """The place of this rank along each dimension of the batch domain that has more than one rank."""
        if self.world is None:
            return {}
        batch = self.world.meshes.domains["batch"]
        return {dim: place for dim, place in batch.coordinates(self.rank).items() if batch.size(dim) > 1}

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """The logger of trainer_kit, with this rank's coordinates before each message, if there are other ranks."""
        return PlaceLogger(self.rank, self.coordinates()) if self.world_size > 1 else logging.LoggerAdapter(_logger)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the block first, the others after it, as for a download. An error on rank 0 is raised there, and ends the others."""
        with self.long_timeout():
            if self.is_main:
                try:
                    yield
                except BaseException as error:
                    self.host.broadcast(f"{type(error).__name__}: {error}")
                    raise
                self.host.broadcast(None)
            else:
                if (failed := self.host.broadcast(None)) is not None:
                    raise StateError(f"rank 0 failed in main_process_first(), which the other ranks wait for: {failed}")
                yield

    @contextmanager
    def long_timeout(self) -> Iterator[None]:
        """Collectives in the block may take as long as during the set-up: for saves, exports, sleeping, slow first calls."""
        if self.world is None:
            yield
            return
        with self.world.timeouts.long():
            yield

    @contextmanager
    def short_timeout(self) -> Iterator[None]:
        """Collectives in the block, which is the loop, fail when they take longer than a step could."""
        if self.world is None:
            yield
            return
        with self.world.timeouts.short():
            yield

    def close(self) -> None:
        """Give back what `build()` opened; a process group that was there before stays. No collective. A new build() works afterwards."""
        if self.world is not None:
            self.world.close()

    def add_loss(self, name: str, value: torch.Tensor, coefficient: float = 1.0) -> None:
        """Add `coefficient * value` to the loss of the running microbatch, from inside a forward (router losses, penalties).

        `value` is a scalar with a graph. It counts with the weight of the microbatch, or with the one that
        `ForwardInputs.weight` declares under `name`; several of one name add up. Outside of a forward, as when activations are
        computed again in the backward, the call does nothing.
        """
        if self._added is not None:
            self._added.append(AddedLoss(name, value, coefficient))

    def collect_losses(self) -> None:
        """A forward begins: keep what it adds, and forget what a failed one left behind."""
        self._added = []

    def take_losses(self) -> list[AddedLoss]:
        """The forward is over: the terms it added, one per name."""
        added, self._added = self._added or [], None
        return _merged(added) if len(added) > 1 else added

    def describe(self) -> str:
        """One line about the mesh."""
        if self.world_size == 1:
            return f"1 process on {self.device}"
        degrees = [f"{name} {getattr(self.strategy, name)}" for name in (*DEGREES, "ep") if getattr(self.strategy, name) > 1]
        return f"{self.world_size} ranks on {self.device.type}" + (f": {', '.join(degrees)}" if degrees else "")


def _merged(added: list[AddedLoss]) -> list[AddedLoss]:
    """One term per name: the sum of its values, with their coefficient if it is the same for all, else with the products summed."""
    by_name: dict[str, list[AddedLoss]] = {}
    for loss in added:
        by_name.setdefault(loss.name, []).append(loss)
    merged = []
    for name, losses in by_name.items():
        coefficients = {loss.coefficient for loss in losses}
        if len(coefficients) == 1:
            merged.append(AddedLoss(name, torch.stack([loss.value for loss in losses]).sum(), coefficients.pop()))
        else:
            merged.append(AddedLoss(name, torch.stack([loss.value * loss.coefficient for loss in losses]).sum(), 1.0))
    return merged
