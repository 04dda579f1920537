"""The life of a run: ends of every kind, second fits, and what a trainer leaves behind."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from datetime import timedelta

import pytest
import torch
from torch import nn

from tests.support import MeanTask, Scalar, quiet_trainer, sgd
from trainer_kit import AutoDataProvider, Callback, SupervisedTask, Trainer
from trainer_kit.callbacks import Checkpoint, Progress, Signals, Summary
from trainer_kit.exceptions import ConfigurationError, Interrupted, ModelError, StateError


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


class At(Callback):
    """Calls a function after a step."""

    def __init__(self, step: int, act):
        self.step, self.act = step, act

    def on_step_end(self, event):
        if event.step == self.step:
            self.act(event.trainer)


def test_ctrl_c_is_raised_again_and_a_second_fit_goes_on():
    """B82 and contract 42: no SystemExit, the signal handlers as before, the trainer usable."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    press = At(2, lambda trainer: os.kill(os.getpid(), signal.SIGINT))
    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 6, callbacks=[Signals(), press])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert trainer.step == 3 and (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    trainer.fit()
    assert trainer.step == 6


def test_an_interrupt_raised_by_a_callback_surfaces_alone():
    """B82 and B88: one exception, without a second one behind it."""

    def press(trainer):
        raise KeyboardInterrupt

    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 6, callbacks=[At(2, press)])
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.fit()
    assert caught.value.__context__ is None
    trainer.fit()
    assert trainer.step == 6


def test_sigterm_saves_and_ends_with_code_143(tmp_path):
    """Decision 7: the run stops at a step boundary, saves, and raises a SystemExit that a script passes on."""
    term = At(1, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 6, callbacks=[Signals(), term, Checkpoint(tmp_path, every=100)])
    with pytest.raises(Interrupted) as caught:
        trainer.fit()
    assert caught.value.code == 143 and isinstance(caught.value, SystemExit)
    assert (tmp_path / "step-00000002" / "manifest.json").exists()


def test_finished_it_says_so_and_makes_no_file(tmp_path, capsys):
    """Contract 32: zero steps, no new files, on every restart; extending continues."""

    def make():
        return quiet_trainer(Scalar(), MeanTask(), [t(1)] * 6, callbacks=[Checkpoint(tmp_path, every=2)], total_steps=4)

    make().fit()
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    again = make()
    again.fit()
    assert "4 of 4 steps are finished" in capsys.readouterr().out
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before
    again.fit(total_steps=6)
    assert again.step == 6 and again.model.w.item() == -5.0


def test_the_first_limit_reached_ends_the_run():
    """B143: three steps of many epochs; five packs of one epoch; a new trainer starts at 0 (B83)."""
    data = [t(1)] * 5
    for settings, steps in (({"total_steps": 3, "epochs": 10}, 3), ({"total_steps": 30, "epochs": 1}, 5), ({}, 5), ({"epochs": 2}, 10)):
        trainer = quiet_trainer(Scalar(), MeanTask(), data, **settings)
        trainer.fit()
        assert trainer.step == trainer.total_steps == steps


def test_an_iterable_without_length_needs_a_limit():
    """B100: total_steps alone is enough, and the data are gone through again."""

    class Endless:
        def __iter__(self):
            return iter([t(1)] * 4)

    epochs = []

    class Look(Callback):
        def on_epoch_end(self, event):
            epochs.append(event.trainer.step)

    trainer = quiet_trainer(Scalar(), MeanTask(), Endless(), callbacks=[Look()], total_steps=10)
    trainer.fit()
    assert trainer.step == 10 and epochs == [4, 8]
    with pytest.raises(ConfigurationError, match="total_steps="):
        quiet_trainer(Scalar(), MeanTask(), Endless()).fit()


def test_max_time_stops_at_a_boundary():
    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 1000, max_time=timedelta(microseconds=1))
    trainer.fit()
    assert trainer.step < 1000


def test_a_model_and_its_batches_are_free_after_an_error():
    """B86: without a garbage collection, once the traceback is cleared."""
    quiet_trainer(Scalar(), MeanTask(), [t(1)]).fit()  # torch's first optimizer imports modules that keep the frames which imported them
    gc.collect()
    gc.disable()
    try:
        batches = [t(1), t(2)]
        model = Scalar()
        refs = [weakref.ref(model), weakref.ref(model.w), weakref.ref(batches[0])]

        def fail(trainer):
            raise ValueError("out of memory")

        trainer = quiet_trainer(model, MeanTask(), batches, callbacks=[At(0, fail)])
        caught = None
        try:
            trainer.fit()
        except ValueError as error:
            caught = error
        caught.__traceback__ = None
        del trainer, model, batches, caught
        assert [ref() for ref in refs] == [None, None, None]
    finally:
        gc.enable()


def test_nothing_is_left_behind_by_a_fit():
    """Contract 42: threads, handlers, garbage collector, grad mode, deterministic mode, random streams."""
    random.seed(1)
    torch.manual_seed(1)
    expected = (random.Random(1).random(), torch.rand(3, generator=torch.Generator().manual_seed(1)))
    state = threading.active_count(), gc.isenabled(), torch.are_deterministic_algorithms_enabled(), signal.getsignal(signal.SIGTERM)
    for fails in (False, True):

        def act(trainer, fails=fails):
            if fails:
                raise ValueError

        trainer = quiet_trainer(
            nn.Sequential(nn.Dropout(0.5), Scalar()), MeanTask(), [t(1, 2)] * 3, callbacks=[At(1, act), Signals()], deterministic=True
        )
        if fails:
            with pytest.raises(ValueError):
                trainer.fit()
        else:
            trainer.fit()
        after = threading.active_count(), gc.isenabled(), torch.are_deterministic_algorithms_enabled(), signal.getsignal(signal.SIGTERM)
        assert after == state
    assert random.random() == expected[0] and torch.equal(torch.rand(3), expected[1])


def test_two_trainers_in_one_process_do_not_meet():
    """B83, B136: the second run starts at 0 and both models move."""
    first, second = Scalar(), Scalar()
    for model in (first, second):
        trainer = quiet_trainer(model, MeanTask(), [t(1)] * 3)
        trainer.fit()
        assert trainer.step == 3 and model.w.item() == -2.0


def test_modes_of_frozen_parts_stay():
    """Contract 13: a model from a loader comes in eval mode; its trainable parts are trained, its frozen ones stay in eval mode."""
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)), nn.Linear(2, 1)).eval()
    model[0].requires_grad_(False)
    modes = []

    class Look(Callback):
        def on_step_start(self, event):
            modes.append([m.training for m in event.trainer.model.modules()])

        def on_step_end(self, event):
            event.trainer.request("evaluate", data=[(torch.randn(4, 2), torch.randn(4, 1))])

    data = [(torch.randn(4, 2), torch.randn(4, 1))] * 2
    quiet_trainer(model, SupervisedTask(nn.functional.mse_loss), data, callbacks=[Look()], optimizer=sgd(0.01)).fit()
    assert modes == [[True, False, False, False, True]] * 2
    assert torch.equal(model[0][0].running_mean, torch.zeros(2))


def test_a_mode_that_the_user_set_stays():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[0].eval()
    data = [(torch.randn(4, 2), torch.randn(4, 1))]
    quiet_trainer(model, SupervisedTask(nn.functional.mse_loss), data, optimizer=sgd(0.01)).fit()
    assert not model[0].training and model[1].training


def test_a_model_without_trainable_parameters_cannot_be_fit_but_evaluated():
    model = Scalar(2.0)
    model.w.requires_grad_(False)
    trainer = quiet_trainer(model, MeanTask(), [t(1)])
    assert trainer.evaluate([t(3)]) == {"val/loss": 6.0}
    with pytest.raises(ModelError, match="requires_grad"):
        trainer.fit()


def test_a_closed_trainer_is_closed():
    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)])
    trainer.close()
    trainer.close()
    with pytest.raises(StateError, match="closed"):
        trainer.fit()


def test_default_callbacks_are_there_unless_replaced():
    trainer = Trainer(Scalar(), MeanTask(), [t(1)])
    assert {type(c) for c in trainer.callbacks} == {Progress, Summary, Signals}
    replaced = quiet_trainer(Scalar(), MeanTask(), [t(1)])
    assert len(replaced.callbacks) == 3


def test_fast_dev_run_leaves_no_files(tmp_path):
    """A few steps and evaluation packs, without loggers and checkpoints."""
    from trainer_kit.callbacks import Evaluate, JSONLines

    callbacks = [Checkpoint(tmp_path / "c", every=1), JSONLines(tmp_path / "log.jsonl"), Evaluate([t(1)] * 9, every=1)]
    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 50, callbacks=callbacks, fast_dev_run=2, log_every=1)
    trainer.fit()
    assert trainer.step == 2 and trainer.history.last("val/loss") is not None
    assert list(tmp_path.iterdir()) == []


def test_overfit_packs_repeats_the_first_packs():
    seen = []

    class Look(Callback):
        def on_step_start(self, event):
            seen.append(event.microbatches[0][0].tolist())

    data = AutoDataProvider(torch.utils.data.TensorDataset(torch.arange(20.0)), global_batch_size=2)
    quiet_trainer(lambda: OnFirst(), MeanTaskOfTuples(), data, callbacks=[Look()], overfit_packs=2, total_steps=5, optimizer=sgd(0.0)).fit()
    assert seen == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


class OnFirst(Scalar):
    def reset_parameters(self):
        nn.init.ones_(self.w)


class MeanTaskOfTuples(MeanTask):
    def build_forward_inputs(self, batch):
        return super().build_forward_inputs(batch[0])


def test_an_import_and_a_constructor_start_nothing():
    """B85 and contract 43: no device context, no TensorBoard, no checkpoint or DTensor modules, no process group."""
    code = """
import sys, torch
def refuse(*a, **k): raise AssertionError("device initialised")
torch.cuda._lazy_init = refuse
from trainer_kit import Trainer, SupervisedTask, MeshStrategy
heavy = {"tensorboard", "torch.utils.tensorboard", "torch.distributed.checkpoint", "torch.distributed.tensor", "tqdm.notebook"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
Trainer(lambda: torch.nn.Linear(1, 1), SupervisedTask(torch.nn.functional.mse_loss), [1], MeshStrategy(), total_steps=3)
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_build_tells_its_durations():
    """B134: the time of each part is known."""
    seen = {}

    class Look(Callback):
        def on_build_end(self, event):
            seen.update(event.durations)

    quiet_trainer(Scalar(), MeanTask(), [t(1)], callbacks=[Look()]).build()
    assert list(seen) == ["data", "model", "optimizer"] and all(seconds >= 0 for seconds in seen.values())


def test_describe_shows_parts_and_listeners():
    trainer = quiet_trainer(Scalar(), MeanTask(), AutoDataProvider([t(1)] * 8, 4, 2), callbacks=[At(0, print)], total_steps=2)
    text, html = str(trainer.describe()), trainer.describe()._repr_html_()
    for word in ("Scalar", "MeanTask", "accumulation", "on_step_end", "At", "1 process on cpu", "global batch size"):
        assert word in text and word in html


def test_a_folder_of_another_run_is_refused_and_stays(tmp_path):
    """Decision 8: also with resume="never"; the message says what differs."""
    from trainer_kit.exceptions import CheckpointError

    quiet_trainer(Scalar(), MeanTask(), [t(1)] * 3, callbacks=[Checkpoint(tmp_path, every=1)], seed=1).fit()
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    for resume in ("auto", "never"):
        with pytest.raises(CheckpointError, match="seed: 1 in the checkpoint, 2 now"):
            quiet_trainer(Scalar(), MeanTask(), [t(1)] * 3, callbacks=[Checkpoint(tmp_path, every=1)], seed=2).fit(resume=resume)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_a_run_that_begins_anew_sets_the_old_checkpoints_aside(tmp_path, caplog):
    """What the folder held is kept under another name, and the next resume takes the new run's checkpoint."""

    def make(**settings):
        return quiet_trainer(Scalar(), MeanTask(), [t(1)] * 6, callbacks=[Checkpoint(tmp_path, every=2)], **settings)

    make().fit()
    make(total_steps=2).fit(resume="never")
    assert "renamed" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "previous-1-step-00000002", "previous-1-step-00000004", "previous-1-step-00000006", "step-00000002",
    ]  # fmt: skip
    again = make(total_steps=3)
    again.fit(resume=tmp_path / "previous-1-step-00000002")
    assert again.step == 3 and (tmp_path / "step-00000003").exists() and (tmp_path / "step-00000002").exists()


def test_the_pack_of_a_failed_step_is_not_lost():
    """Contracts 16 and 24: the loss fails once in the second pack; the next fit trains on all four, in order."""
    seen = []

    class FailsOnce(MeanTask):
        failed = False

        def compute_loss(self, pipeline_results, state):
            if state.item() == 2 and not self.failed:
                self.failed = True
                raise RuntimeError("out of memory")
            seen.append(state.item())
            return pipeline_results

    trainer = quiet_trainer(Scalar(), FailsOnce(), [t(1), t(2), t(3), t(4)])
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.fit()
    trainer.fit()
    assert seen == [1, 2, 3, 4] and trainer.step == 4
