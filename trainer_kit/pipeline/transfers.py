"""Sends and receives for the compute orders of all ranks, found by simulation.

The simulation has no times: in each round every rank does its next step if its inputs are there. What follows from it is an order of all
transfers, not a prediction. To keep in mind: a send and its receive are appended to the two lists at the same moment, so all lists agree
with one common order. Appending either of them elsewhere takes away the proof that nothing can deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import Action, Kind, Step
from trainer_kit.pipeline.schedules.schedule import Order

_ENDED = object()


def with_transfers(orders: Order, layout: StageLayout, num_microbatches: int) -> list[list[Step]]:
    """The lists of all ranks with their transfers. Stages on one rank hand over without any. Raises ConfigurationError on a circle."""
    lists: list[list[Step]] = [[] for _ in range(layout.num_ranks)]
    places = _places(lists, layout, num_microbatches)
    runs = [_run(order, lists[rank], places) for rank, order in enumerate(orders)]
    for waits in zip_longest(*runs, fillvalue=_ENDED):  # a turn of each rank, in order
        if all(waits):  # so nothing changed
            stuck = [f"rank {rank} for the inputs of '{step}'" for rank, step in enumerate(waits) if step is not _ENDED]
            raise ConfigurationError(
                f"the compute order of the schedule has a circle: these ranks wait: {', '.join(stuck[:4])}; change its order"
            )
    return lists


def _run(order: Iterable[Step], own: list[Step], places: list[list[_Place]]) -> Iterator[Step | None]:
    """Each turn does one step of a rank, and yields None, or the step if its inputs are not there."""
    for step in order:
        parts = (step,) if type(step) is Action else step.parts  # a call less for nearly all of them
        for kind, stage, microbatch in parts:
            while not places[kind][stage].inputs[microbatch]:
                yield step
        own.append(step)
        for kind, stage, microbatch in parts:
            _, outputs, transfer = places[kind][stage]
            outputs[microbatch] = True
            if transfer is not None:
                send, receive, to, others = transfer
                own.append(Action(send, stage, microbatch))
                others.append(Action(receive, to, microbatch))
        yield None


class _Place(NamedTuple):
    """A kind of computation on a stage. inputs, outputs: by microbatch, whether what it needs and what it makes is there. transfer: kinds
    of the send and the receive, the stage of the receive, and the list of the rank that has it."""

    inputs: bytearray
    outputs: bytearray
    transfer: tuple[Kind, Kind, int, list[Step]] | None


def _places(lists: list[list[Step]], layout: StageLayout, num_microbatches: int) -> list[list[_Place]]:
    """By kind and stage."""
    last, ranks = layout.num_stages - 1, layout.ranks
    always = bytearray(b"\1" * num_microbatches)
    activations = [always, *(bytearray(num_microbatches) for _ in range(last)), always]
    gradients = [always, *(bytearray(num_microbatches) for _ in range(last)), always]  # of the outputs of the stage before

    def transfer(stage: int, to: int, send: Kind, receive: Kind) -> tuple[Kind, Kind, int, list[Step]] | None:
        return (send, receive, to, lists[ranks[to]]) if 0 <= to <= last and ranks[to] != ranks[stage] else None

    places: list[list[_Place]] = [[], [], [], []]
    for stage in range(last + 1):
        onwards = transfer(stage, stage + 1, Kind.SEND_ACTIVATIONS, Kind.RECEIVE_ACTIVATIONS)
        back = transfer(stage, stage - 1, Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT)
        places[Kind.FORWARD].append(_Place(activations[stage], activations[stage + 1], onwards))
        places[Kind.BACKWARD].append(_Place(gradients[stage + 1], gradients[stage], back))
        places[Kind.BACKWARD_INPUT].append(places[Kind.BACKWARD][-1])
        places[Kind.BACKWARD_WEIGHT].append(_Place(always, always, None))
    return places


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
