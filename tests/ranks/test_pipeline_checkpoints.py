"""Training checkpoints of runs in stages: resumed bit by bit on the same layout, in order on any other one, and refused on all ranks."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

import pytest
import torch

from tests.ranks.staged import NUM_LAYERS, num_ranks, staged
from tests.ranks.support import delay_saves
from trainer_kit import Callback
from trainer_kit.callbacks import EMA, Checkpoint, EarlyStopping
from trainer_kit.checkpoint import load, read_manifest, unflatten_state
from trainer_kit.exceptions import CheckpointError
from trainer_kit.optim import SGD, AdamW, Piecewise
from trainer_kit.testing import run_on_ranks

STAGED = ["1f1b", "zbv", "shard pack", "replicate"]


class PerStage(Callback):
    """What only the ranks of a stage know: a number by layer, and a tensor by parameter."""

    def on_build_end(self, event):
        self.layers = {int(number): 0 for stage in event.trainer.stages for number in stage.layers}
        self.seen = {row.name: torch.zeros(1) for row in event.trainer.parameters}

    def on_step_end(self, event):
        self.layers = {number: count + 1 for number, count in self.layers.items()}
        for tensor in self.seen.values():
            tensor += 1

    def state_dict(self):
        return {"layers": self.layers, "seen": [self.seen]}

    def load_state_dict(self, state):
        assert sorted(state["layers"]) == list(range(NUM_LAYERS)) and state["seen"][0].keys() == self.seen.keys()
        self.layers = {number: state["layers"][number] for number in self.layers}
        self.seen = {name: state["seen"][0][name] for name in self.seen}  # in the order of this rank


class Logs(Callback):
    """Logs in the third step, for a record that is made after the fourth: something of each stage, and one name for all."""

    def on_step_end(self, event):
        if event.step == 2:
            rank = event.trainer.context.pipeline_rank
            event.trainer.log(f"rank {rank}", float(rank))
            event.trainer.log("largest", float(rank), reduce="max")


def make(layout, *callbacks, **settings):
    """Two epochs of 3 steps; a record after 4, so that a checkpoint after 3 holds one in progress."""
    more = [EMA(0.5), EarlyStopping("train/loss", patience=99), PerStage()]
    return staged(layout, *callbacks, *more, **({"optimizer": AdamW(lr=0.02), "log_every": 4} | settings))


def saves(folder):
    return Checkpoint(folder, every=3)


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def schedule_of(layout):
    return step_lr if layout == "zbv" else Piecewise().linear(1.0, steps=2).cosine(0.1, rest=True)


def counters(trainer):
    """What is not in the weights: of the layers here, and of the task where it computes losses."""
    layers = {number: (layer.calls, layer.seen) for stage in trainer.stages for number, layer in stage.layers.items()}
    return str((layers, trainer.task.calls, trainer.task.seen) if trainer.context.hosts_last_stage else layers)


def histories(trainer):
    return {name: trainer.history.values(name) for name in trainer.history.names() if "speed" not in name}


def job_same_layout(folder, layout, tie):
    """A run, and one that goes on with its checkpoint after 3 of 6 steps: their records and counters."""
    settings = {"model": {"dropout": 0.5, "tie": tie}, "lr_scheduler": schedule_of(layout)}
    straight = make(layout, saves(f"{folder}/straight"), Logs(), **settings)
    straight.fit()
    resumed = make(layout, saves(f"{folder}/resumed"), Logs(), **settings)
    torch.manual_seed(5)
    resumed.fit(resume=f"{folder}/straight/step-00000003")
    found = [(histories(trainer), counters(trainer)) for trainer in (straight, resumed)]
    straight.close()
    resumed.close()
    return found


def files(folder, step=6):
    return {path.name: path.read_bytes() for path in Path(folder, f"step-{step:08d}").iterdir()}


def saved_tensors(folder, prefix, step=6):
    """Whole tensors of a checkpoint whose keys begin with `prefix`."""
    path = f"{folder}/step-{step:08d}"
    records = {name: record for name, record in read_manifest(path).tensors.items() if name.startswith(prefix)}
    tensors = {name: torch.empty(record.shape, dtype=record.dtype) for name, record in records.items()}
    load(path, tensors, strict=False)
    return tensors


@pytest.mark.parametrize("layout", STAGED)
def test_on_the_same_layout_it_is_bitwise_the_uninterrupted_run(tmp_path, layout):
    """Contracts 12, 17, 27, 28, B15: dropout on every rank from streams of its own, tied weights, moments, averages, schedules, metrics and
    logged values in progress, counters of modules, callbacks and the task."""
    is_tied = layout != "1f1b"
    results = run_on_ranks(num_ranks(layout), job_same_layout, str(tmp_path), layout, is_tied)
    for straight, resumed in results:
        assert straight == resumed
    assert len({str(straight[0]) for straight, _ in results}) == 1
    records = results[0][0][0]
    assert records["train/count"] == [(4, 28.0), (6, 12.0)]
    assert [records[name] for name in ("rank 0", "rank 1", "largest")] == [[(4, 0.0)], [(4, 1.0)], [(4, 1.0)]]
    assert files(tmp_path / "straight") == files(tmp_path / "resumed")
    streams = saved_tensors(tmp_path / "straight", "random/ranks/")
    assert len(streams) == num_ranks(layout) == len({bytes(stream.tolist()) for stream in streams.values()})


def said_during(fit):
    """What trainer_kit logs meanwhile on this rank."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("trainer_kit")
    logger.addHandler(handler)
    try:
        fit()
    finally:
        logger.removeHandler(handler)
    return said


def job_layouts(layout, folder, sources):
    """Records of runs that go on with the checkpoints of layouts; "": a new one, with checkpoints in `folder/layout`; and what was said."""
    found = {}
    for source in sources:
        trainer = make(layout, *([] if source else [saves(f"{folder}/{layout}")]), model={"tie": True}, log_every=1)
        resume = f"{folder}/{source}/step-00000003" if source else "never"
        said = said_during(lambda trainer=trainer, resume=resume: trainer.fit(resume=resume))
        found[source] = histories(trainer), [line for line in said if "random streams" in line]
        trainer.close()
    return found


def content(folder, layout):
    """The keys, shapes and dtypes of what belongs to no rank, and the plain values that depend on no mesh and no rounding."""
    manifest = read_manifest(f"{folder}/{layout}/step-00000006")
    of_ranks = ("random/ranks/", "task/ranks/")
    tensors = {name: (record.shape, record.dtype) for name, record in manifest.tensors.items() if not name.startswith(of_ranks)}
    values = unflatten_state({name: name for name in manifest.tensors}, manifest.values)
    del values["progress"]
    (early_stopping,) = (key for key in values["callbacks"] if key.startswith("EarlyStopping"))
    del values["callbacks"][early_stopping]  # it holds a loss
    return tensors, values


def test_a_checkpoint_of_any_layout_resumes_on_any_other(tmp_path):
    """Contract 17, B21: from one process to stages, back, and from stages to others; what is saved is the same on all of them."""
    folder = str(tmp_path)
    sources = {"zbv": ["", "one"], "shard pack": ["", "zbv"]}
    results = {"one": run_on_ranks(1, job_layouts, "one", folder, [""])}
    results |= {layout: run_on_ranks(num_ranks(layout), job_layouts, layout, folder, found) for layout, found in sources.items()}
    results["one, resumed"] = run_on_ranks(1, job_layouts, "one", folder, list(sources))
    straight = results["one"][0][""][0]
    assert [step for step, _ in straight["optim/grad_norm"]] == [1, 2, 3, 4, 5, 6] and straight["train/count"][2] == (3, 4.0)
    for layout, of_ranks in results.items():
        for rank, found in enumerate(of_ranks):
            for source, (records, said) in found.items():
                assert len(said) == (source != "" and rank == 0), (layout, source)
                for name, values in straight.items():
                    expected = [(step, pytest.approx(value, rel=1e-6)) for step, value in values if step > 3 or not source]
                    assert records[name] == expected, (layout, source, name)
    assert "is of 2 data ranks with 2 pipeline ranks each, this run has 1 data ranks" in results["one, resumed"][0]["shard pack"][1][0]
    tensors, values = content(folder, "one")
    for layout in sources:
        assert content(folder, layout)[0] == tensors
    assert content(folder, "zbv")[1] == values  # with two data ranks each of them runs half the microbatches


class Saves(Callback):
    """Asks for a save after the second step, and keeps a background save from writing until two more steps are done."""

    def __init__(self, path, asynchronous):
        self.path, self.asynchronous = path, asynchronous

    def on_build_end(self, event):
        def wait():
            while self.asynchronous and event.trainer.step < 4:
                time.sleep(0.002)

        delay_saves(event.trainer, wait)

    def on_step_end(self, event):
        if event.step == 1:
            event.trainer.request("save", path=self.path, asynchronous=self.asynchronous)


def job_background(layout, folder):
    for asynchronous in (False, True):
        trainer = staged(layout, Saves(f"{folder}/{asynchronous}", asynchronous), EMA(0.5), model={"tie": True}, optimizer=AdamW(lr=0.1))
        trainer.fit()
        trainer.close()


def test_a_background_save_holds_the_state_of_its_step(tmp_path):
    """Contract 30: it is written two steps later, and is byte by byte what a save at once writes."""
    run_on_ranks(2, job_background, "zbv", str(tmp_path))
    at_once, later = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("False", "True"))
    assert at_once == later and len(at_once) == 3


FIRST_HALF = ("embedding", "scale", "layers.0", "layers.1")


def job_source(folder):
    trainer = staged("one", seed=7)
    trainer.export(f"{folder}/source")
    trainer.close()


def job_trainable_only(layout, folder, sources):
    """The weights here after runs that go on with the checkpoints of layouts; "": after a new one, with its own in `folder/layout`."""
    found = {}
    for source in sources:
        trainer = staged(
            layout, EMA(0.5), *([] if source else [saves(f"{folder}/{layout}")]), model={"frozen": FIRST_HALF},
            source_model=f"{folder}/source", checkpoint_trainable_only=True, optimizer=AdamW(lr=0.05),
        )  # fmt: skip
        trainer.fit(resume=f"{folder}/{source}/step-00000003" if source else "never")
        found[source] = {row.name: row.local.detach().clone() for row in trainer.parameters}
        trainer.close()
    return found


def test_a_frozen_stage_can_be_left_out(tmp_path):
    """Contract 33: bitwise on the same layout, from one process to stages and back, where the frozen weights are the same ones."""
    folder = str(tmp_path)
    run_on_ranks(1, job_source, folder)
    (first,) = run_on_ranks(1, job_trainable_only, "one", folder, [""])
    staged_runs = run_on_ranks(2, job_trainable_only, "1f1b", folder, ["", "1f1b", "one"])
    (back,) = run_on_ranks(1, job_trainable_only, "one", folder, ["1f1b"])
    expected = first[""]
    assert expected.keys() == staged_runs[0][""].keys() | staged_runs[1][""].keys()
    for found in (back["1f1b"], *(of_source for of_rank in staged_runs for of_source in of_rank.values())):
        for name, values in found.items():
            assert torch.allclose(values, expected[name], rtol=1e-5, atol=1e-6), name
            assert torch.equal(values, expected[name]) or not name.startswith(FIRST_HALF), name
    for of_rank in staged_runs:
        assert all(torch.equal(of_rank["1f1b"][name], values) for name, values in of_rank[""].items())
    saved = {name for name in saved_tensors(tmp_path / "1f1b", "model/") if not name.endswith("total")}
    assert saved == {f"model/{name}" for name in expected if not name.startswith(FIRST_HALF)}


def altered(folder, key):
    """A copy of the checkpoint in which a tensor is missing."""
    path = f"{folder}/without"
    shutil.copytree(f"{folder}/saved/step-00000002", path, dirs_exist_ok=True)
    Path(path, "manifest.json").write_bytes(read_manifest(path).without([key]).encode())
    return path


class Refuses(Callback):
    """The callback of one stage does not take its state back."""

    state_key = "Checkpoint"

    def on_build_end(self, event):
        self.stages = event.trainer.context.stages

    def load_state_dict(self, state):
        if self.stages == (1,):
            raise ValueError("not mine")


REFUSED = {
    "other model": ({"model": {"tie": True}}, None, "belongs to another run"),
    "other optimizer": ({"optimizer": SGD(lr=0.1)}, None, "is that of AdamW, this run has SGD"),
    "first moment": ({}, "optimizer/tensors/layers.0.linear.weight/exp_avg", "missing 'layers.0.linear.weight/exp_avg'"),
    "last moment": ({}, "optimizer/tensors/layers.3.linear.weight/exp_avg", "missing 'layers.3.linear.weight/exp_avg'"),
    "first weight": ({}, "model/layers.0.linear.bias", "not in it: model/layers.0.linear.bias"),
    "last weight": ({}, "model/layers.3.linear.bias", "not in it: model/layers.3.linear.bias"),
    "stream": ({}, "random/ranks/1", "holds 'random' of 1"),
}


def job_refused(folder):
    """What a load says of each checkpoint that does not fit, in how many seconds, and whether the run is as it was."""
    settings = {"optimizer": AdamW(lr=0.05), "total_steps": 2}
    saving = staged("1f1b", Checkpoint(f"{folder}/saved", every=2), **settings)
    saving.fit()
    path, found, fitting = f"{folder}/saved/step-00000002", [], staged("1f1b", Refuses(), **settings)
    for change, lost, _ in REFUSED.values():
        altered_path = saving.context.host.broadcast(altered(folder, lost) if lost and saving.context.is_main else path)
        trainer = staged("1f1b", **(settings | change)) if change else fitting
        trainer.build()
        before, begin = [row.local.detach().clone() for row in trainer.parameters], time.monotonic()
        with pytest.raises(CheckpointError) as caught:
            trainer.load_checkpoint(altered_path)
        seconds = time.monotonic() - begin
        same = all(torch.equal(row.local, old) for row, old in zip(trainer.parameters, before, strict=True))
        found.append((str(caught.value), seconds, same and trainer.step == 0))
    with pytest.raises(ValueError, match="not mine"):
        fitting.load_checkpoint(path)
    fitting.close()
    saving.close()
    return found


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path):
    """Contracts 27 and 41, B25: whichever stage it concerns, with the same words, before anything changed."""
    first, second = run_on_ranks(2, job_refused, str(tmp_path))
    for (_, _, said), mine, theirs in zip(REFUSED.values(), first, second, strict=True):
        assert said in mine[0] and mine[0] == theirs[0]
        assert mine[1] < 10 and mine[2] and theirs[2]
