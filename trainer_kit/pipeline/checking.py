"""The check of a program before anything runs: complete, ordered, free of deadlock.

It runs the program of all ranks without times and without tensors, under the hardest rules a transport may have: a send waits until its
receive is posted (no buffers), and a receive waits for its data where it stands, if the program says that this works. What completes here
completes under any softer rules, because nothing depends on who comes first. It knows nothing of schedules: the program alone counts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.pipeline.actions import Action, Kind, Pair, Step

if TYPE_CHECKING:
    from trainer_kit.pipeline.program import Program

# What has happened to a microbatch on a stage, one bit each, and how a message calls it.
_POSTED_ACTIVATIONS, _HAS_ACTIVATIONS, _FORWARD, _SENT_ACTIVATIONS = 1, 2, 4, 8
_POSTED_GRADIENT, _HAS_GRADIENT, _INPUT, _WEIGHT, _SENT_GRADIENT = 16, 32, 64, 128, 256
_WORDS = {
    _POSTED_ACTIVATIONS: "receive of activations",
    _HAS_ACTIVATIONS: "arrival of activations",
    _FORWARD: "forward",
    _SENT_ACTIVATIONS: "send of activations",
    _POSTED_GRADIENT: "receive of the gradient",
    _HAS_GRADIENT: "arrival of the gradient",
    _INPUT: "backward of inputs",
    _WEIGHT: "backward of weights",
    _SENT_GRADIENT: "send of the gradient",
}
_RULES = {  # what must have happened before, what has happened after, what that brings to another stage, and how far that one is
    Kind.FORWARD: (_HAS_ACTIVATIONS, _FORWARD, _HAS_ACTIVATIONS, 1),
    Kind.BACKWARD: (_FORWARD | _HAS_GRADIENT, _INPUT | _WEIGHT, _HAS_GRADIENT, -1),
    Kind.BACKWARD_INPUT: (_FORWARD | _HAS_GRADIENT, _INPUT, _HAS_GRADIENT, -1),
    Kind.BACKWARD_WEIGHT: (_INPUT, _WEIGHT, 0, 0),
    Kind.SEND_ACTIVATIONS: (_FORWARD, _SENT_ACTIVATIONS, _HAS_ACTIVATIONS, 1),
    Kind.RECEIVE_ACTIVATIONS: (0, _POSTED_ACTIVATIONS, _HAS_ACTIVATIONS, 0),
    Kind.SEND_GRADIENT: (_INPUT, _SENT_GRADIENT, _HAS_GRADIENT, -1),
    Kind.RECEIVE_GRADIENT: (0, _POSTED_GRADIENT, _HAS_GRADIENT, 0),
}
_OTHER_SIDE = {  # what each waits for, and how far its stage is
    Kind.FORWARD: (Kind.SEND_ACTIVATIONS, -1),
    Kind.BACKWARD: (Kind.SEND_GRADIENT, 1),
    Kind.BACKWARD_INPUT: (Kind.SEND_GRADIENT, 1),
    Kind.SEND_ACTIVATIONS: (Kind.RECEIVE_ACTIVATIONS, 1),
    Kind.RECEIVE_ACTIVATIONS: (Kind.SEND_ACTIVATIONS, -1),
    Kind.SEND_GRADIENT: (Kind.RECEIVE_GRADIENT, -1),
    Kind.RECEIVE_GRADIENT: (Kind.SEND_GRADIENT, 1),
}
_POSTED_FOR = {_HAS_ACTIVATIONS: _POSTED_ACTIVATIONS, _HAS_GRADIENT: _POSTED_GRADIENT}

# Looking a member up in an enum class costs more than the rest of a line in `_run_rank`.
_BACKWARD_WEIGHT, _UNSHARD = Kind.BACKWARD_WEIGHT, Kind.UNSHARD
_SENDS = (Kind.SEND_ACTIVATIONS, Kind.SEND_GRADIENT)


def check_program(program: Program) -> None:
    """Raises ConfigurationError that names rank, stage and microbatch of the first thing that is wrong."""
    if len(program.steps) != program.layout.num_ranks:
        raise ConfigurationError(f"{program!r} has lists for {len(program.steps)} ranks, expected {program.layout.num_ranks}")
    _Check(program).run()


class _Effect(NamedTuple):
    """What a kind of action does to the microbatches of a stage: of the bits in `mask`, those in `needs` and no others must be there, then
    `gives` are added; and which bits arrive in another row by that."""

    row: list[int]
    mask: int
    needs: int
    gives: int
    other_row: list[int]
    arrives: int


class _Channel(NamedTuple):
    """The other side of a kind of transfer of a stage; `posted` are the receives of all stages that wait for data in this direction."""

    rank: int
    kind: Kind
    stage: int
    posted: deque[Action]


class _Check:
    """The state of all ranks while the program runs dry."""

    def __init__(self, program: Program) -> None:
        self.program, self.layout = program, program.layout
        count, stages = program.num_microbatches, range(program.layout.num_stages)
        self.state = [[0] * count for _ in stages]  # by stage and microbatch
        self.state[0] = [_HAS_ACTIVATIONS] * count  # the inputs of the model
        self.closed = [stage in program.sharded_stages for stage in stages]
        self.reduced: set[int] = set()
        self.resharded: set[int] = set()
        self.posted = defaultdict[tuple[int, int], deque[Action]](deque)  # by sender and receiver
        self.effects = [[self._effect(kind, stage) for stage in stages] for kind in _RULES]
        self.channels = [[self._channel(kind, stage) for stage in stages] for kind in _RULES]
        self.waiting: list[Action | None] = [None] * len(program.steps)
        self.runnable = deque(range(len(program.steps)))
        self.ranks = [self._run_rank(rank, steps) for rank, steps in enumerate(program.steps)]

    def _effect(self, kind: Kind, stage: int) -> _Effect:
        """A computation hands over to a stage on its rank, and a send to one on another; the last forward, with the loss, to its own
        backward."""
        ranks = self.layout.ranks
        needs, gives, arrives, step = _RULES[kind]
        to = stage + step
        if kind == Kind.FORWARD and to == len(ranks):
            to, arrives = stage, _HAS_GRADIENT if self.program.trains else 0
        elif not 0 <= to < len(ranks) or (ranks[to] == ranks[stage]) == kind.is_send:
            to, arrives = stage, 0
        return _Effect(self.state[stage], needs | gives, needs, gives, self.state[to], arrives)

    def _channel(self, kind: Kind, stage: int) -> _Channel | None:
        """None where there is no other side."""
        ranks = self.layout.ranks
        other, step = _OTHER_SIDE.get(kind, (kind, 0))
        to = stage + step
        if kind.is_compute or not 0 <= to < len(ranks) or ranks[to] == ranks[stage]:
            return None
        ends = (ranks[stage], ranks[to]) if kind.is_send else (ranks[to], ranks[stage])
        return _Channel(ranks[to], other, to, self.posted[ends])

    def _actions(self, rank: int, steps: tuple[Step, ...]) -> Iterator[Action]:
        """The actions of a rank, pairs taken apart after a look at them."""
        for step in steps:
            if isinstance(step, Pair):
                kinds = (step.forward.kind, step.backward.kind)
                if kinds != (Kind.FORWARD, Kind.BACKWARD) or step.forward[1:] == step.backward[1:]:
                    self.fail(rank, step, "a pair is a forward and a full backward that may overlap, of two microbatches or stages")
                yield from step.parts
            else:
                yield step

    def run(self) -> None:
        while self.runnable:
            rank = self.runnable.popleft()
            self.waiting[rank] = next(self.ranks[rank], None)
        self._check_end()

    def _run_rank(self, rank: int, steps: tuple[Step, ...]) -> Iterator[Action]:
        """Does the actions of a rank in order. Yields the one that it waits in; whoever changes what it may wait for resumes it."""
        effects, channels, closed = self.effects, self.channels, self.closed
        waiting, runnable, receives_wait = self.waiting, self.runnable, self.program.receives_wait
        here, count = self.layout.stages_of(rank), self.program.num_microbatches
        for action in self._actions(rank, steps):
            kind, stage, microbatch = action
            if kind >= _UNSHARD or stage not in here or not 0 <= microbatch < count:
                self._check_place(rank, action)
                self._parameters(rank, action)
                continue
            row, mask, needs, gives, other_row, arrives = effects[kind][stage]
            while row[microbatch] & mask != needs:
                self._check_waits(rank, action, row[microbatch])
                yield action
            row[microbatch] |= gives
            if kind <= _BACKWARD_WEIGHT:
                if closed[stage]:
                    self.fail(rank, action, "the stage is sharded here; an unshard must come before, and its reshard after")
                other_row[microbatch] |= arrives
                continue
            peer, other, to, posted = channels[kind][stage] or self._no_peer(rank, action)
            if kind in _SENDS:
                while not posted:
                    yield action
                if (expected := posted.popleft()) != (other, to, microbatch):
                    self.fail(rank, action, f"rank {peer} expects the data of its '{expected}' first; both sides need the same order")
                other_row[microbatch] |= arrives
            else:
                posted.append(action)
            if waiting[peer] is not None:
                runnable.append(peer)
            while receives_wait and not other_row[microbatch] & arrives:  # in a receive; what is sent is there by now
                yield action

    def _check_place(self, rank: int, action: Action) -> None:
        """Raises if the rank cannot have the action."""
        here, count = self.layout.stages_of(rank), self.program.num_microbatches
        if action.stage not in here:
            self.fail(rank, action, f"the stage is not on this rank, which hosts {list(here)}")
        if (action.kind >= Kind.UNSHARD) != (action.microbatch < 0) or action.microbatch >= count:
            wanted = "none for the parameters of a stage" if action.kind >= Kind.UNSHARD else f"0 to {count - 1}"
            self.fail(rank, action, f"the microbatch is {action.microbatch}, expected {wanted}")

    def _check_waits(self, rank: int, action: Action, happened: int) -> None:
        """Raises unless the action is a computation that waits for data whose receive is posted."""
        needs, gives, *_ = _RULES[action.kind]
        if happened & gives:
            first = "" if action.kind.is_receive else f": the {_words(happened & gives)} of this microbatch was before"
            self.fail(rank, action, f"it comes twice{first}")
        arriving = sum(has for has, posted in _POSTED_FOR.items() if happened & posted)
        if needs & ~happened & ~arriving:
            self.fail(rank, action, f"the {_words(needs & ~happened)} of this microbatch must come before it")

    def _no_peer(self, rank: int, action: Action) -> NoReturn:
        to = action.stage + _OTHER_SIDE[action.kind][1]
        self.fail(rank, action, f"there is no other rank with a stage {to} to exchange data with")

    def _parameters(self, rank: int, action: Action) -> None:
        {Kind.UNSHARD: self._unshard, Kind.RESHARD: self._reshard, Kind.REDUCE_GRADIENT: self._reduce}[action.kind](rank, action)

    def _unshard(self, rank: int, action: Action) -> None:
        if not self.closed[action.stage] or action.stage in self.resharded:
            self.fail(rank, action, "the stage is not sharded, or was unsharded before; once per pack is enough")
        self.closed[action.stage] = False

    def _reshard(self, rank: int, action: Action) -> None:
        if self.closed[action.stage] or action.stage not in self.program.sharded_stages:
            self.fail(rank, action, "the stage is not unsharded")
        self.closed[action.stage] = True
        self.resharded.add(action.stage)

    def _reduce(self, rank: int, action: Action) -> None:
        stage = action.stage
        if stage not in self.program.sharded_stages or stage in self.reduced:
            self.fail(rank, action, "the stage is not sharded, or its gradient was reduced before; once per pack is right")
        for microbatch, happened in enumerate(self.state[stage]):
            if not happened & _WEIGHT:
                self.fail(rank, action, f"the backward of weights of mb{microbatch} must come before it")
        self.reduced.add(stage)

    def _check_end(self) -> None:
        stuck = [rank for rank, action in enumerate(self.waiting) if action is not None]
        if stuck:
            raise ConfigurationError(f"{self.program!r} ends in a deadlock: {'; '.join(map(self._wait_of, stuck[:4]))}; change its order")
        for stage, row in enumerate(self.state):
            expected = self._all_of(stage)
            if row != [expected] * len(row):
                microbatch = next(index for index, happened in enumerate(row) if happened != expected)
                raise ConfigurationError(
                    f"{self.program!r} is not complete: rank {self.layout.ranks[stage]}, stage {stage}, mb{microbatch} lacks: "
                    f"{_words(expected & ~row[microbatch])}; add the missing actions"
                )
        for stage in sorted(self.program.sharded_stages):
            if stage not in self.resharded or (self.program.trains and stage not in self.reduced):
                rank = self.layout.ranks[stage]
                raise ConfigurationError(f"{self.program!r} is not complete: rank {rank} does not reduce and reshard its stage {stage}")

    def _wait_of(self, rank: int) -> str:
        """What a rank waits for, and what the other side does instead."""
        action = self.waiting[rank]
        assert action is not None
        kind, step = _OTHER_SIDE[action.kind]
        other = action._replace(kind=kind, stage=action.stage + step)
        peer = self.layout.ranks[other.stage]
        theirs = self.waiting[peer]
        if all(part != other for steps in self.program.steps[peer] for part in steps.parts):
            does = "does not have it"
        else:
            does = f"waits in '{theirs}'" if theirs else "is at its end"
        return f"rank {rank} waits in '{action}' for '{other}' of rank {peer}, which {does}"

    def _all_of(self, stage: int) -> int:
        """What has happened to each microbatch of a stage in a complete program."""
        ranks = self.layout.ranks
        from_other = stage > 0 and ranks[stage - 1] != ranks[stage]
        to_other = stage < len(ranks) - 1 and ranks[stage + 1] != ranks[stage]
        forward = _HAS_ACTIVATIONS | _FORWARD | _POSTED_ACTIVATIONS * from_other | _SENT_ACTIVATIONS * to_other
        if not self.program.trains:
            return forward
        return forward | _HAS_GRADIENT | _INPUT | _WEIGHT | _POSTED_GRADIENT * to_other | _SENT_GRADIENT * from_other

    def fail(self, rank: int, step: Step, text: str) -> NoReturn:
        raise ConfigurationError(f"{self.program!r}: rank {rank}, '{step}': {text}; change the order that made it")


def _words(bits: int) -> str:
    return ", ".join(word for bit, word in _WORDS.items() if bits & bit)
