"""Schedules against torch's own orders, the closed forms of their papers and their memory bounds. No tensors, no process groups.

Papers give times of one microbatch on one stage: F forward, I and W the backwards of inputs and of weights, B = I + W, here all 1 but B.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import Action, Kind, Pair
from trainer_kit.pipeline.building import build_program
from trainer_kit.pipeline.schedules import SCHEDULES, find_schedule, forward_only
from trainer_kit.pipeline.schedules.rounds import rounds
from trainer_kit.pipeline.simulation import Costs

TRAINING = [name for name, schedule in SCHEDULES.items() if schedule.trains]
TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "zb1p": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT}
TRANSFERS = {
    "SEND_F": Kind.SEND_ACTIVATIONS,
    "RECV_F": Kind.RECEIVE_ACTIVATIONS,
    "SEND_B": Kind.SEND_GRADIENT,
    "RECV_B": Kind.RECEIVE_GRADIENT,
}


def torch_schedule(name, num_ranks, stages_per_rank, num_microbatches):
    """torch's schedule on stages without a model. An order is that of all ranks, so one rank's object is enough."""
    from torch.distributed import pipelining

    def stage(index):
        return SimpleNamespace(
            submod=None,
            num_stages=num_ranks * stages_per_rank,
            group_size=num_ranks,
            group_rank=0,
            group=None,
            stage_index=index,
            is_first=index == 0,
            is_last=False,
        )

    single = name in ("gpipe", "1f1b")
    stages = stage(0) if single else [stage(turn * num_ranks) for turn in range(stages_per_rank)]
    return getattr(pipelining, TORCH[name])(stages, num_microbatches, loss_fn=lambda *_: None)


def translated(actions, kinds):
    """torch's actions in our words, those of other kinds left out."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            yield Pair(*translated(action.sub_actions, KINDS))
        elif action.computation_type.value in kinds:
            yield Action(kinds[action.computation_type.value], action.stage_index, action.microbatch_index)


def ours(name, num_ranks, stages_per_rank, num_microbatches):
    schedule = SCHEDULES[name]
    return schedule.compute_order(schedule.layout(num_ranks, stages_per_rank), num_microbatches)


def per_rank(name):
    return (1, 2, 3) if SCHEDULES[name].stages_per_rank is None else (SCHEDULES[name].stages_per_rank,)


def cases(name, ranks=(1, 2, 3, 4, 8), counts=(1, 2, 3, 4, 5, 8, 9, 11, 16)):
    schedule = SCHEDULES[name]
    return [(p, v, m) for p in ranks for v in per_rank(name) for m in counts if m >= schedule.microbatches_per_rank * p]


@pytest.mark.parametrize("name", TRAINING)
def test_the_order_is_that_of_torch(name):
    """Wherever torch has an order, ours is the same; but torch's table of 1F1B counts the forwards of the last rank from 1."""
    compared = 0
    for p, v, m in cases(name):
        if refused_by_torch(name, p, m):
            continue
        theirs = torch_schedule(name, p, v, m).pipeline_order
        theirs = [list(translated(theirs[rank], KINDS)) for rank in range(p)]
        if name == "1f1b":
            theirs[-1] = [step._replace(microbatch=step.microbatch - 1) if step.kind == Kind.FORWARD else step for step in theirs[-1]]
        assert ours(name, p, v, m) == theirs, (p, v, m)
        compared += 1
    assert compared >= 20


def refused_by_torch(name, num_ranks, num_microbatches):
    if name == "1f1b":
        return num_microbatches < num_ranks
    number_of_rounds = max(1, num_microbatches // num_ranks)
    return name in ("interleaved_1f1b", "zb1p") and num_microbatches % number_of_rounds != 0


def test_what_torch_refuses_is_as_the_docstrings_say():
    """1F1B with fewer microbatches than ranks: all forwards come first. Rounds that do not divide: the first ones are one longer."""
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        torch_schedule("interleaved_1f1b", 4, 2, 9)
    assert rounds(4, 9) == [range(5), range(5, 9)] and rounds(4, 8) == [range(4), range(4, 8)]
    assert rounds(4, 3) == [range(3)] and rounds(4, 11) == [range(6), range(6, 11)]
    last = ours("interleaved_1f1b", 4, 2, 9)[3]
    forwards = [action[1:] for action in last if action.kind == Kind.FORWARD]
    assert forwards == [(stage, index) for indices in rounds(4, 9) for stage in (3, 7) for index in indices]
    f, b = ([Action(kind, 0, index) for index in range(2)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    assert ours("1f1b", 4, 1, 2)[0] == f + b


def test_transfers_come_where_torch_puts_them():
    from torch.distributed.pipelining.schedules import _add_send_recv

    for name, p, v, m in [
        ("interleaved_1f1b", 4, 2, 8),
        ("looped_bfs", 2, 3, 4),
        ("zb1p", 4, 2, 8),
        ("zbv", 4, 2, 8),
        ("dualpipe_v", 3, 2, 7),
    ]:
        orders = torch_schedule(name, p, v, m).pipeline_order
        orders = {rank: [step for step in steps if step is not None] for rank, steps in orders.items()}
        theirs = _add_send_recv(orders, SCHEDULES[name].layout(p, v).rank_of, p * v)
        for rank, steps in enumerate(build_program(name, p, m, stages_per_rank=v).steps):
            assert list(steps) == list(translated(theirs[rank], KINDS | TRANSFERS)), (name, rank)


# Sources: gpipe arXiv:1811.06965 section 2.3; 1f1b arXiv:2104.04473 section 2.2.1; interleaved_1f1b the same, section 2.2.2: (p-1)(F+B)/v
# for times of a whole rank; looped_bfs arXiv:2211.05953 section 3; zb1p arXiv:2401.10241 table 1, ZB-H1; dualpipe_v the table in
# github.com/deepseek-ai/DualPipe, (PP/2-1)(F&B+B-3W) for PP = 2p stages; forward_only: the way of the first microbatch to the last rank,
# and on a V back.
BUBBLES = {
    "gpipe": lambda p: (p - 1) * (1 + 2),
    "1f1b": lambda p: (p - 1) * (1 + 2),
    "interleaved_1f1b": lambda p: (p - 1) * (1 + 2),
    "looped_bfs": lambda p: (p - 1) * (1 + 2),
    "zb1p": lambda p: (p - 1) * (1 + 1 - 1),
    "dualpipe_v": lambda p: (p - 1) * (3 + 2 - 3),
    "forward_only_loop": lambda p: p - 1,
    "forward_only_v": lambda p: 2 * (p - 1),
}


@pytest.mark.parametrize("name", BUBBLES)
def test_the_bubble_is_the_closed_form(name):
    """Idle time of every rank until the last one is done, equal times, no transfers, p microbatches or more."""
    compared = 0
    for p, v, m in cases(name):
        if m >= p:
            assert build_program(name, p, m, stages_per_rank=v).simulate().idle == (BUBBLES[name](p),) * p, (p, v, m)
            compared += 1
    assert compared >= 10


def test_zbv_has_no_bubble():
    """arXiv:2401.10241 section 6: for F = I = W no rank waits from its first to its last computation. The ranks begin one after the other
    and end so, which its paper does not count; counted until the last one is done, the bubble is (p-1) F."""
    for p in (1, 2, 3, 4, 8):
        for m in (2 * p - 1, 2 * p, 17):
            timeline = build_program("zbv", p, m).simulate()
            assert timeline.waits == (0.0,) * p and timeline.wait_share == 0
            assert timeline.idle == (p - 1.0,) * p


@pytest.mark.parametrize("name", ["zbv", "dualpipe_v"])
def test_v_schedules_are_below_1f1b(name):
    """The same model: a stage of 1F1B is two of theirs."""
    for p in (2, 3, 4, 8):
        for m in (2 * p, 3 * p + 1, 40):
            plain = build_program("1f1b", p, m).simulate(Costs(forward=2, backward_input=2, backward_weight=2))
            timeline = build_program(name, p, m).simulate()
            assert sum(timeline.busy) == sum(plain.busy)
            assert timeline.duration < plain.duration and timeline.bubble_share < plain.bubble_share


def test_more_stages_per_rank_divide_the_bubble():
    """arXiv:2104.04473 section 2.2.2, for one model cut into p, 2p and 3p stages of 6, 3 and 2 units."""
    for name in ("interleaved_1f1b", "looped_bfs"):
        for v in (1, 2, 3):
            costs = Costs(forward=6 / v, backward_input=6 / v, backward_weight=6 / v)
            assert build_program(name, 4, 8, stages_per_rank=v).simulate(costs).idle == pytest.approx([3 * 18 / v] * 4)


# From the same papers; dualpipe_v: PP + 1 for PP = 2p stages; interleaved ones: forwards before the first backward, and the one with it.
PEAKS = {
    "gpipe": lambda p, v, m, r: m,
    "1f1b": lambda p, v, m, r: min(p - r, m),
    "interleaved_1f1b": lambda p, v, m, r: min((v - 1) * len(rounds(p, m)[0]) + 2 * (p - 1 - r) + 1, v * m),
    "looped_bfs": lambda p, v, m, r: v * m,
    "zb1p": lambda p, v, m, r: min((v - 1) * len(rounds(p, m)[0]) + p, v * m),
    "zbv": lambda p, v, m, r: 2 * p if m >= 2 * p - 1 else min(m, 2 * p - 1 - r) + min(m, r + 1),
    "dualpipe_v": lambda p, v, m, r: 2 * p + 1,
    "forward_only_loop": lambda p, v, m, r: 0,
    "forward_only_v": lambda p, v, m, r: 0,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_live_activations_reach_the_bound_and_not_more(name):
    for p, v, m in cases(name):
        program = build_program(name, p, m, stages_per_rank=v)
        bound = tuple(PEAKS[name](p, v, m, rank) for rank in range(p))
        assert program.simulate().peak_activations == bound, (p, v, m)
        assert tuple(SCHEDULES[name].peak_activations(program.layout, m, rank) for rank in range(p)) == bound


def test_every_schedule_computes_everything_once():
    for name, schedule in SCHEDULES.items():
        for p, v, m in cases(name, counts=range(1, 10)):
            layout = schedule.layout(p, v)
            for rank, steps in enumerate(schedule.compute_order(layout, m)):
                counts = Counter(part for step in steps for part in step.parts)
                assert set(counts.values()) == {1}
                for stage in layout.stages_of(rank):
                    for index in range(m):
                        done = {kind for kind in KINDS.values() if Action(kind, stage, index) in counts}
                        whole, split = {Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
                        assert done in ([whole, split] if schedule.trains else [{Kind.FORWARD}])
                        assert done != split or schedule.splits_backward
                assert {part.stage for part in counts} == set(layout.stages_of(rank))


def test_layouts():
    assert StageLayout("loop", 3, 2).ranks == (0, 1, 2, 0, 1, 2) and StageLayout("v", 3, 2).ranks == (0, 1, 2, 2, 1, 0)
    assert StageLayout("v", 3, 2).stages_of(1) == (1, 4) and StageLayout("loop", 3, 2).stages_of(1) == (1, 4)
    assert StageLayout("v", 2, 3).ranks == (0, 1, 1, 0, 0, 1)
    assert StageLayout("loop", 3).num_stages == 3 and StageLayout("v", 3, 2).rank_of(5) == 0
    with pytest.raises(ConfigurationError, match="num_ranks=0"):
        StageLayout("loop", 0)


def test_forward_only_keeps_the_layout():
    for name in TRAINING:
        schedule = SCHEDULES[name]
        other = forward_only(schedule)
        assert not other.trains and other.layout(4, schedule.stages_per_rank or 3) == schedule.layout(4, schedule.stages_per_rank or 3)


def test_names_are_found_in_any_spelling():
    assert find_schedule("1F1B").name == "1f1b" and find_schedule("Interleaved1F1B").name == "interleaved_1f1b"
    assert find_schedule("dualpipe-v").name == "dualpipe_v"
    with pytest.raises(ConfigurationError, match="no pipeline schedule '1f1b1'.*did you mean '1f1b'"):
        find_schedule("1f1b1")


def test_what_a_schedule_does_not_allow_is_said():
    """Contract 22: how many microbatches or stages it needs, and what to change."""
    with pytest.raises(
        ConfigurationError, match="'dualpipe_v' on 4 pipeline ranks needs 8 microbatches or more .* got 7; make global_batch"
    ):
        build_program("dualpipe_v", 4, 7)
    with pytest.raises(ConfigurationError, match="'zbv' needs exactly 2 stages per rank, got 3"):
        build_program("zbv", 4, 7, stages_per_rank=3)
    with pytest.raises(ConfigurationError, match="'1f1b' needs exactly 1 stage per rank, got 2.*'interleaved_1f1b'"):
        build_program("1f1b", 4, 7, stages_per_rank=2)
    with pytest.raises(ConfigurationError, match="needs 1 microbatches or more .* got 0"):
        build_program("gpipe", 4, 0)
