"""`DistributedContext`: which rank this is, on which device. One process needs no process group and no mesh.

Every component gets it through its constructor; nothing reads it from global state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.exceptions import StateError

if TYPE_CHECKING:
    from trainer_kit.mesh.strategy import MeshStrategy


@dataclass(frozen=True, slots=True)
class AddedLoss:
    """A loss term that a module added during a forward."""

    name: str
    value: torch.Tensor
    coefficient: float


@dataclass
class DistributedContext:
    """The place of this process in the run: rank, data rank, device."""

    strategy: MeshStrategy
    device: torch.device
    rank: int = 0
    world_size: int = 1
    data_rank: int = 0
    num_data_ranks: int = 1
    _added: list[AddedLoss] | None = field(default=None, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes logs and prints."""
        return self.rank == 0

    def mesh_for(self, domain: str) -> Any:
        """The device mesh of a domain."""
        raise StateError(f"one process has no mesh, so there is none for the domain {domain!r}; test context.world_size > 1 first")

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
        return f"1 process on {self.device}" if self.world_size == 1 else f"{self.world_size} ranks on {self.device.type}"


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
