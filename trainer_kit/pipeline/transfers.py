"""Sends and receives for the compute orders of all ranks, found by simulation.

The simulation has no times: in each round every rank does its next step if its inputs are there. What follows from it is an order of all
transfers, not a prediction. To keep in mind: a send and its receive are appended to the two lists at the same moment, so all lists agree
with one common order. Appending either of them elsewhere takes away the proof that nothing can deadlock.
"""

from __future__ import annotations

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import Action, Kind, Step
from trainer_kit.pipeline.schedules.schedule import Order

# Looking a member up in an enum class costs more than the rest of a line here.
_FORWARD, _BACKWARD_WEIGHT = Kind.FORWARD, Kind.BACKWARD_WEIGHT
_SEND_ACTIVATIONS, _RECEIVE_ACTIVATIONS = Kind.SEND_ACTIVATIONS, Kind.RECEIVE_ACTIVATIONS
_SEND_GRADIENT, _RECEIVE_GRADIENT = Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT


def with_transfers(orders: Order, layout: StageLayout, num_microbatches: int) -> list[list[Step]]:
    """The lists of all ranks with their transfers. Stages on one rank hand over without any. Raises ConfigurationError on a circle."""
    simulation = _Simulation(layout, num_microbatches)
    todo = [iter(order) for order in orders]
    heads = {rank: head for rank, steps in enumerate(todo) if (head := next(steps, None)) is not None}
    while heads:
        stuck = True
        for rank, head in list(heads.items()):
            if not simulation.is_ready(head):
                continue
            simulation.do(rank, head)
            stuck = False
            following = next(todo[rank], None)
            if following is None:
                del heads[rank]
            else:
                heads[rank] = following
        if stuck:
            waits = ", ".join(f"rank {rank} for the inputs of '{head}'" for rank, head in list(heads.items())[:4])
            raise ConfigurationError(f"the compute order of the schedule has a circle: these ranks wait: {waits}; change its order")
    return simulation.lists


class _Simulation:
    """What has arrived where, and the lists so far."""

    def __init__(self, layout: StageLayout, num_microbatches: int) -> None:
        self.lists: list[list[Step]] = [[] for _ in range(layout.num_ranks)]
        self._ranks = layout.ranks
        self._last = layout.num_stages - 1
        self._activations = [bytearray(num_microbatches) for _ in layout.ranks]
        self._gradients = [bytearray(num_microbatches) for _ in layout.ranks]
        self._activations[0] = self._gradients[-1] = bytearray(b"\1" * num_microbatches)  # the model's inputs, and its loss

    def is_ready(self, step: Step) -> bool:
        return all(map(self._has_inputs, step.parts))

    def _has_inputs(self, action: Action) -> bool:
        kind, stage, microbatch = action
        if kind == _FORWARD:
            return bool(self._activations[stage][microbatch])
        return kind == _BACKWARD_WEIGHT or bool(self._gradients[stage][microbatch])

    def do(self, rank: int, step: Step) -> None:
        self.lists[rank].append(step)
        for kind, stage, microbatch in step.parts:
            if kind == _FORWARD:
                if stage < self._last:
                    self._activations[stage + 1][microbatch] = 1
                    self._transfer(rank, stage, stage + 1, microbatch, _SEND_ACTIVATIONS, _RECEIVE_ACTIVATIONS)
            elif kind != _BACKWARD_WEIGHT and stage:
                self._gradients[stage - 1][microbatch] = 1
                self._transfer(rank, stage, stage - 1, microbatch, _SEND_GRADIENT, _RECEIVE_GRADIENT)

    def _transfer(self, rank: int, stage: int, to: int, microbatch: int, send: Kind, receive: Kind) -> None:
        peer = self._ranks[to]
        if peer != rank:
            self.lists[rank].append(Action(send, stage, microbatch))
            self.lists[peer].append(Action(receive, to, microbatch))


def with_earlier_receives(steps: list[Step], ahead: int) -> list[Step]:
    """The same list with each receive moved in front of `ahead` more computations. Receives keep their order, so channels still agree."""
    slots: list[list[Step]] = [[]]  # what comes before the first computation, then each computation and what follows it
    receives: list[list[Step]] = [[]]
    for step in steps:
        if isinstance(step, Action) and step.kind.is_receive:
            receives[-1].append(step)
        elif isinstance(step, Action) and step.kind.is_send:
            slots[-1].append(step)
        else:
            slots.append([step])
            receives.append([])
    result: list[Step] = []
    for index, slot in enumerate(slots):
        for group in receives[0 if not index else index + ahead : index + ahead + 1]:
            result += group
        result += slot
    return result
