"""`Program`: what every rank of a pipeline does for one pack, as data.

Made by `build_program`, which checks it; run by the runtime, which takes one rank's steps in order. It holds no tensors and no process
groups, and is the same value on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import Action, Kind, Step
from trainer_kit.pipeline.drawing import Drawing
from trainer_kit.pipeline.simulation import Costs, simulate
from trainer_kit.pipeline.timeline import Timeline


@dataclass(frozen=True)
class Program:
    """The steps of all ranks. `str()` is the table of them.

    steps: of each rank in order; a step is an `Action` or a `Pair`, and `step.parts` are its actions. trains: there are backwards.
    sharded_stages: those with actions of FSDP. receives_wait: the order holds even if each receive waits for its data at its place;
    else receives are only posted there, and computations wait.
    """

    schedule: str
    layout: StageLayout
    num_microbatches: int
    steps: tuple[tuple[Step, ...], ...]
    trains: bool = True
    sharded_stages: frozenset[int] = frozenset()
    receives_wait: bool = True

    def actions(self, rank: int) -> Iterator[Action]:
        """The actions of a rank in order, pairs taken apart."""
        for step in self.steps[rank]:
            yield from step.parts

    def peer(self, action: Action) -> int:
        """The rank on the other side of a send or receive."""
        towards_end = action.kind in (Kind.SEND_ACTIVATIONS, Kind.RECEIVE_GRADIENT)
        return self.layout.rank_of(action.stage + (1 if towards_end else -1))

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """When each rank does what, for given times (all parts 1 and transfers 0 by default)."""
        return simulate(self.steps, self.layout, self.num_microbatches, costs or Costs())

    def draw(self, costs: Costs | None = None, *, measured: Timeline | None = None) -> Drawing:
        """The simulated timeline, and a measured one below it; text with `str()`, an image in notebooks."""
        timelines = {f"{self.title}, simulated": self.simulate(costs)}
        if measured is not None:
            timelines[f"{self.title}, measured"] = measured
        return Drawing(timelines, self.layout)

    @property
    def title(self) -> str:
        layout = self.layout
        return f"{self.schedule}: {layout.num_ranks} ranks, {layout.num_stages} stages, {self.num_microbatches} microbatches"

    def text(self) -> str:
        """A column per rank; rows are not aligned in time."""
        several = self.layout.stages_per_rank > 1
        columns = []
        for rank, steps in enumerate(self.steps):
            stages = ", ".join(map(str, self.layout.stages_of(rank)))
            columns.append([f"rank {rank} (stage{'s' * several} {stages})", *_aligned([step.text(with_stage=several) for step in steps])])
        widths = [max(map(len, column)) for column in columns]
        rows = zip_longest(*columns, fillvalue="")
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Program {self.title}>"


def _aligned(texts: list[str]) -> list[str]:
    """The microbatches of single actions under each other."""
    parts = [text.rsplit(" ", 1) if " + " not in text and " mb" in text else [text, ""] for text in texts]
    width = max((len(head) for head, tail in parts if tail), default=0)
    return [f"{head.ljust(width)}  {tail}".rstrip() if tail else head for head, tail in parts]
