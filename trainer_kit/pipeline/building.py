"""From the compute orders of a schedule to a checked program: transfers, then the actions of FSDP stages, then the check.

Not here: the orders (`schedules/`), how transfers are found (`transfers.py`), and what is run (the runtime). To keep in mind: every rank
builds the program of all ranks from the same numbers, so nothing here may depend on the rank that runs it.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from operator import itemgetter

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.pipeline.actions import Action, Kind, Step
from trainer_kit.pipeline.checking import check_program
from trainer_kit.pipeline.program import Program
from trainer_kit.pipeline.schedules import Schedule, check_trains, find_schedule, forward_only
from trainer_kit.pipeline.transfers import with_earlier_receives, with_transfers


def build_program(
    schedule: Schedule | str,
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int | None = None,
    sharded_stages: Collection[int] = (),
    receive_ahead: int = 0,
) -> Program:
    """The checked program of all ranks. Raises ConfigurationError for what the schedule does not allow.

    sharded_stages: stages whose parameters are gathered once per pack, before their first use, and whose gradients are reduced once, after
    their last backward of weights. receive_ahead: post each receive that many computations earlier, at the price of that many more
    buffers. Receives must then not wait, and the two directions between two ranks must not share an ordered queue (one NCCL stream).
    """
    schedule = find_schedule(schedule) if isinstance(schedule, str) else schedule
    layout = schedule.layout(num_ranks, stages_per_rank)
    if wrong := set(sharded_stages) - set(range(layout.num_stages)):
        raise ConfigurationError(f"sharded_stages names {sorted(wrong)}, but the pipeline has stages 0 to {layout.num_stages - 1}")
    if receive_ahead < 0:
        raise ConfigurationError(f"receive_ahead={receive_ahead} of a pipeline program, expected 0 or more computations")
    with _collector_paused():
        lists = with_transfers(schedule.compute_order(layout, num_microbatches), layout, num_microbatches)
        if receive_ahead:
            lists = [with_earlier_receives(steps, receive_ahead) for steps in lists]
        if sharded_stages:
            here = [set(sharded_stages).intersection(layout.stages_of(rank)) for rank in range(num_ranks)]
            lists = [with_sharded_stages(steps, stages) if stages else steps for steps, stages in zip(lists, here, strict=True)]
        program = Program(
            schedule=schedule.name,
            layout=layout,
            num_microbatches=num_microbatches,
            steps=tuple(map(tuple, lists)),
            trains=schedule.trains,
            sharded_stages=frozenset(sharded_stages),
            receives_wait=not receive_ahead,
        )
        check_program(program)
    return program


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Large programs are some hundred thousand small tuples that all stay: each collection while they grow would walk all of them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def with_sharded_stages(steps: list[Step], stages: Collection[int]) -> list[Step]:
    """The list of one rank with the actions of its FSDP stages.

    Each is unsharded once, one computation before its first use so that the gathering overlaps with it, and resharded once, after its
    last use; in between it stays whole: one all-gather and one reduce-scatter per pack. The gradient is reduced after the last backward
    and its sends, before the reshard, as FSDP itself does it.
    """
    inserts: list[tuple[int, Action]] = []
    missing, previous = set(stages), 0
    for position, action in _computations(steps, range(len(steps))):
        if action.stage in missing:
            missing.remove(action.stage)
            inserts.append((previous, Action(Kind.UNSHARD, action.stage)))
        if not missing:
            break
        previous = position
    missing = set(stages)
    for position, action in _computations(steps, reversed(range(len(steps)))):
        if action.stage in missing:
            missing.remove(action.stage)
            while position + 1 < len(steps) and steps[position + 1].parts[0].kind.is_send:
                position += 1  # others wait for what is sent, nobody for the gradient of the parameters
            if action.kind != Kind.FORWARD:
                inserts.append((position + 1, Action(Kind.REDUCE_GRADIENT, action.stage)))
            inserts.append((position + 1, Action(Kind.RESHARD, action.stage)))
        if not missing:
            break
    result = steps.copy()
    for position, action in sorted(inserts, key=itemgetter(0))[::-1]:  # the last first, and equal ones so that they keep their order
        result.insert(position, action)
    return result


def _computations(steps: list[Step], positions: Iterable[int]) -> Iterator[tuple[int, Action]]:
    for position in positions:
        for action in steps[position].parts:
            if action.kind.is_compute:
                yield position, action


class ProgramCache:
    """The programs of one pipeline by number of microbatches, which may change from pack to pack; the last ones used are kept."""

    def __init__(
        self,
        schedule: Schedule | str,
        num_ranks: int,
        *,
        stages_per_rank: int | None = None,
        sharded_stages: Collection[int] = (),
        receive_ahead: int = 0,
        keep: int = 16,
    ) -> None:
        self.schedule = find_schedule(schedule) if isinstance(schedule, str) else schedule
        check_trains(self.schedule)
        self.layout = self.schedule.layout(num_ranks, stages_per_rank)
        self._sharded_stages, self._receive_ahead = frozenset(sharded_stages), receive_ahead
        self._build = lru_cache(maxsize=keep)(self._build_one)

    def training(self, num_microbatches: int) -> Program:
        """The program of a pack that is trained on."""
        return self._build(self.schedule, num_microbatches)

    def forward_only(self, num_microbatches: int) -> Program:
        """The program of a pack that is evaluated or predicted, on the same layout."""
        return self._build(forward_only(self.schedule), num_microbatches)

    def _build_one(self, schedule: Schedule, num_microbatches: int) -> Program:
        return build_program(
            schedule,
            self.layout.num_ranks,
            num_microbatches,
            stages_per_rank=self.layout.stages_per_rank,
            sharded_stages=self._sharded_stages,
            receive_ahead=self._receive_ahead,
        )
