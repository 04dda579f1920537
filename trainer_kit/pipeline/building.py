"""From the compute orders of a schedule to a program: transfers, then the actions of FSDP stages, then the check.

Transfers are found by running the orders in one fixed simulation in which each rank does one step per round. A send comes right after
the computation that made it, and its receive is appended to the other rank's list at that moment. So all transfers have one common order
that every rank's list agrees with: even ranks that wait in each send until it is received, and in each receive, never wait in a circle.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.pipeline.actions import Action, Kind, Step
from trainer_kit.pipeline.checking import check_program
from trainer_kit.pipeline.layout import StageLayout
from trainer_kit.pipeline.program import Program
from trainer_kit.pipeline.schedules.schedule import Order, Schedule

_FORWARD, _BACKWARD_WEIGHT = Kind.FORWARD, Kind.BACKWARD_WEIGHT
_SEND_ACTIVATIONS, _RECEIVE_ACTIVATIONS = Kind.SEND_ACTIVATIONS, Kind.RECEIVE_ACTIVATIONS
_SEND_GRADIENT, _RECEIVE_GRADIENT = Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT


def build_program(
    schedule: Schedule,
    layout: StageLayout,
    num_microbatches: int,
    *,
    sharded_stages: Collection[int] = (),
    receive_ahead: int = 0,
) -> Program:
    """The checked program of all ranks. Raises ConfigurationError for what the schedule does not allow.

    sharded_stages: stages whose parameters are gathered once per pack before their first use, and whose gradients are reduced once after
    their last backward of weights. receive_ahead: post each receive that many computations earlier, at the price of that many more
    buffers. Then a receive must not wait, and the two directions between two ranks must not share an ordered queue (one NCCL stream).
    """
    lists = with_transfers(schedule.compute_order(layout, num_microbatches), layout, num_microbatches)
    if receive_ahead:
        lists = [with_earlier_receives(steps, receive_ahead) for steps in lists]
    if sharded_stages:
        lists = [with_sharded_stages(steps, sharded_stages, trains=schedule.trains) for steps in lists]
    program = Program(
        schedule=schedule.name,
        layout=layout,
        num_microbatches=num_microbatches,
        steps=tuple(tuple(steps) for steps in lists),
        trains=schedule.trains,
        sharded_stages=frozenset(sharded_stages),
        receives_wait=not receive_ahead,
    )
    check_program(program)
    return program
