"""`Place`: a point between two packs of a run, from which fetching can go on.

Not the provider's position, which is a part of it. The one thing to know before editing: the last pack of an epoch is often known
only after the fact, so a place says "behind pack n of epoch e" as long as it must and "the start of epoch e + 1" as soon as the
provider's position does; both resume at the same pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer_kit.data.pack import Pack, Position
from trainer_kit.exceptions import CheckpointError


@dataclass(slots=True)
class Place:
    """Behind the first `num_packs` packs of an epoch. position: the provider's own; None: its packs are counted."""

    epoch: int = 0
    num_packs: int = 0
    position: Position | None = None

    def after(self, pack: Pack) -> Place:
        """The place behind the pack that starts here."""
        return Place(pack.epoch, self.num_packs + 1, pack.position)

    def next_epoch(self) -> Place:
        """The start of the next epoch; keeps the provider's position only if that says the same."""
        normal = self.normal()
        return normal if normal.epoch > self.epoch else Place(self.epoch + 1)

    def normal(self) -> Place:
        """The same place, as the start of the next epoch if the provider's position says so."""
        position = self._resolved()
        epoch = position.get("epoch", self.epoch) if position is not None else self.epoch
        return Place(epoch, 0, position) if epoch > self.epoch else Place(self.epoch, self.num_packs, position)

    def position_to_open(self) -> dict[str, Any] | None:
        """What to pass to `DataProvider.packs`."""
        if self.position is None:
            return {"epoch": self.epoch} if self.epoch else None
        return self._resolved()

    @property
    def is_counted(self) -> bool:
        """Whether the provider has to be skipped through to come here."""
        return self.position is None

    @property
    def last_epoch(self) -> int:
        """The epoch of the pack before this place; 0 at the very start."""
        return self.epoch - 1 if self.num_packs == 0 and self.epoch else self.epoch

    def _resolved(self) -> dict[str, Any] | None:
        return self.position() if callable(self.position) else self.position

    def state_dict(self) -> dict[str, Any]:
        """Plain values, given a provider that keeps to them."""
        normal = self.normal()
        return {"epoch": normal.epoch, "packs": normal.num_packs, "position": normal.position}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Place:
        """The place that `state_dict` described."""
        if set(state) != {"epoch", "packs", "position"}:
            raise CheckpointError(f"the saved data position has the entries {sorted(state)}, expected epoch, packs and position")
        return cls(state["epoch"], state["packs"], state["position"])
