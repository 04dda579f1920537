"""Cost simulation: a program and given times make a timeline.

A model of what matters, not of a device: computations of a rank run one after the other; transfers run beside them, one at a time per
direction between two ranks, from the moment the send is issued and the receive is posted; actions on FSDP parameters take no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trainer_kit.exceptions import ConfigurationError, StateError
from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import Action, Kind, Step
from trainer_kit.pipeline.timeline import Span, Timeline

Times = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Times in any unit, the same for all stages or one per stage.

    backward: of both parts in one; None is their sum. transfer: of activations or a gradient between two ranks; one per stage is that of
    the stage which sends.
    """

    forward: Times = 1.0
    backward_input: Times = 1.0
    backward_weight: Times = 1.0
    backward: Times | None = None
    transfer: Times = 0.0

    @classmethod
    def measured(cls, timeline: Timeline, num_stages: int) -> Costs:
        """The mean times of the parts on each stage in a measured timeline; what it does not have takes no time, transfers too."""
        times: dict[tuple[Kind, int], list[float]] = {}
        for span in timeline.spans:
            times.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)

        def of(kind: Kind) -> list[float]:
            found = (times.get((kind, stage), [0.0]) for stage in range(num_stages))
            return [sum(each) / len(each) for each in found]

        return cls(of(Kind.FORWARD), of(Kind.BACKWARD_INPUT), of(Kind.BACKWARD_WEIGHT), of(Kind.BACKWARD))

    def per_stage(self, num_stages: int) -> list[list[float]]:
        """Of forward, backward, its two parts and transfer, in this order, the time on each stage. Raises ConfigurationError."""
        forward, backward_input, backward_weight, transfer = (
            self._of("forward", num_stages),
            self._of("backward_input", num_stages),
            self._of("backward_weight", num_stages),
            self._of("transfer", num_stages),
        )
        both = [a + b for a, b in zip(backward_input, backward_weight, strict=True)]
        return [forward, both if self.backward is None else self._of("backward", num_stages), backward_input, backward_weight, transfer]

    def _of(self, name: str, num_stages: int) -> list[float]:
        given = getattr(self, name)
        times = [float(time) for time in given] if isinstance(given, Sequence) else [float(given)] * num_stages
        if len(times) != num_stages:
            raise ConfigurationError(f"Costs({name}=...) has {len(times)} times, expected one, or one for each of the {num_stages} stages")
        if not all(0 <= time < float("inf") for time in times):
            raise ConfigurationError(f"Costs({name}={given!r}): a time is a finite number, 0 or more")
        return times


def simulate(steps: Sequence[Sequence[Step]], layout: StageLayout, num_microbatches: int, costs: Costs) -> Timeline:
    """The timeline of the lists of all ranks, which are those of a checked program."""
    return _Simulation(steps, layout, num_microbatches, costs).run()


class _Simulation:
    """The clocks of all ranks and what is on its way."""

    def __init__(self, steps: Sequence[Sequence[Step]], layout: StageLayout, num_microbatches: int, costs: Costs) -> None:
        self.steps, self.layout = steps, layout
        *self.durations, self.transfer_times = costs.per_stage(layout.num_stages)
        none: list[float | None] = [None] * num_microbatches
        self.activations = [none.copy() for _ in layout.ranks]  # by stage and microbatch: when they are there
        self.gradients = [none.copy() for _ in layout.ranks]
        self.activations[0] = [0.0] * num_microbatches
        self.clocks = [0.0] * layout.num_ranks
        self.positions = [0] * layout.num_ranks
        self.halves: dict[tuple[Kind, int, int], float] = {}  # transfers of which one side came: when it came
        self.free: dict[tuple[int, int], float] = {}  # when each direction between two ranks is free again
        self.spans: list[list[Span]] = [[] for _ in steps]

    def run(self) -> Timeline:
        self.runnable = deque(range(len(self.steps)))
        while self.runnable:
            rank = self.runnable.popleft()
            steps = self.steps[rank]
            while self.positions[rank] < len(steps) and self._do(rank, steps[self.positions[rank]]):
                self.positions[rank] += 1
        if stuck := [rank for rank, steps in enumerate(self.steps) if self.positions[rank] < len(steps)]:
            waits = self.steps[stuck[0]][self.positions[stuck[0]]]
            raise StateError(f"the simulation ends in a deadlock: rank {stuck[0]} waits in '{waits}'; check_program says what is wrong")
        return Timeline(tuple(span for spans in self.spans for span in spans), len(self.steps))

    def _do(self, rank: int, step: Step) -> bool:
        """False if data are not there yet; the rank is run again when some arrive."""
        kind = step.parts[0].kind
        if kind.is_compute:
            return self._compute(rank, step)
        if kind < Kind.UNSHARD:
            (action,) = step.parts
            self._transfer(rank, action)
        return True

    def _compute(self, rank: int, step: Step) -> bool:
        start = self.clocks[rank]
        for kind, stage, microbatch in step.parts:
            if kind != Kind.BACKWARD_WEIGHT:
                there = (self.activations if kind == Kind.FORWARD else self.gradients)[stage][microbatch]
                if there is None:
                    return False
                start = max(start, there)
        for action in step.parts:
            end = start + self.durations[action.kind][action.stage]
            self.spans[rank].append(Span(rank, action, start, end))
            start = end
        self.clocks[rank] = start
        for action in step.parts:
            self._hand_over(rank, action)
        return True

    def _hand_over(self, rank: int, action: Action) -> None:
        """To a stage on the same rank, and from the last forward to its backward."""
        kind, stage, microbatch = action
        ranks = self.layout.ranks
        if kind == Kind.FORWARD:
            if stage == len(ranks) - 1:
                self.gradients[stage][microbatch] = self.clocks[rank]
            elif ranks[stage + 1] == rank:
                self.activations[stage + 1][microbatch] = self.clocks[rank]
        elif kind != Kind.BACKWARD_WEIGHT and stage and ranks[stage - 1] == rank:
            self.gradients[stage - 1][microbatch] = self.clocks[rank]

    def _transfer(self, rank: int, action: Action) -> None:
        """Note one side, or with the second side, when the data arrive."""
        kind, stage, microbatch = action
        forwards = kind in (Kind.SEND_ACTIVATIONS, Kind.RECEIVE_ACTIVATIONS)
        sends = kind in (Kind.SEND_ACTIVATIONS, Kind.SEND_GRADIENT)
        source = stage if sends else stage - 1 if forwards else stage + 1
        target = source + 1 if forwards else source - 1
        key = (Kind.SEND_ACTIVATIONS if forwards else Kind.SEND_GRADIENT, source, microbatch)
        other = self.halves.pop(key, None)
        if other is None:
            self.halves[key] = self.clocks[rank]
            return
        direction = (self.layout.ranks[source], self.layout.ranks[target])
        start = max(self.clocks[rank], other, self.free.get(direction, 0.0))
        arrival = self.free[direction] = start + self.transfer_times[source]
        (self.activations if forwards else self.gradients)[target][microbatch] = arrival
        self.runnable.append(direction[1])
