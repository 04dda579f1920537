"""`DataProvider`, the class to override for data of any kind: it gives the packs of one epoch from any position.

Not here: epochs one after the other, prefetch and devices, which are the stream's (`stream.py`). The one thing to know before
editing: a provider holds no running position; it travels with the packs, so that the position of a pack that was fetched ahead
but never used is never saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer_kit.data.pack import Pack

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext


class DataProvider:
    """Subclass it: `packs` is what training needs, the rest is optional.

    num_epochs: how often the data can be gone through; None: any number of times.
    pin_memory: False keeps the stream from pinning host memory before it copies to an accelerator.
    draws_random: False promises that fetching draws no random number in this process; it saves the stream some work.
    knows_all_ranks: True promises that every data rank gets the same number of packs per epoch, and that each pack says in `num_on_all`
        how many microbatches the ranks run. Otherwise several data ranks ask each other before every pack.
    global_position: True promises that positions are the same on every data rank, and hold for any number of them. Otherwise each data
        rank keeps its own, and a run that goes on with another number of data ranks starts the epoch anew.
    """

    num_epochs: int | None = None
    pin_memory: bool | None = None
    draws_random: bool = True
    knows_all_ranks: bool = False
    global_position: bool = False

    def setup(self, context: DistributedContext, seed: int) -> None:
        """Called once before the first pack, with the place of this process and the seed of the run."""

    def packs(self, position: dict[str, Any] | None) -> Iterator[Pack | list[Any]]:
        """The rest of one epoch, from `position`; ends where that epoch ends, even if nothing is left of it.

        `position` is None (the start of the first epoch), `{"epoch": e}` (the start of epoch e), or the position of the pack that was
        handed out last. The position of an epoch's last pack may be the start of the next one: its `"epoch"` is then one higher.
        A plain list of microbatches instead of a `Pack` is counted by the stream, which resumes by skipping.
        On several data ranks each one gives its own part, and an epoch ends on all of them with the first that has no more.
        """
        raise NotImplementedError(f"{type(self).__name__} must define packs(position), an iterator over the packs of one epoch")

    def num_packs(self) -> int | None:
        """The packs per epoch, if that is known."""
        return None

    def packs_left(self, position: dict[str, Any] | None) -> int | None:
        """The packs from a position to the end of its epoch, if that is known; so that a resume with another batch size knows its end."""
        return None

    def describe(self) -> dict[str, Any]:
        """Name -> plain value, for `trainer.describe()`."""
        return {"provider": type(self).__name__, "num_packs": self.num_packs()}

    def hparams(self) -> dict[str, Any]:
        """Plain values for the loggers."""
        return {}

    def close(self) -> None:
        """Leave no worker process or thread behind. The provider can be used again afterwards."""
