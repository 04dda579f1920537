"""`FSDPSync`: when the FSDP units gather parameters and reduce gradients within a pack.

"microbatch": each microbatch gathers and reduce-scatters, so that nothing whole stays in memory; with HSDP the sum over replicas is made
once, in the last one. "pack": one gathering and one reduce-scatter per unit and pack; whole parameters and gradients stay meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from trainer_kit.torch_private import forget_gradients, reduce_in_one_dtype


class FSDPSync:
    """Told before each microbatch, in which only the units change.

    units: from `fsdp_units`. A unit that some ranks call and others do not makes them wait for each other in vain.
    """

    def __init__(self, units: Sequence[Any], mode: Literal["microbatch", "pack"]) -> None:
        self.units, self._mode = list(units), mode
        self._reduces = True  # whether the units are set for the last microbatch of a pack, as they are from the start
        self._is_first = True
        for unit in self.units:
            reduce_in_one_dtype(unit)
            if mode == "pack":
                unit.set_reshard_after_forward(False, recurse=False)

    def begin_microbatch(self, is_last: bool) -> None:
        """Set the units for the forward and backward that follow; `is_last` of the pack."""
        if self._is_first:
            for unit in self.units:
                unit.reshard()  # a forward without a backward, as in a callback, left whole parameters from before the last update
        self._is_first = is_last
        if is_last == self._reduces:
            return
        self._reduces = is_last
        for unit in self.units:
            if self._mode == "pack":
                unit.set_requires_gradient_sync(is_last, recurse=False)
                unit.set_reshard_after_backward(is_last, recurse=False)
            else:
                unit.set_requires_all_reduce(is_last, recurse=False)

    def reset(self) -> None:
        """A pack was given up: no gradient and no whole parameter of it is left, and the next pack starts as after the build."""
        for unit in self.units:
            forget_gradients(unit)
        self._is_first = True
        self.begin_microbatch(True)
        self._is_first = True
