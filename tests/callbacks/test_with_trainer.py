"""Every shipped callback in real runs: two fits, saved and loaded state, an error, and nothing left behind."""

import csv
import gc
import json
import os
import signal
import threading
import time

import pytest
import torch
import torch.nn.functional as F

from tests.support import MeanTask, Scalar, quiet_trainer
from trainer_kit import AutoDataProvider, Callback, SupervisedTask, Trainer
from trainer_kit import callbacks as c
from trainer_kit.exceptions import Interrupted


def provider(num_samples=32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 3, generator=generator)
    data = [(row, row.sum(0, keepdim=True)) for row in x]
    return AutoDataProvider(data, global_batch_size=8, microbatch_size=4, shuffle=True)


def make_trainer(*callbacks, **settings):
    torch.manual_seed(0)
    quiet = [kind(False) for kind in (c.Progress, c.Summary, c.Signals) if not any(isinstance(given, kind) for given in callbacks)]
    return Trainer(
        torch.nn.Linear(3, 1),
        SupervisedTask(F.mse_loss),
        provider(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        callbacks=[*callbacks, *quiet],
        **({"total_steps": 4, "log_every": 1} | settings),
    )


SHIPPED = {
    "CSV": lambda folder: c.CSV(folder / "m.csv"),
    "Checkpoint": lambda folder: c.Checkpoint(folder / "checkpoints", every=2, keep_last=2, best=("train/loss", "min", 1)),
    "EMA": lambda folder: c.EMA(0.9),
    "EarlyStopping": lambda folder: c.EarlyStopping("train/loss", patience=50),
    "Evaluate": lambda folder: c.Evaluate(provider(8), every=3, at_start=True),
    "GarbageCollection": lambda folder: c.GarbageCollection(4),
    "GradientClipping": lambda folder: c.GradientClipping(0.5),
    "JSONLines": lambda folder: c.JSONLines(folder / "m.jsonl"),
    "MemoryMonitor": lambda folder: c.MemoryMonitor(),
    "PipelineTimeline": lambda folder: c.PipelineTimeline(folder / "timeline.svg"),
    "Profiler": lambda folder: c.Profiler(folder / "traces", wait=0, warmup=1, active=1),
    "Progress": lambda folder: c.Progress(),
    "Signals": lambda folder: c.Signals(),
    "SpikeGuard": lambda folder: c.SpikeGuard(),
    "Summary": lambda folder: c.Summary(),
    "TensorBoard": lambda folder: c.TensorBoard(folder / "tensorboard"),
    "Throughput": lambda folder: c.Throughput(tokens=lambda batch: batch[0].numel()),
}


class Fail(Callback):
    """Raises at the end of a step."""

    def __init__(self, step, error=None):
        self.step, self.error = step, error or RuntimeError("mine")

    def on_step_end(self, event):
        if event.trainer.step == self.step:
            raise self.error


class At(Callback):
    """Calls a function in an event of the step that makes `step` finished steps."""

    def __init__(self, step, action, method="on_forward_backward_end"):
        self.step, self.action, self.method = step, action, method

    def on_forward_backward_end(self, event):
        if event.step + 1 == self.step and self.method == "on_forward_backward_end":
            self.action()

    def on_checkpoint_start(self, event):
        if self.method == "on_checkpoint_start":
            self.action()

    def on_evaluate_start(self, event):
        if self.method == "on_evaluate_start":
            self.action()


def surroundings():
    """What a run must give back."""
    return (
        gc.isenabled(),
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
        {thread.name for thread in threading.enumerate()},
        sorted(os.listdir("/proc/self/fd")),
    )


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return a == b


@pytest.mark.parametrize("name", ["Checkpoint", "EarlyStopping", "Evaluate", "SpikeGuard", "EMA"])
def test_an_object_in_a_second_trainer_begins_as_a_new_one(name, tmp_path):
    """Its saved state after the build is that of an object that was never used."""
    used, new = SHIPPED[name](tmp_path / "used"), SHIPPED[name](tmp_path / "new")
    make_trainer(used, total_steps=6).fit()
    for callback in (used, new):
        make_trainer(callback).build()
    assert equal(used.state_dict(), new.state_dict())


def test_every_shipped_callback_is_tried_here():
    assert set(SHIPPED) == set(c.__all__)


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Once, so that files and threads which imports keep open do not count as left behind."""
    trainer = make_trainer(c.Summary(), c.Progress())
    trainer.fit()
    torch.profiler.profile().start()


@pytest.mark.filterwarnings("ignore:PipelineTimeline draws nothing")
@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_life_of_a_callback(name, tmp_path):
    """Contract 42 and B79: construction, description, two fits, save, load, an error, close."""
    before = surroundings()
    callback = SHIPPED[name](tmp_path / "a")
    trainer = make_trainer(callback)
    trainer.fit()
    assert trainer.step == 4 and surroundings() == before
    assert name in callback.describe() and callback.describe() in str(trainer.describe())
    trainer.fit(total_steps=8)
    assert trainer.step == 8 and surroundings() == before
    trainer.save_checkpoint(tmp_path / "saved")

    again = SHIPPED[name](tmp_path / "b")
    resumed = make_trainer(again, total_steps=8)
    resumed.load_checkpoint(tmp_path / "saved")
    assert equal(again.state_dict(), callback.state_dict())
    resumed.fit(total_steps=10)
    assert resumed.step == 10 and surroundings() == before

    failing = SHIPPED[name](tmp_path / "c")
    with pytest.raises(RuntimeError, match="mine") as caught:
        make_trainer(failing, Fail(3)).fit()
    assert not getattr(caught.value, "__notes__", []) and surroundings() == before
    failing.close()


@pytest.mark.filterwarnings("ignore:PipelineTimeline draws nothing")
@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()])
def test_all_together_leave_nothing_behind_after_an_error(tmp_path, error):
    """Contract 42, B71, B72, B79, B82, B130: any exit; what was recorded before the error is readable."""
    before = surroundings()
    parts = {name: make(tmp_path) for name, make in SHIPPED.items()}
    with pytest.raises(type(error)):
        make_trainer(*parts.values(), Fail(4, error), total_steps=20, log_delay=0).fit()
    assert surroundings() == before
    assert parts["Progress"].bar.n == 4 and parts["Progress"].bar.disable
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3]


def test_logs_of_a_resumed_run_have_each_step_once(tmp_path):
    """Contract 30b and B68: a run that dies at step 7 goes on from its checkpoint of step 4."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def run(*more):
        names = ("Checkpoint", "CSV", "JSONLines", "TensorBoard", "Evaluate")
        trainer = make_trainer(*[SHIPPED[name](tmp_path) for name in names], *more, total_steps=10, log_delay=0)
        trainer.callbacks[0].every = 4
        trainer.fit()

    with pytest.raises(RuntimeError, match="mine"):
        run(Fail(8))
    run()
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 11))
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 3, 6, 9, 10]
    with open(tmp_path / "m.csv", newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file) if row["train/loss"]] == list(range(1, 11))
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [s.step for s in accumulator.Scalars("train/loss")] == list(range(1, 11))
    assert [s.step for s in accumulator.Scalars("val/loss")] == [0, 3, 6, 9, 10]


def test_the_best_and_the_newest_checkpoint_stay(tmp_path):
    """B34, B73, B37: the value of a step's evaluation belongs to that step's checkpoint; other files are left alone."""
    (tmp_path / "checkpoints" / "my-model").mkdir(parents=True)
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")

    class Values(Callback):
        def on_metrics(self, event):
            if "val/loss" in event.values:
                event.values["val/loss"] = {2: 0.5, 4: 0.1, 6: 0.3, 8: 0.4}[event.step]

    checkpoint = c.Checkpoint(tmp_path / "checkpoints", every=2, keep_last=1, best=("val/loss", "min", 1))
    make_trainer(Values(), checkpoint, c.Evaluate(provider(8), every=2), total_steps=8).fit()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["my-model", "notes.txt", "step-00000004", "step-00000008"]


def test_retention_on_a_remote_file_system():
    """B39."""
    url = f"memory://retention-{time.time_ns()}"
    checkpoint = c.Checkpoint(url, every=1, keep_last=2)
    make_trainer(checkpoint, total_steps=4).fit()
    assert [saved.step for saved in checkpoint.folder.list_valid()] == [3, 4]


def test_a_finished_run_makes_nothing_new(tmp_path):
    """Contract 32."""
    names = ("Checkpoint", "CSV", "JSONLines", "TensorBoard", "Evaluate")
    make_trainer(*[SHIPPED[name](tmp_path) for name in names]).fit()
    before = {str(path): path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = make_trainer(*[SHIPPED[name](tmp_path) for name in names])
    again.fit()
    assert again.step == 4 and {str(path): path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_moved_run_folder_goes_on(tmp_path):
    """B27."""
    make_trainer(SHIPPED["Checkpoint"](tmp_path / "old")).fit()
    (tmp_path / "old").rename(tmp_path / "new")
    trainer = make_trainer(SHIPPED["Checkpoint"](tmp_path / "new"), total_steps=6)
    trainer.fit()
    assert trainer.step == 6 and not (tmp_path / "old").exists()


def test_ctrl_c_ends_the_step_in_order_and_the_trainer_stays_usable(tmp_path):
    """B82 and B81: KeyboardInterrupt after the step, its checkpoint saved, and a second fit goes on."""
    trainer = make_trainer(c.Signals(), SHIPPED["Checkpoint"](tmp_path), At(3, lambda: signal.raise_signal(signal.SIGINT)), total_steps=6)
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.fit()
    assert trainer.step == 3 and caught.value.__context__ is None  # B88: one exception is shown
    assert (tmp_path / "checkpoints" / "step-00000003").is_dir()
    trainer.fit()
    assert trainer.step == 6


@pytest.mark.parametrize("method", ["on_checkpoint_start", "on_evaluate_start"])
def test_ctrl_c_during_a_save_or_evaluation_waits_for_its_end(tmp_path, method):
    """B46: the save is complete, and no further step is made."""
    checkpoint = c.Checkpoint(tmp_path, every=2, asynchronous=False)
    trainer = make_trainer(
        c.Signals(), checkpoint, c.Evaluate(provider(8), every=2), At(0, lambda: signal.raise_signal(signal.SIGINT), method), total_steps=8
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert trainer.step == 2 and checkpoint.folder.newest().step == 2


def test_sigterm_saves_and_exits_with_143(tmp_path):
    """Design decision 7: a scheduler can start the script again, which goes on."""
    trainer = make_trainer(c.Signals(), SHIPPED["Checkpoint"](tmp_path), At(3, lambda: signal.raise_signal(signal.SIGTERM)), total_steps=6)
    with pytest.raises(Interrupted) as caught:
        trainer.fit()
    assert caught.value.code == 143 and trainer.step == 3
    again = make_trainer(SHIPPED["Checkpoint"](tmp_path), total_steps=6)
    again.fit()
    assert again.step == 6


def test_an_early_stopped_run_stays_stopped_when_it_is_started_again(tmp_path):
    """B76 and contract 32."""

    def run():
        stopping = c.EarlyStopping("train/loss", patience=2, min_delta=1e9)
        trainer = make_trainer(SHIPPED["Checkpoint"](tmp_path), stopping, total_steps=20, log_delay=0)
        trainer.fit()
        return trainer.step

    assert run() == run() < 20


def test_ema_of_a_run_is_that_of_a_plain_loop(tmp_path):
    """One plain loop over the same weights; evaluation sees them, and a resume goes on bitwise."""
    history = []

    class Watch(Callback):
        def on_optimizer_step(self, event):
            history.append(event.trainer.model.weight.detach().clone())

    ema = c.EMA(0.5)
    trainer = make_trainer(ema, Watch(), c.Checkpoint(tmp_path, every=3), total_steps=6)
    trainer.build()
    average = trainer.model.weight.detach().clone()
    trainer.fit()
    for weight in history:
        average = torch.lerp(average, weight, 0.5)
    torch.testing.assert_close(ema.averages["weight"], average)
    weight = trainer.model.weight.detach().clone()
    expected = sum(F.mse_loss(x @ ema.averages["weight"].T + ema.averages["bias"], y).item() for x, y in [_all_samples()])
    assert trainer.evaluate(provider())["val/loss"] == pytest.approx(expected, rel=1e-5)
    assert torch.equal(trainer.model.weight, weight)

    resumed = c.EMA(0.5)
    second = make_trainer(resumed, total_steps=6)
    second.fit(resume=str(tmp_path / "step-00000003"))
    assert all(torch.equal(resumed.averages[name], ema.averages[name]) for name in ema.averages)


def _all_samples():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 3, generator=generator)
    return x, x.sum(1, keepdim=True)


def test_clipping_a_run_is_that_of_a_plain_loop():
    """Contract 7 and B53: once per step, before the update; the recorded norm is the one before."""
    trainer = make_trainer(c.GradientClipping(0.1), total_steps=3)
    trainer.build()
    model = torch.nn.Linear(3, 1)
    model.load_state_dict(trainer.model.state_dict())
    packs = []

    class Packs(Callback):
        def on_step_start(self, event):
            packs.append([tuple(t.clone() for t in microbatch) for microbatch in event.microbatches])

    watched = make_trainer(c.GradientClipping(0.1), Packs(), total_steps=3)
    watched.fit()
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.05), []
    for pack in packs:
        x, y = (torch.cat(parts) for parts in zip(*pack, strict=True))
        F.mse_loss(model(x), y).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(watched.model.weight, model.weight)
    assert [value for _, value in watched.history.values("optim/grad_norm")] == pytest.approx(norms, rel=1e-5)


def test_what_a_killed_process_had_no_time_to_remove_goes_at_the_next_start(tmp_path):
    """Contract 29: killed between a durable save and the removal after it; a run that is finished cleans up as well."""

    def make(keep_last):
        saves = c.Checkpoint(tmp_path, every=1, keep_last=keep_last)
        return quiet_trainer(Scalar(), MeanTask(), [torch.ones(1)] * 4, callbacks=[saves])

    make(None).fit()
    assert len(list(tmp_path.iterdir())) == 4
    make(2).fit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
