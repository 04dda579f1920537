"""Programs: transfers and FSDP actions, the check that accepts what is right and nothing else, and the cache."""

from __future__ import annotations

import gc
import graphlib
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.pipeline.actions import Action, Kind, Pair
from trainer_kit.pipeline.building import ProgramCache, build_program
from trainer_kit.pipeline.checking import check_program
from trainer_kit.pipeline.schedules import SCHEDULES
from trainer_kit.pipeline.simulation import Costs

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
PAGE = """
rank 0 (stage 0)       rank 1 (stage 1)
forward           mb0  receive activations  mb0
send activations  mb0  forward              mb0
forward           mb1  receive activations  mb1
send activations  mb1  backward             mb0
receive gradient  mb0  send gradient        mb0
forward           mb2  receive activations  mb2
send activations  mb2  forward              mb1
backward          mb0  backward             mb1
receive gradient  mb1  send gradient        mb1
forward           mb3  receive activations  mb3
send activations  mb3  forward              mb2
backward          mb1  backward             mb2
receive gradient  mb2  send gradient        mb2
backward          mb2  forward              mb3
receive gradient  mb3  backward             mb3
backward          mb3  send gradient        mb3
"""


def test_the_program_of_the_reference_page():
    """The page calls it 1F1B; its rank 0 runs two forwards ahead per rank behind it, as interleaved 1F1B does with one stage per rank."""
    assert str(build_program("interleaved_1f1b", 2, 4, stages_per_rank=1)) == PAGE.strip()


def test_the_text_names_stages_and_pairs():
    text = str(build_program("dualpipe_v", 2, 4, sharded_stages=range(4)))
    assert text.startswith("rank 0 (stages 0, 3)")
    for line in (
        "unshard stage 0",
        "backward of inputs stage 3   mb0",
        "forward stage 0 mb3 + backward stage 3 mb1",
        "reduce gradient stage 0",
    ):
        assert line in text, line
    assert str(Action(Kind.RECEIVE_GRADIENT, 2, 5)) == "receive gradient stage 2 mb5"


@st.composite
def programs(draw, names=tuple(SCHEDULES), max_ranks=8, **options):
    schedule = SCHEDULES[draw(st.sampled_from(names))]
    num_ranks = draw(st.integers(1, max_ranks))
    stages_per_rank = schedule.stages_per_rank or draw(st.integers(1, 3))
    least = max(1, schedule.microbatches_per_rank * num_ranks)
    num_microbatches = draw(st.integers(1, 9) if least == 1 else st.integers(least, least + 8))
    return build_program(schedule, num_ranks, num_microbatches, stages_per_rank=stages_per_rank, **options)


def channels(program):
    """By (sender, receiver): what is sent, and what is received, in order, in the words of the sender."""
    sent, received = {}, {}
    for rank in range(program.layout.num_ranks):
        for action in program.actions(rank):
            if action.kind.is_send:
                sent.setdefault((rank, program.peer(action)), []).append(action)
            elif action.kind.is_receive:
                received.setdefault((program.peer(action), rank), []).append(send_of(action))
    return sent, received


@settings(deadline=None, max_examples=40)
@given(programs(), st.integers(0, 3), st.booleans())
def test_every_built_program_is_right(program, ahead, sharded):
    """Contract 20, by other means than the check, which accepted it: same order on both sides, sends right after, nothing twice, no
    circle even if sends and receives wait for each other."""
    sent, received = channels(program)
    assert sent == received
    for steps in program.steps:
        for before, step in pairwise(steps):
            if isinstance(step, Action) and step.kind in (Kind.SEND_ACTIVATIONS, Kind.SEND_GRADIENT):
                makes = (F,) if step.kind == Kind.SEND_ACTIVATIONS else (B, I)
                parts = before.parts if before.parts[0].kind.is_compute else steps[steps.index(before) - 1].parts  # a pair has two sends
                assert any(part.kind in makes and part[1:] == step[1:] for part in parts)
    assert holds(program)
    options = {"receive_ahead": ahead, "sharded_stages": range(program.layout.num_stages) if sharded else ()}
    other = build_program(
        program.schedule, program.layout.num_ranks, program.num_microbatches, **options, stages_per_rank=program.layout.stages_per_rank
    )
    assert channels(other) == (sent, received) and holds(other)
    for rank in range(program.layout.num_ranks):
        assert computations(other, rank) == computations(program, rank)


def computations(program, rank):
    return [action for action in program.actions(rank) if action.kind.is_compute]


def holds(program):
    """An independent judge of order: what must come before what, and in a circle nothing can.

    If receives wait, a send and its receive are one event. Else the receive comes before the send, and the send before its use.
    """
    last, ranks = program.layout.num_stages - 1, program.layout.ranks
    graph = graphlib.TopologicalSorter()
    done = {action for rank in range(program.layout.num_ranks) for action in program.actions(rank)}
    joined = dict.fromkeys((Kind.RECEIVE_ACTIVATIONS, Kind.RECEIVE_GRADIENT), program.receives_wait)

    def event(action):
        return send_of(action) if joined.get(action.kind) else action

    def backward(stage, index):
        return next((a for a in (Action(B, stage, index), Action(I, stage, index)) if a in done), None)

    def arrival(kind, stage, index, here):
        received = Action(kind, stage, index)
        return [here] if here is not None else [received, send_of(received)]

    for rank in range(program.layout.num_ranks):
        actions = list(program.actions(rank))
        for before, action in pairwise(actions):
            graph.add(event(action), event(before))
        for action in actions:
            kind, stage, index = action
            needs = []
            if kind == F and stage:
                here = Action(F, stage - 1, index) if ranks[stage - 1] == rank else None
                needs = arrival(Kind.RECEIVE_ACTIVATIONS, stage, index, here)
            elif kind in (B, I):
                needs = [Action(F, stage, index)]
                if stage < last:
                    here = backward(stage + 1, index) if ranks[stage + 1] == rank else None
                    needs += arrival(Kind.RECEIVE_GRADIENT, stage, index, here)
            elif kind in (W, Kind.SEND_GRADIENT):
                needs = [backward(stage, index)]
            elif kind == Kind.SEND_ACTIVATIONS:
                needs = [Action(F, stage, index)]
            elif not program.receives_wait and kind in joined:
                graph.add(send_of(action), action)
            graph.add(event(action), *map(event, needs))
    sent, received = channels(program)
    try:
        graph.prepare()
    except graphlib.CycleError:
        return False
    return sent == received


def send_of(action):
    if action.kind == Kind.RECEIVE_ACTIVATIONS:
        return Action(Kind.SEND_ACTIVATIONS, action.stage - 1, action.microbatch)
    return Action(Kind.SEND_GRADIENT, action.stage + 1, action.microbatch)


def accepts(program):
    try:
        check_program(program)
    except ConfigurationError:
        return False
    return True


def with_steps(program, rank, steps):
    return replace(program, steps=(*program.steps[:rank], tuple(steps), *program.steps[rank + 1 :]))


@settings(deadline=None, max_examples=60)
@given(st.one_of(programs(max_ranks=4), programs(max_ranks=4, receive_ahead=2)), st.randoms(use_true_random=False))
def test_dropped_and_doubled_actions_are_refused(program, rng):
    rank = rng.randrange(program.layout.num_ranks)
    steps = list(program.steps[rank])
    at = rng.randrange(len(steps))
    assert not accepts(with_steps(program, rank, steps[:at] + steps[at + 1 :]))
    again = rng.randint(0, len(steps))
    assert not accepts(with_steps(program, rank, [*steps[:again], steps[at], *steps[again:]]))


@settings(deadline=None, max_examples=100)
@given(st.one_of(programs(max_ranks=4), programs(max_ranks=4, receive_ahead=1)), st.randoms(use_true_random=False))
def test_swapped_actions_are_refused_exactly_if_the_order_is_lost(program, rng):
    """Some swaps do no harm, such as of two computations that do not need each other: the independent judge decides."""
    rank = rng.randrange(program.layout.num_ranks)
    steps = list(program.steps[rank])
    first = rng.randrange(len(steps))
    second = min(len(steps) - 1, first + rng.choice((1, 1, 1, 2, 5)))
    steps[first], steps[second] = steps[second], steps[first]
    swapped = with_steps(program, rank, steps)
    assert accepts(swapped) == holds(swapped)


@pytest.mark.parametrize("ahead", [0, 1])
def test_all_swaps_of_neighbours_in_one_program(ahead):
    program = build_program("zb1p", 3, 4, receive_ahead=ahead)
    verdicts = Counter()
    for rank, steps in enumerate(program.steps):
        for at in range(len(steps) - 1):
            swapped = with_steps(program, rank, [*steps[:at], steps[at + 1], steps[at], *steps[at + 2 :]])
            verdicts[accepts(swapped), holds(swapped)] += 1
    assert set(verdicts) == {(True, True), (False, False)} and min(verdicts.values()) > 10


@pytest.fixture
def small():
    """Rank 0: F0 send F1 send recv B0 F2 ...; rank 1: recv F0 recv B0 send ..."""
    return build_program("1f1b", 2, 3)


def changed(program, rank, change):
    steps = list(program.steps[rank])
    change(steps)
    return with_steps(program, rank, steps)


def refuses(program, *texts):
    with pytest.raises(ConfigurationError) as caught:
        check_program(program)
    for text in texts:
        assert text in str(caught.value), str(caught.value)


def test_messages_name_rank_stage_and_microbatch(small):
    """Contract 20."""
    refuses(
        changed(small, 1, lambda s: s.remove(Action(F, 1, 2))),
        "rank 1, 'backward stage 1 mb2': the forward, arrival of the gradient of this microbatch must come before",
    )
    refuses(changed(small, 0, lambda s: s.remove(Action(B, 0, 2))), "rank 0, stage 0, mb2 lacks: backward of inputs, backward of weights")
    refuses(changed(small, 0, lambda s: s.append(Action(B, 0, 2))), "rank 0, 'backward stage 0 mb2': it comes twice")
    refuses(
        changed(small, 0, lambda s: s.append(Action(B, 1, 2))),
        "rank 0, 'backward stage 1 mb2': the stage is not on this rank, which hosts [0]",
    )
    refuses(changed(small, 0, lambda s: s.append(Action(B, 0, 7))), "rank 0, 'backward stage 0 mb7': the microbatch is 7, expected 0 to 2")
    refuses(
        changed(small, 0, lambda s: s.remove(Action(Kind.SEND_ACTIVATIONS, 0, 1))),
        "rank 1 waits in 'receive activations stage 1 mb1' for 'send activations stage 0 mb1' of rank 0, which does not have it",
    )
    refuses(
        changed(small, 1, lambda s: s.remove(Action(Kind.SEND_GRADIENT, 1, 2))),
        "deadlock: rank 0 waits in 'receive gradient stage 0 mb2' for 'send gradient stage 1 mb2' of rank 1, which does not have it",
    )


def test_receives_in_another_order_are_refused():
    program = build_program("gpipe", 2, 2)

    def swap(steps):
        first, second = (steps.index(Action(Kind.RECEIVE_ACTIVATIONS, 1, index)) for index in (0, 1))
        steps[first], steps[second] = steps[second], steps[first]

    refuses(
        changed(program, 1, swap),
        "rank 0, 'send activations stage 0 mb0': rank 1 expects the data of its 'receive activations stage 1 mb1' first",
    )


def test_a_circle_of_sends_is_a_deadlock():
    """Both send first: it would run with buffers, and hang without."""
    program = build_program("1f1b", 2, 2)

    def receive_late(steps):
        receive = Action(Kind.RECEIVE_GRADIENT, 0, 0)
        steps.remove(receive)
        steps.insert(steps.index(Action(B, 0, 0)), receive)

    late = changed(program, 0, receive_late)
    check_program(late)

    def receive_later(steps):
        receive = Action(Kind.RECEIVE_ACTIVATIONS, 1, 1)
        steps.remove(receive)
        steps.insert(steps.index(Action(Kind.SEND_GRADIENT, 1, 0)) + 1, receive)

    def send_first(steps):
        steps.remove(Action(Kind.RECEIVE_GRADIENT, 0, 0))
        steps.insert(steps.index(Action(Kind.SEND_ACTIVATIONS, 0, 1)) + 1, Action(Kind.RECEIVE_GRADIENT, 0, 0))

    both = changed(changed(program, 0, send_first), 1, receive_later)
    refuses(both, "deadlock", "'receive activations stage 1 mb1' of rank 1, which waits in 'send gradient stage 1 mb0'")


def test_pairs_are_two_that_may_overlap():
    program = build_program("dualpipe_v", 2, 4)
    rank, at = next((rank, at) for rank, steps in enumerate(program.steps) for at, step in enumerate(steps) if isinstance(step, Pair))
    pair = program.steps[rank][at]
    turned = changed(program, rank, lambda steps: steps.__setitem__(at, Pair(pair.backward, pair.forward)))
    refuses(turned, f"rank {rank}", "a pair is a forward and a full backward")
    assert [part.kind for part in pair.parts] == [F, B]


@settings(deadline=None, max_examples=30)
@given(programs(max_ranks=4, sharded_stages=()))
def test_sharded_stages_are_gathered_and_reduced_once(program):
    """Contract 44b: one unshard, one reshard and one reduction per stage and pack, around all of its computations."""
    layout, num_stages = program.layout, program.layout.num_stages
    sharded = set(range(0, num_stages, 2))
    program = build_program(
        program.schedule, layout.num_ranks, program.num_microbatches, stages_per_rank=layout.stages_per_rank, sharded_stages=sharded
    )
    for rank in range(layout.num_ranks):
        actions = list(program.actions(rank))
        for stage in layout.stages_of(rank):
            places = {kind: [at for at, action in enumerate(actions) if action[:2] == (kind, stage)] for kind in Kind}
            uses = sorted(at for kind in (F, B, I, W) for at in places[kind])
            parameters = [places[kind] for kind in (Kind.UNSHARD, Kind.REDUCE_GRADIENT, Kind.RESHARD)]
            if stage not in sharded:
                assert parameters == [[], [], []]
                continue
            (unshard,), reduce, (reshard,) = parameters
            assert unshard < uses[0] and uses[-1] < reshard
            assert sum(action.kind.is_compute for action in actions[unshard : uses[0]]) <= 1
            assert len(reduce) == program.trains and all(uses[-1] < at < reshard for at in reduce)


def test_wrong_actions_of_sharded_stages_are_refused():
    program = build_program("1f1b", 2, 3, sharded_stages=[1])
    unshard, reshard, reduce = (Action(kind, 1) for kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRADIENT))
    refuses(changed(program, 1, lambda s: s.remove(unshard)), "rank 1, 'forward stage 1 mb0': the stage is sharded here")
    refuses(changed(program, 1, lambda s: s.remove(reshard)), "rank 1 does not reduce and reshard its stage 1")
    refuses(changed(program, 1, lambda s: s.remove(reduce)), "rank 1 does not reduce and reshard its stage 1")
    refuses(
        changed(program, 1, lambda s: s.insert(3, reduce)), "rank 1, 'reduce gradient stage 1': the backward of weights of mb0 must come"
    )
    refuses(
        changed(program, 1, lambda s: s.append(unshard)), "rank 1, 'unshard stage 1': the stage is not sharded, or was unsharded before"
    )
    refuses(changed(program, 0, lambda s: s.append(Action(Kind.RESHARD, 0))), "rank 0, 'reshard stage 0': the stage is not unsharded")
    with pytest.raises(ConfigurationError, match=r"sharded_stages names \[2\], but the pipeline has stages 0 to 1"):
        build_program("1f1b", 2, 3, sharded_stages=[2])


def test_receives_ahead_hide_transfers():
    """A receive that is posted when its data are needed waits for the whole transfer; one computation earlier is enough."""
    times = [build_program("gpipe", 2, 8, receive_ahead=ahead).simulate(Costs(transfer=0.5)).duration for ahead in (0, 1, 2)]
    each = 1 + 8 * (0.5 + 1) + 2 + 8 * (0.5 + 2)  # F of rank 0, transfers and F of rank 1, B of rank 1, transfers and B of rank 0
    hidden = 1 + 0.5 + 8 * 1 + 2 + 0.5 + 8 * 2
    assert times == [each, hidden, hidden]
    with pytest.raises(ConfigurationError, match="receive_ahead=-1"):
        build_program("gpipe", 2, 8, receive_ahead=-1)


def test_programs_are_kept_by_number_of_microbatches():
    cache = ProgramCache("zbv", 2, sharded_stages=[0], keep=2)
    program = cache.training(5)
    assert cache.training(5) is program and cache.forward_only(5) is cache.forward_only(5)
    assert program.num_microbatches == 5 and program.sharded_stages == {0} and program.trains
    assert cache.forward_only(5).layout == program.layout == cache.layout and not cache.forward_only(5).trains
    cache.training(6), cache.training(7)
    assert cache.training(5) is not program and cache.training(5) == program
    with pytest.raises(ConfigurationError, match="exactly 2 stages"):
        ProgramCache("zbv", 2, stages_per_rank=1)
    with pytest.raises(ConfigurationError, match="'forward_only_v' has no backwards; choose one that trains: 1f1b, dualpipe_v"):
        ProgramCache("forward_only_v", 2)


def test_a_large_program_is_built_and_checked():
    """64 ranks, 512 microbatches; the collector is as it was. How long it takes is `benchmarks/pipeline_programs.py`'s to judge."""
    for name, v in (("1f1b", 1), ("interleaved_1f1b", 2)):
        program = build_program(name, 64, 512, stages_per_rank=v)
        assert sum(map(len, program.steps)) == 2 * 512 * (64 * v + 2 * (64 * v - 1))
        assert gc.isenabled()


def test_a_schedule_that_cannot_run_is_refused():
    order = [[Action(F, 0, 0), Action(B, 0, 0)], [Action(B, 1, 0), Action(F, 1, 0)]]
    wrong = replace(SCHEDULES["1f1b"], name="own", order=lambda layout, m: order)
    with pytest.raises(ConfigurationError, match="rank 1, 'backward stage 1 mb0': the forward, arrival of the gradient"):
        build_program(wrong, 2, 1)
    stuck = replace(wrong, order=lambda layout, m: [order[0][::-1], order[1][::-1]])
    with pytest.raises(
        ConfigurationError, match="circle.*rank 0 for the inputs of 'backward stage 0 mb0', rank 1 for the inputs of 'forward"
    ):
        build_program(stuck, 2, 1)


def test_the_same_numbers_make_the_same_program():
    random.seed(1)
    first = build_program("dualpipe_v", 3, 7)
    random.seed(2)
    assert build_program("dualpipe_v", 3, 7) == first and "7 microbatches" in repr(first)
