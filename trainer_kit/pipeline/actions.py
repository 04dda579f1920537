"""Actions: what one rank does at one place of a program, as small immutable values.

They name what is done, not how: no tensors, no process groups. Equal actions are equal values, so programs can be compared, cached and
printed. A program of 64 ranks has some hundred thousand of them, so they are named tuples, and `Kind` is an int, which hashes and
compares fast.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, TypeAlias

NO_MICROBATCH = -1


class Kind(IntEnum):
    """What is done. The order matters: computation, then transfers, then parameters of FSDP stages."""

    FORWARD = 0
    BACKWARD = 1  # inputs and weights in one
    BACKWARD_INPUT = 2  # the gradient of the stage's inputs, which the previous stage waits for
    BACKWARD_WEIGHT = 3  # the gradient of the parameters, which nobody waits for
    SEND_ACTIVATIONS = 4  # to the next stage
    RECEIVE_ACTIVATIONS = 5  # from the previous stage
    SEND_GRADIENT = 6  # to the previous stage
    RECEIVE_GRADIENT = 7  # from the next stage
    UNSHARD = 8
    RESHARD = 9
    REDUCE_GRADIENT = 10

    @property
    def is_compute(self) -> bool:
        return self <= Kind.BACKWARD_WEIGHT

    @property
    def is_send(self) -> bool:
        return self in (Kind.SEND_ACTIVATIONS, Kind.SEND_GRADIENT)

    @property
    def is_receive(self) -> bool:
        return self in (Kind.RECEIVE_ACTIVATIONS, Kind.RECEIVE_GRADIENT)


NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
    Kind.SEND_ACTIVATIONS: "send activations",
    Kind.RECEIVE_ACTIVATIONS: "receive activations",
    Kind.SEND_GRADIENT: "send gradient",
    Kind.RECEIVE_GRADIENT: "receive gradient",
    Kind.UNSHARD: "unshard",
    Kind.RESHARD: "reshard",
    Kind.REDUCE_GRADIENT: "reduce gradient",
}


class Action(NamedTuple):
    """One thing that a rank does. `stage` is the own stage of the rank that does it, for sends and receives too.

    Actions on the parameters of a whole stage have no microbatch (NO_MICROBATCH).
    """

    kind: Kind
    stage: int
    microbatch: int = NO_MICROBATCH

    @property
    def parts(self) -> tuple[Action, ...]:
        """The actions that it consists of: itself."""
        return (self,)

    def text(self, *, with_stage: bool = True) -> str:
        """Such as `receive gradient stage 1 mb0`, or `receive gradient mb0` where a rank hosts one stage."""
        stage = f" stage {self.stage}" if with_stage else ""
        microbatch = f" mb{self.microbatch}" if self.microbatch != NO_MICROBATCH else ""
        return f"{NAMES[self.kind]}{stage}{microbatch}"

    def __str__(self) -> str:
        return self.text()


class Pair(NamedTuple):
    """A forward and a full backward of different microbatches that may overlap: neither waits for the other, and what they make is sent
    when both are done. Whoever cannot overlap them runs one after the other."""

    forward: Action
    backward: Action

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self.forward, self.backward)

    def text(self, *, with_stage: bool = True) -> str:
        return " + ".join(part.text(with_stage=with_stage) for part in self.parts)

    def __str__(self) -> str:
        return self.text()


Step: TypeAlias = Action | Pair
"""One entry of the list of a rank."""
