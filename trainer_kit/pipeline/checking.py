"""The check of a program before anything runs: complete, ordered, free of deadlock.

It runs the program of all ranks without times and without tensors, under the hardest rules a transport may have: a send waits until its
receive is posted (no buffers), and a receive waits for its data where it stands, if the program says that this works. What completes here
completes under any softer rules, because nothing depends on who comes first. It knows nothing of schedules: the program alone counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, NoReturn, cast

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
# By kind: what must have happened before, what has happened after; for receives what is posted, and what has arrived in the end.
_RULES = (
    (_HAS_ACTIVATIONS, _FORWARD),
    (_FORWARD | _HAS_GRADIENT, _INPUT | _WEIGHT),
    (_FORWARD | _HAS_GRADIENT, _INPUT),
    (_INPUT, _WEIGHT),
    (_FORWARD, _SENT_ACTIVATIONS),
    (_POSTED_ACTIVATIONS, _HAS_ACTIVATIONS),
    (_INPUT, _SENT_GRADIENT),
    (_POSTED_GRADIENT, _HAS_GRADIENT),
)
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


def check_program(program: Program) -> None:
    """Raises ConfigurationError that names rank, stage and microbatch of the first thing that is wrong."""
    if len(program.steps) != program.layout.num_ranks:
        raise ConfigurationError(f"{program!r} has lists for {len(program.steps)} ranks, expected {program.layout.num_ranks}")
    _Check(program).run()


class _Check:
    """The state of all ranks while the program runs dry."""

    def __init__(self, program: Program) -> None:
        self.program, self.layout = program, program.layout
        count, ranks = program.num_microbatches, program.layout.ranks
        self.state = [[0] * count for _ in ranks]  # by stage and microbatch
        self.state[0] = [_HAS_ACTIVATIONS] * count  # the inputs of the model
        self.closed = [stage in program.sharded_stages for stage in range(len(ranks))]
        self.reduced: set[int] = set()
        self.resharded: set[int] = set()
        self.handovers = self._handovers()
        self.posted = {(a, b): deque[Action]() for r, s in pairwise(ranks) if r != s for a, b in ((r, s), (s, r))}
        self.todo = [iter(self._flat(rank, steps)) for rank, steps in enumerate(program.steps)]
        self.waiting: list[Action | None] = [None] * len(self.todo)
        self.runnable = deque(range(len(self.todo)))

    def _handovers(self) -> list[list[tuple[list[int], int] | None]]:
        """By kind and stage: what a computation puts where, without a transfer: into the next or previous stage on the same rank, and
        from the last stage's forward, with the loss, into its own backward."""
        ranks, state = self.layout.ranks, self.state
        stages = range(len(ranks))
        onwards = [(state[s + 1], _HAS_ACTIVATIONS) if s < stages[-1] and ranks[s + 1] == ranks[s] else None for s in stages]
        if self.program.trains:
            onwards[-1] = (state[-1], _HAS_GRADIENT)
        back = [(state[s - 1], _HAS_GRADIENT) if s and ranks[s - 1] == ranks[s] else None for s in stages]
        return [onwards, back, back, [None] * len(ranks)]

    def _flat(self, rank: int, steps: tuple[Step, ...]) -> Sequence[Action]:
        """The actions of a rank, pairs taken apart after a look at them; those that this rank cannot have are refused."""
        flat = [*self._apart(rank, steps)] if Pair in set(map(type, steps)) else cast("tuple[Action, ...]", steps)
        here, count = self.layout.stages_of(rank), self.program.num_microbatches
        if wrong := set(map(itemgetter(1), flat)).difference(here):
            action = next(action for action in flat if action.stage in wrong)
            self.fail(rank, action, f"the stage is not on this rank, which hosts {list(here)}")
        for kind, microbatch in set(map(itemgetter(0, 2), flat)):
            if (kind >= Kind.UNSHARD) != (microbatch < 0) or microbatch >= count:
                action = next(action for action in flat if (action.kind, action.microbatch) == (kind, microbatch))
                wanted = "none for the parameters of a stage" if kind >= Kind.UNSHARD else f"0 to {count - 1}"
                self.fail(rank, action, f"the microbatch is {microbatch}, expected {wanted}")
        return flat

    def _apart(self, rank: int, steps: tuple[Step, ...]) -> Iterator[Action]:
        for step in steps:
            if isinstance(step, Pair):
                kinds = (step.forward.kind, step.backward.kind)
                if kinds != (Kind.FORWARD, Kind.BACKWARD) or step.forward[1:] == step.backward[1:]:
                    self.fail(rank, step, "a pair is a forward and a full backward that may overlap, of two microbatches or stages")
            yield from step.parts

    def run(self) -> None:
        do = [self._compute] * 4 + [self._send, self._receive] * 2 + [self._unshard, self._reshard, self._reduce]
        while self.runnable:
            rank = self.runnable.popleft()
            waited = self.waiting[rank]
            self.waiting[rank] = None
            if waited is not None and not do[waited.kind](rank, waited, True):
                self.waiting[rank] = waited
                continue
            for action in self.todo[rank]:
                if not do[action[0]](rank, action, False):
                    self.waiting[rank] = action
                    break
        self._check_end()

    def _compute(self, rank: int, action: Action, again: bool) -> bool:
        kind, stage, microbatch = action
        row, (needs, gives) = self.state[stage], _RULES[kind]
        happened = row[microbatch]
        if happened & needs != needs or happened & gives:
            return self._cannot(rank, action, happened)
        if self.closed[stage]:
            self.fail(rank, action, "the stage is sharded here; an unshard must come before, and its reshard after")
        row[microbatch] = happened | gives
        handover = self.handovers[kind][stage]
        if handover is not None:
            handover[0][microbatch] |= handover[1]
        return True

    def _cannot(self, rank: int, action: Action, happened: int) -> bool:
        """False where a computation waits for data whose receive is posted; else an error."""
        needs, gives = _RULES[action.kind]
        missing = needs & ~happened
        if happened & gives:
            self.fail(rank, action, f"it comes twice: the {_words(happened & gives)} of this microbatch was before")
        arriving = sum(has for has, posted in _POSTED_FOR.items() if happened & posted)
        if missing & ~arriving == 0:
            return False
        return self.fail(rank, action, f"the {_words(missing)} of this microbatch must come before it")

    def _peer(self, rank: int, action: Action, to: int) -> int:
        if not 0 <= to < self.layout.num_stages or self.layout.ranks[to] == rank:
            self.fail(rank, action, f"there is no other rank with a stage {to} to exchange data with")
        return self.layout.ranks[to]

    def _send(self, rank: int, action: Action, again: bool) -> bool:
        kind, stage, microbatch = action
        to, receive = (stage + 1, Kind.RECEIVE_ACTIVATIONS) if kind == Kind.SEND_ACTIVATIONS else (stage - 1, Kind.RECEIVE_GRADIENT)
        row, (needs, gives) = self.state[stage], _RULES[kind]
        if row[microbatch] & needs != needs or row[microbatch] & gives:
            self._cannot(rank, action, row[microbatch])
        peer = self._peer(rank, action, to)
        posted = self.posted[rank, peer]
        if not posted:
            return False
        if posted[0] != (receive, to, microbatch):
            self.fail(rank, action, f"rank {peer} expects the data of its '{posted[0]}' first; both sides need the same order")
        posted.popleft()
        row[microbatch] |= gives
        self.state[to][microbatch] |= _RULES[receive][1]
        if self.waiting[peer] is not None:
            self.runnable.append(peer)
        return True

    def _receive(self, rank: int, action: Action, again: bool) -> bool:
        kind, stage, microbatch = action
        row, (posts, arrives) = self.state[stage], _RULES[kind]
        if not again:
            if row[microbatch] & posts:
                self.fail(rank, action, "it comes twice")
            peer = self._peer(rank, action, stage + (1 if kind == Kind.RECEIVE_GRADIENT else -1))
            row[microbatch] |= posts
            self.posted[peer, rank].append(action)
            if self.waiting[peer] is not None:
                self.runnable.append(peer)
        return not self.program.receives_wait or bool(row[microbatch] & arrives)

    def _unshard(self, rank: int, action: Action, again: bool) -> bool:
        if not self.closed[action.stage] or action.stage in self.resharded:
            self.fail(rank, action, "the stage is not sharded, or was unsharded before; once per pack is enough")
        self.closed[action.stage] = False
        return True

    def _reshard(self, rank: int, action: Action, again: bool) -> bool:
        if self.closed[action.stage] or action.stage not in self.program.sharded_stages:
            self.fail(rank, action, "the stage is not unsharded")
        self.closed[action.stage] = True
        self.resharded.add(action.stage)
        return True

    def _reduce(self, rank: int, action: Action, again: bool) -> bool:
        stage = action.stage
        if stage not in self.program.sharded_stages or stage in self.reduced:
            self.fail(rank, action, "the stage is not sharded, or its gradient was reduced before; once per pack is right")
        for microbatch, happened in enumerate(self.state[stage]):
            if not happened & _WEIGHT:
                self.fail(rank, action, f"the backward of weights of mb{microbatch} must come before it")
        self.reduced.add(stage)
        return True

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
