"""Callbacks, events and descriptions over pipeline stages: they work on every rank, and say what is true of the whole run."""

import csv
import io
import json
import logging
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import pytest

from tests.ranks.stage_runs import (
    LAYOUTS,
    NUM_LAYERS,
    WIDTH,
    Fit,
    Net,
    OfRanks,
    assert_same_history,
    assert_same_weights,
    history,
    num_ranks,
    provider,
    rows,
    run_of,
    weights_of,
)
from tests.test_events import listener
from trainer_kit import Callback
from trainer_kit import callbacks as c
from trainer_kit.exceptions import Interrupted, StateError
from trainer_kit.optim import Piecewise
from trainer_kit.testing import run_on_ranks

BUILT_IN = {
    "CSV": lambda folder: c.CSV(folder / "m.csv"),
    "Checkpoint": lambda folder: c.Checkpoint(folder / "checkpoints", every=2, keep_last=1),
    "EMA": lambda folder: c.EMA(0.5),
    "EarlyStopping": lambda folder: c.EarlyStopping("val/loss", patience=50),
    "Evaluate": lambda folder: c.Evaluate(provider(5, 4), every=2, at_start=True),
    "GarbageCollection": lambda folder: c.GarbageCollection(2),
    "GradientClipping": lambda folder: c.GradientClipping(0.05),
    "JSONLines": lambda folder: c.JSONLines(folder / "m.jsonl"),
    "MemoryMonitor": lambda folder: c.MemoryMonitor(),
    "PipelineTimeline": lambda folder: c.PipelineTimeline(folder / "timeline.txt", step=1),
    "Profiler": lambda folder: c.Profiler(folder / "traces", wait=0, warmup=1, active=1),
    "Progress": lambda folder: c.Progress(True),
    "Signals": lambda folder: c.Signals(True),
    "SpikeGuard": lambda folder: c.SpikeGuard(),
    "Summary": lambda folder: c.Summary(True),
    "TensorBoard": lambda folder: c.TensorBoard(folder / "tb"),
    "Throughput": lambda folder: c.Throughput(tokens=len),
}

LOGGERS = {"CSV", "JSONLines", "TensorBoard"}


class Hears(Callback):
    """The microbatches of which this rank heard, with their losses, by step."""

    def __init__(self):
        self.heard = {}

    def on_microbatch_end(self, event):
        self.heard.setdefault(event.step, {})[event.microbatch] = None if event.loss is None else float(event.loss)


def job_all(layout, folder):
    """A run with every built-in callback: what it recorded, printed, heard and left."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    printed, shown, logged = io.StringIO(), io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(logged)
    logging.getLogger("trainer_kit").addHandler(handler)
    sys.stdout, sys.stderr = printed, shown
    hears = Hears()
    names = [name for name in BUILT_IN if name != "PipelineTimeline" or layout != "one"]
    try:
        callbacks = [BUILT_IN[name](Path(folder, str(rank) if name in LOGGERS else "all")) for name in names]
        callbacks += [c.GradientClipping(max_value=0.02, log=False), hears]
        schedule = Piecewise().cosine(0.1, rest=True)
        trainer = run_of(layout, provider(11, 4, shuffle=True), *callbacks, epochs=2, lr_scheduler=schedule)
        trainer.fit()
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        logging.getLogger("trainer_kit").removeHandler(handler)
    found = history(trainer), printed.getvalue(), shown.getvalue(), logged.getvalue(), hears.heard, weights_of(trainer)
    trainer.close()
    return found


@pytest.mark.parametrize("layout", ["1f1b"])
def test_every_built_in_callback_works_in_a_pipeline(layout, tmp_path):
    """Design section 4 and contract 8: the records, clipping and weights of one process; rank 0 alone prints and writes."""
    assert set(BUILT_IN) == set(c.__all__)
    expected = job_all("one", str(tmp_path / "one"))
    ranks = run_on_ranks(num_ranks(layout), job_all, layout, str(tmp_path / layout))
    measured = ("speed/", "memory/")
    for found in ranks:
        assert found[0] == ranks[0][0]
        of_run, of_one = ({n: v for n, v in each.items() if not n.startswith(measured)} for each in (found[0], expected[0]))
        assert_same_history(of_run, of_one)
        assert {n for n in found[0] if n.startswith(measured)} == {n for n in expected[0] if n.startswith(measured)}
    assert_same_weights([found[5] for found in ranks], expected[5])
    check_speed(ranks[0][0], exact=num_ranks(layout) == 2)
    main, *others = ranks
    assert all(other[1:4] == ("", "", "") for other in others), [other[1:4] for other in others]
    total = sum(parameter.numel() for parameter in Net().parameters())
    assert f"parameters {total:,}" in main[1] and "pipeline" in main[1] and main[1].count("fit ended: step 6") == 1
    assert "6/6 steps" in main[2] and "loss=" in main[2] and "val=" in main[2]
    check_files(tmp_path / layout, main[0])


def check_speed(records, exact):
    """Samples per second times seconds per step is the global batch, whichever rank hosts what; the short last pack of an epoch counts."""
    sizes = [4, 3, 4, 4, 3]  # after the first step, which is not measured
    rates, times = records["speed/samples_per_second"], records["speed/step_seconds"]
    samples = [rate * seconds for (_, rate), (_, seconds) in zip(rates, times, strict=True)]
    assert len(samples) == 5 and all(value > 0 for _, value in records["memory/resident_gib"])
    if exact:
        assert samples == pytest.approx(sizes) and records["speed/tokens_per_second"] == records["speed/samples_per_second"]


def check_files(folder, records):
    assert [path.name for path in sorted(folder.iterdir())] == ["0", "all"]
    lines = [json.loads(line) for line in (folder / "0" / "m.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]
    assert losses == records["train/loss"] and len(losses) == 6
    with (folder / "0" / "m.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["val/loss"]) for row in table if row["val/loss"]] == [value for _, value in records["val/loss"]]
    settings = json.loads((folder / "0" / "m.settings.json").read_text())
    assert settings["strategy"]["pp"] == 2
    assert list((folder / "0" / "tb").glob("*tfevents*"))
    assert all("-rank0-" in path.name for path in (folder / "all" / "traces").iterdir()) and (folder / "all" / "timeline.txt").exists()
    assert [path.name for path in (folder / "all" / "checkpoints").glob("step-*")] == ["step-00000006"]


def test_microbatch_events_come_where_the_last_stage_is(tmp_path):
    """`events.MicrobatchEnd`: in a V layout that is rank 0, else the last rank; each loss is that of its microbatch."""
    (one,) = run_on_ranks(1, job_heard, "one")
    assert [len(one[step]) for step in range(2)] == [3, 2] and one[0][1] is None  # a microbatch without weight has no loss
    for layout, host in (("1f1b", 1), ("zbv", 0)):
        ranks = run_on_ranks(2, job_heard, layout)
        assert ranks[1 - host] == {}
        for step, losses in one.items():
            assert ranks[host][step] == {i: None if loss is None else pytest.approx(loss, rel=1e-9) for i, loss in losses.items()}


class SkipsTwelve(Fit):
    def build_forward_inputs(self, batch):
        given = super().build_forward_inputs(batch)
        given.weight = 0 if batch[0, 0] == 12 else given.weight
        return given


def job_heard(layout):
    hears = Hears()
    trainer = run_of(layout, OfRanks([[rows(1), rows(12), rows(3, 4)], [rows(5), rows(6)]]), hears, task=SkipsTwelve())
    trainer.fit()
    trainer.close()
    return hears.heard


def job_events(layout, folder):
    log: list[str] = []
    callbacks = [listener(log), c.Evaluate(provider(5, 4), every=2), c.Checkpoint(folder, every=2, asynchronous=False)]
    trainer = run_of(layout, provider(7, 4), *callbacks, epochs=2)
    trainer.fit()
    trainer.predict(provider(3, 2))
    trainer.close()
    return log


def test_the_log_of_a_pipelined_run(tmp_path):
    """B77 and `style.md`: the order of one process on every rank, but for the microbatches, of which the last stage tells."""
    expected = job_events("one", str(tmp_path / "one"))
    others = [name for name in expected if name != "microbatch_end"]
    first, last = run_on_ranks(2, job_events, "interleaved", str(tmp_path / "interleaved"))
    assert first == others and last == expected and "evaluate_end" in first and "checkpoint_saved" in first


# ---- who stops the run


class Spiky(Callback):
    """Makes the losses of a step large by its learning rate."""

    def on_step_end(self, event):
        if event.trainer.step == 11:
            for row in event.trainer.parameters:
                row.local.detach().mul_(100.0)


class Terminates(Callback):
    """SIGTERM comes to one rank, which has no losses."""

    def on_step_end(self, event):
        if event.trainer.step == 2 and not event.trainer.context.hosts_last_stage:
            os.kill(os.getpid(), signal.SIGTERM)


class Stops(Callback):
    """Only a rank of a middle stage wishes to stop."""

    def on_step_end(self, event):
        if event.trainer.step == 3 and event.trainer.context.pipeline_rank == 1:
            event.trainer.stop("rank 1 has enough")


class Ends(Callback):
    """Why fits ended."""

    def __init__(self):
        self.reasons = []

    def on_fit_end(self, event):
        self.reasons.append(event.reason)


def job_stops(layout):
    """How far each run comes and why it ends, and that the trainer goes on afterwards."""
    found = {}
    cases = {
        "spike": [c.SpikeGuard(action="stop"), Spiky()],
        "early": [c.EarlyStopping("train/loss", patience=2, min_delta=1e9)],
        "signal": [c.Signals(True), Terminates()],
        "stop": [Stops()],
    }
    for name, callbacks in cases.items():
        ends = Ends()
        trainer = run_of(layout, provider(4, 4), *callbacks, ends, total_steps=30, log_delay=0)
        raised = ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                trainer.fit()
            except Interrupted as interrupted:
                raised = str(interrupted)
        step = trainer.step
        trainer.fit(step + 1)
        found[name] = step, ends.reasons[0], raised, trainer.step
        trainer.close()
    return found, [thread.name for thread in threading.enumerate() if "trainer_kit" in thread.name]


@pytest.mark.parametrize("layout", ["four"])
def test_one_rank_or_all_stop_the_run_at_one_step(layout):
    """Contract 42 and design decision 7: by a record, a signal to one rank, a wish of one rank."""
    ranks = run_on_ranks(num_ranks(layout), job_stops, layout)
    for rank, (found, threads) in enumerate(ranks):
        assert threads == [] and {name: (step, end) for name, (step, _, _, end) in found.items()} == {
            "spike": (12, 13), "early": (3, 4), "signal": (2, 3), "stop": (3, 4),
        }  # fmt: skip
        assert "train/loss rose to" in found["spike"][1] and "has not improved" in found["early"][1]
        assert found["signal"][1] == "SIGTERM" and "SIGTERM" in found["signal"][2]
        assert found["stop"][1] == "rank 1 has enough"
        assert ("on another rank" in found["signal"][2]) == (rank == (0 if layout == "zbv" else 3))


# ---- what a user sees


def job_describe(layout):
    from tests.ranks.staged import Net as Tied
    from tests.ranks.staged import Regression

    texts = []
    for model, task in ((lambda stage: Net(stage), None), (lambda stage: Tied(stage, tie=True), Regression())):
        trainer = run_of(layout, provider(8, 4), model=model, task=task, total_steps=2)
        description = trainer.describe()
        texts.append(({title: dict(rows) for title, rows in description.sections.items()}, description.short()))
        held = sum(row.local.numel() for row in trainer.parameters)
        with pytest.raises(StateError) as caught:
            trainer.model  # noqa: B018
        texts[-1] += (held, str(caught.value), [stage.stage.index for stage in trainer.stages])
        trainer.close()
    return texts


DESCRIBED = [("zbv", "zbv over 4 stages", ("0, 3", "1, 2")), ("1f1b", "1f1b over 2 stages", ("0", "1"))]


@pytest.mark.parametrize(("layout", "line", "stages"), DESCRIBED)
def test_the_description_is_of_the_whole_model(layout, line, stages):
    """Global counts of parameters, the schedule, and what this rank holds; `trainer.model` is for one stage."""
    total = (NUM_LAYERS + 2) * (WIDTH + 1) * WIDTH
    for rank, ((sections, short, held, error, indices), (tied, *_)) in enumerate(run_on_ranks(2, job_describe, layout)):
        assert sections["model"]["parameters"] == f"{total:,}" and sections["model"]["on this rank"] == f"{held:,}"
        assert sections["mesh"]["pipeline"] == line and sections["mesh"]["its stages"] == stages[rank]
        assert sections["mesh"]["this rank"] == f"{rank}, pp {rank}" and line in short and f"parameters {total:,}" in short
        assert "trainer.stages" in error and f"{LAYOUTS[layout].get('stages_per_rank', 2 if layout == 'zbv' else 1) * 2} pipeline" in error
        assert ", ".join(map(str, indices)) == stages[rank]
        last = 3 if layout == "zbv" else 1
        assert tied["model"]["tied"] == f"embedding.weight in the stages 0 and {last}, scale.weight in the stages 0 and {last}"
