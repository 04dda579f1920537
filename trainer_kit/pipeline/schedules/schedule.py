"""`Schedule`: the order in which each rank computes, as a pure function of three numbers.

A schedule knows nothing of transfers, process groups or models; `building.py` adds what a program needs besides. Each file of this
package has one or two functions that make such orders, and the registry in `__init__.py` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import repeat

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.stages import Shape, StageLayout
from trainer_kit.pipeline.actions import Action, Kind, Step

Order = list[list[Step]]  # of each rank, in the order of the ranks


@dataclass(frozen=True)
class Schedule:
    """A name, what it asks for, and the function that makes the orders.

    order: (layout, num_microbatches) -> the computations of each rank. peak_activations: (layout, num_microbatches, rank) -> for how many
    (stage, microbatch) the rank keeps what a forward leaves for its backward, at most. stages_per_rank: the only number that it takes, or
    None. splits_backward: backwards of inputs and of weights are separate. microbatches_per_rank: it needs that many times the number of
    ranks.
    """

    name: str
    shape: Shape
    order: Callable[[StageLayout, int], Order]
    peak_activations: Callable[[StageLayout, int, int], int]
    stages_per_rank: int | None = None
    splits_backward: bool = False
    trains: bool = True
    microbatches_per_rank: int = 0

    def layout(self, num_ranks: int, stages_per_rank: int | None = None) -> StageLayout:
        """Which stages each rank hosts. `stages_per_rank=None` takes the schedule's own number, or 1. Raises ConfigurationError."""
        fixed = self.stages_per_rank
        if fixed is not None and stages_per_rank not in (None, fixed):
            raise ConfigurationError(
                f"the schedule {self.name!r} needs exactly {fixed} stage{'s' * (fixed > 1)} per rank, got {stages_per_rank}; "
                f"set stages per rank to {fixed}, or choose another schedule, such as 'interleaved_1f1b', which takes any number"
            )
        return StageLayout(self.shape, num_ranks, (fixed or 1) if stages_per_rank is None else stages_per_rank)

    def check_microbatches(self, num_ranks: int, num_microbatches: int) -> None:
        """Raises ConfigurationError if the schedule has no order for so few microbatches."""
        needed = max(1, self.microbatches_per_rank * num_ranks)
        if num_microbatches < needed:
            raise ConfigurationError(
                f"the schedule {self.name!r} on {num_ranks} pipeline rank{'s' * (num_ranks > 1)} needs {needed} microbatches or more per "
                f"step and data rank, got {num_microbatches}; make global_batch_size larger or microbatch_size smaller, or choose another "
                "schedule, such as 'zbv', which takes any number"
            )

    def compute_order(self, layout: StageLayout, num_microbatches: int) -> Order:
        """The computations of each rank in order. Raises ConfigurationError for what the schedule does not allow."""
        self.check_microbatches(layout.num_ranks, num_microbatches)
        return self.order(layout, num_microbatches)


def actions(kind: Kind, stage: int, microbatches: Iterable[int]) -> list[Action]:
    """The same action for several microbatches. As tuples of tuples, because a large program has some hundred thousand of them."""
    return list(map(partial(tuple.__new__, Action), zip(repeat(kind), repeat(stage), microbatches)))
