"""`ShardedStage`: the FSDP units of one stage, gathered once and reduced once per pack, when the program says so.

FSDP does both by itself in hooks of forward and backward. In a program several microbatches are under way at once, and the weights of
the last one may come long after the backward that runs the hooks; so the hooks only collect, and reducing is an action of its own.
Not here: gathering and reducing in every microbatch, which `FSDPSync` of `trainer_kit.parallel` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer_kit.torch_private import collect_gradients, forget_gradients, reduce_gradients, reduce_in_one_dtype


class ShardedStage:
    """units: FSDP modules, outer ones before those inside."""

    def __init__(self, units: Sequence[Any]) -> None:
        self.units = list(units)
        for unit in self.units:
            reduce_in_one_dtype(unit)
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
            unit.set_requires_gradient_sync(False, recurse=False)

    def unshard(self) -> None:
        """Start to gather the parameters as they are now; the forward of a unit waits for its own."""
        for unit in self.units:
            unit.reshard()  # a forward outside of a pack, as in a callback, may have left those from before the last update
            unit.unshard(async_op=True)

    def collect(self) -> None:
        """Take in the gradients of a backward of weights, of which FSDP sees nothing."""
        for unit in self.units:
            collect_gradients(unit)

    def reduce(self) -> None:
        """Sum the gradients of the pack over the ranks, and leave each rank its shard."""
        for unit in self.units:
            unit.set_requires_gradient_sync(True, recurse=False)
        reduce_gradients(self.units)
        for unit in self.units:
            unit.set_requires_gradient_sync(False, recurse=False)

    def reshard(self) -> None:
        """Free the gathered parameters."""
        for unit in self.units:
            unit.reshard()

    def reset(self) -> None:
        """A pack was given up: leave no gradient and no gathered parameter of it."""
        for unit in self.units:
            forget_gradients(unit)
            unit.reshard()
