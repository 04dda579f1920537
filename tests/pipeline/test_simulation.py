"""The simulated timeline by hand and by longest paths, what follows from a timeline, and drawings of simulated and measured ones."""

from __future__ import annotations

import graphlib
import random
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from trainer_kit.exceptions import ConfigurationError, StateError
from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import Action, Kind, Pair
from trainer_kit.pipeline.building import build_program
from trainer_kit.pipeline.drawing import Drawing
from trainer_kit.pipeline.schedules import SCHEDULES
from trainer_kit.pipeline.simulation import Costs, simulate
from trainer_kit.pipeline.timeline import Timeline

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
SVG = "{http://www.w3.org/2000/svg}"


def spans_of(timeline):
    return {(span.action.kind, *span.action[1:]): (span.start, span.end) for span in timeline.spans}


def test_times_per_stage_and_transfers_by_hand():
    costs = Costs(forward=[2, 3], backward_input=[2, 1], backward_weight=[3, 3], transfer=[0.5, 0.25])
    found = spans_of(build_program("1f1b", 2, 2).simulate(costs))
    assert found == {
        (F, 0, 0): (0, 2),
        (F, 0, 1): (2, 4),
        (F, 1, 0): (2.5, 5.5),  # after the transfer of stage 0
        (B, 1, 0): (5.5, 9.5),
        (B, 0, 0): (9.75, 14.75),  # after the transfer of stage 1
        (F, 1, 1): (9.5, 12.5),
        (B, 1, 1): (12.5, 16.5),
        (B, 0, 1): (16.75, 21.75),
    }
    assert build_program("1f1b", 1, 1).simulate(Costs(backward=1.5)).duration == 2.5


def test_transfers_of_one_direction_run_one_at_a_time():
    """Forwards of 1, transfers of 3: the n-th arrives after 1 + 3n, although all of them are sent by then."""
    found = spans_of(build_program("forward_only_loop", 2, 4, receive_ahead=4).simulate(Costs(transfer=3)))
    assert [found[F, 1, index][0] for index in range(4)] == [4, 7, 10, 13]


def test_a_split_backward_lets_the_previous_stage_go_on_early():
    found = spans_of(build_program("zb1p", 2, 1).simulate(Costs(forward=1, backward_input=2, backward_weight=5)))
    assert found[I, 1, 0] == (2, 4) and found[I, 0, 0] == (4, 6) and found[W, 1, 0] == (4, 9)


def longest_paths(program, costs):
    """When each step ends, without transfer times: after all that comes before it, on its rank and in its data."""
    last = program.layout.num_stages - 1
    lists = [[step for step in steps if step.parts[0].kind.is_compute] for steps in program.steps]
    needs = {step: set() for steps in lists for step in steps}
    whole = {part: step for step in needs for part in step.parts}
    for steps in lists:
        for before, step in pairwise(steps):
            needs[step].add(before)
    for (kind, stage, index), step in whole.items():
        if kind == F and stage:
            needs[step].add(whole[F, stage - 1, index])
        elif kind in (B, I):
            needs[step].add(whole[F, last, index] if stage == last else whole.get((B, stage + 1, index)) or whole[I, stage + 1, index])
    durations, ends = costs.per_stage(last + 1), {}
    for step in graphlib.TopologicalSorter(needs).static_order():
        ends[step] = max((ends[other] for other in needs[step]), default=0.0) + sum(durations[part.kind][part.stage] for part in step.parts)
    return {step.parts[-1]: end for step, end in ends.items()}


@pytest.mark.parametrize("name", SCHEDULES)
def test_times_are_longest_paths(name):
    """For uneven stages, which no closed form covers."""
    rng = random.Random(name)
    schedule = SCHEDULES[name]
    for p, m in ((1, 3), (2, 5), (4, 9), (5, 11)):
        program = build_program(name, p, m, stages_per_rank=schedule.stages_per_rank or 2)
        times = [[rng.randint(1, 9) for _ in range(program.layout.num_stages)] for _ in range(3)]
        timeline = program.simulate(costs := Costs(*times))
        paths = longest_paths(program, costs)
        assert {span.action: span.end for span in timeline.spans if span.action in paths} == paths
        assert timeline.duration == max(paths.values())


def test_what_follows_from_a_timeline():
    """By hand: two ranks, rank 1 waits 1 in its own span of 4; 10 of 14 are busy."""
    a, b = Action(F, 0, 0), Action(B, 0, 0)
    c, d, e = Action(F, 1, 0), Action(I, 1, 0), Action(W, 1, 0)
    records = [
        (1, c, 12.0, 13.0),
        (1, e, 15.0, 16.0),
        (0, a, 10.0, 12.0),
        (0, b, 12.0, 17.0),
        (1, d, 13.0, 14.0),
        (0, Action(Kind.UNSHARD, 0), 1, 2),
    ]
    timeline = Timeline.from_records(records, 2)
    assert [span.action for span in timeline.spans] == [a, b, c, d, e] and timeline.spans[0].start == 0
    assert timeline.duration == 7 and timeline.busy == (7, 3) and timeline.idle == (0, 4) and timeline.waits == (0, 1)
    assert timeline.bubble_share == 4 / 14 and timeline.wait_share == 1 / 4 and timeline.peak_activations == (1, 1)
    assert Timeline((), 2).bubble_share == 0 and Timeline((), 2).duration == 0


def test_wrong_costs_are_refused():
    layout = StageLayout("loop", 2, 2)
    for costs, text in (
        (Costs(forward=[1, 2]), r"Costs\(forward=...\) has 2 times, expected one, or one for each of the 4 stages"),
        (Costs(transfer=-1), r"Costs\(transfer=-1\): a time is a finite number, 0 or more"),
        (Costs(backward=float("nan")), r"Costs\(backward=nan\)"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            simulate([[], []], layout, 1, costs)
    with pytest.raises(StateError, match="rank 0 waits in 'backward stage 0 mb0'"):
        simulate([[Action(B, 0, 0)], []], layout, 1, Costs())


def test_the_drawing_as_text():
    drawing = build_program("1f1b", 2, 2).draw()
    lines = str(drawing).splitlines()
    assert lines[2] == "rank 0   |F0 F1       B0---    B1---" and lines[3] == "rank 1   |   F0 B0--- F1 B1---"
    assert lines[0] == "1f1b: 2 ranks, 2 stages, 2 microbatches, simulated" and lines[4] == "F forward, B backward"
    assert lines[1] == "time 9, bubble 33.3%, live activations per rank at most 1 to 2"
    text = str(build_program("zbv", 2, 3).draw())
    assert "F0a" in text and "W2b" in text and text.endswith("; a, b: the stages of a rank in order")


def elements(drawing, name, css):
    root = ElementTree.fromstring(drawing.svg())
    return [element for element in root.iter(SVG + name) if css in (element.get("class") or "").split()]


def test_the_drawing_as_an_image():
    """A box per computation at its time, a line per transfer from where it is made to where it is needed."""
    program = build_program("dualpipe_v", 3, 7)
    timeline, drawing = program.simulate(), program.draw()
    boxes = elements(drawing, "rect", "box")
    assert len(boxes) == len(timeline.spans) and len(elements(drawing, "g", "group")) == 7
    pairs = sum(isinstance(step, Pair) for steps in program.steps for step in steps)
    assert len(boxes) == sum(part.kind.is_compute for steps in program.steps for step in steps for part in step.parts) and pairs > 5
    lines = elements(drawing, "line", "dep")
    assert len(lines) == sum(action.kind.is_send for rank in range(3) for action in program.actions(rank))
    assert all(float(line.get("x2")) >= float(line.get("x1")) for line in lines)
    hints = [box.find(SVG + "title").text for box in boxes]
    assert "rank 0: forward stage 0 mb0, 0 to 1" in hints and len(set(hints)) == len(boxes)
    first = boxes[hints.index("rank 0: forward stage 0 mb0, 0 to 1")]
    second = boxes[hints.index("rank 1: forward stage 1 mb0, 1 to 2")]
    assert float(second.get("x")) - float(first.get("x")) == float(first.get("width")) and int(first.get("y")) < int(second.get("y"))


def test_the_drawing_in_notebooks_and_files(tmp_path):
    drawing = build_program("1f1b", 2, 2).draw()
    assert drawing.svg() in drawing._repr_html_() and drawing._repr_svg_() == drawing.svg()
    drawing.save(tmp_path / "a.svg")
    drawing.save(tmp_path / "a.txt")
    assert (tmp_path / "a.svg").read_text() == drawing.svg() and (tmp_path / "a.txt").read_text() == f"{drawing}\n"
    assert repr(drawing) == "<Drawing of 1f1b: 2 ranks, 2 stages, 2 microbatches, simulated>"


def test_a_measured_timeline_is_drawn_below_the_simulated_one():
    program = build_program("1f1b", 2, 2)
    records = [(span.rank, span.action, 100 + span.start * 0.013, 100 + span.end * 0.013) for span in program.simulate().spans]
    drawing = program.draw(measured=Timeline.from_records(records, 2))
    assert len(elements(drawing, "rect", "box")) == 16 and "measured" in drawing.svg()
    simulated, measured = str(drawing).split("\n\n")
    assert simulated.splitlines()[2:] == measured.splitlines()[2:]  # each has its own scale
    assert measured.splitlines()[1] == "time 0.117, bubble 33.3%, live activations per rank at most 1 to 2"


def test_large_drawings_are_cut_and_titles_escaped():
    program = build_program("1f1b", 8, 300)
    drawing = program.draw()
    assert len(elements(drawing, "rect", "box")) == 4000 and "the first 4000 of 4800 computations" in drawing.svg()
    assert max(map(len, str(drawing).splitlines())) < 1100
    odd = Drawing({"<a> & b": build_program("1f1b", 1, 1).simulate()}, StageLayout("loop", 1))
    assert ElementTree.fromstring(odd.svg()) is not None and "&lt;a&gt; &amp; b" in odd._repr_html_()
    assert ElementTree.fromstring(Drawing({}, StageLayout("loop", 1)).svg()) is not None
