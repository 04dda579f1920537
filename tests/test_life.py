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


class Logs(Callback):
    """Collects records as a logger does."""

    is_logger = True

    def __init__(self):
        self.seen = []

    def on_metrics(self, event):
        self.seen.append((event.step, dict(event.values)))


def test_the_last_records_reach_the_loggers_when_the_run_fails():
    """B72: three finished steps are three records, although they are read two steps late."""

    def fail(trainer):
        raise ValueError("broken")

    logs = Logs()
    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 6, callbacks=[At(3, fail), logs], log_every=1, log_delay=2)
    with pytest.raises(ValueError, match="broken"):
        trainer.fit()
    assert [step for step, _ in logs.seen] == [1, 2, 3]


def test_values_logged_outside_of_steps_are_recorded_under_the_finished_steps():
    """B61: in on_evaluate_end of step 2, and in on_fit_end."""

    class LogsItself(Callback):
        def on_step_end(self, event):
            if event.step == 1:
                event.trainer.request("evaluate", data=[t(1)])

        def on_evaluate_end(self, event):
            event.trainer.log("mine", 5)

        def on_fit_end(self, event):
            event.trainer.log("last", 7)

    logs = Logs()
    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 4, callbacks=[LogsItself(), logs], log_every=4)
    trainer.fit()
    assert trainer.history.values("mine") == [(2, 5.0)] and trainer.history.values("last") == [(4, 7.0)]
    assert {"last": 7.0} in [values for _, values in logs.seen]


def test_the_end_of_the_last_epoch_is_told_for_data_without_a_length():
    class Endless:
        def __iter__(self):
            return iter([t(1)] * 2)

    ends, reasons = [], []

    class Look(Callback):
        def on_epoch_end(self, event):
            ends.append(event.epoch)

        def on_fit_end(self, event):
            reasons.append(event.reason)

    trainer = quiet_trainer(Scalar(), MeanTask(), Endless(), callbacks=[Look()], epochs=2)
    trainer.fit()
    assert trainer.step == 4 and ends == [0, 1] and reasons == [None]


def test_an_error_in_the_build_is_told_and_closes_what_was_opened():
    heard = []

    class Opens(Callback):
        def on_model_ready(self, event):
            raise ValueError("no")

        def on_exception(self, event):
            heard.append(str(event.exception))

        def close(self):
            heard.append("closed")

    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)], callbacks=[Opens()])
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            trainer.fit()
    assert heard == ["no", "closed"] * 2


def test_a_length_that_the_schedule_refuses_is_refused_every_time():
    from trainer_kit.optim import Piecewise

    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 9, lr_scheduler=Piecewise().linear(1.0, steps=5), total_steps=6)
    for _ in range(2):
        with pytest.raises(ConfigurationError):
            trainer.fit(total_steps=3)
    trainer.fit()
    assert trainer.step == 6
    trainer.fit(total_steps=8)
    trainer.fit()
    assert trainer.step == trainer.total_steps == 8


def test_the_metrics_of_a_failed_step_do_not_count_twice():
    from trainer_kit.metrics import Sum

    class Counts(MeanTask):
        failed = False

        def metrics(self):
            return {"n": Sum()}

        def update_metrics(self, metrics, pipeline_results, state):
            metrics["n"].update(len(state))

    def fail_once(trainer):
        if not Counts.failed:
            Counts.failed = True
            raise RuntimeError("once")

    class Fails(Callback):
        def on_gradients_ready(self, event):
            if event.step == 2:
                fail_once(event.trainer)

    trainer = quiet_trainer(Scalar(), Counts(), [t(1)] * 4, callbacks=[Fails()], log_every=4)
    with pytest.raises(RuntimeError):
        trainer.fit()
    trainer.fit()
    assert trainer.history.last("train/n") == (4, 4.0)


@pytest.mark.parametrize(("batch", "steps"), [(4, 3 + 2), (1, 3 + 6), (2, 6)])
def test_another_batch_size_on_resume_still_trains_on_every_sample_of_every_epoch(tmp_path, batch, steps):
    """Six samples, two epochs, saved after the first one with batch size 2."""
    ids = []

    class Ids(MeanTask):
        def build_forward_inputs(self, inputs):
            ids.extend(inputs.tolist())
            return super().build_forward_inputs(inputs)

    def make(size, **settings):
        data = AutoDataProvider([torch.tensor(float(i)) for i in range(6)], size)
        return quiet_trainer(Scalar(), Ids(), data, optimizer=sgd(0.0), callbacks=[Checkpoint(tmp_path, every=3)], **settings)

    make(2, epochs=1).fit()
    ids.clear()
    trainer = make(batch, epochs=2)
    trainer.fit()
    assert sorted(ids) == [0, 1, 2, 3, 4, 5] and trainer.step == steps


def test_a_save_asked_for_in_an_evaluation_holds_the_weights_and_not_their_average(tmp_path):
    from trainer_kit.callbacks import EMA, Evaluate

    class SaveBest(Callback):
        def on_evaluate_end(self, event):
            event.trainer.save_checkpoint(tmp_path / f"best-{event.trainer.step}")

    trainer = quiet_trainer(
        Scalar(0.0), MeanTask(), [t(1)] * 2, callbacks=[SaveBest(), EMA(0.5), Evaluate([t(1)], every=2)], optimizer=sgd(1.0)
    )
    trainer.fit()
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "best-2" / "rank-00000.safetensors")
    assert saved["model/w"].item() == trainer.model.w.item() == -2.0


def test_extra_state_of_modules_is_saved_and_parameters_that_cannot_be_saved_are_refused(tmp_path):
    class Counts(Scalar):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, c):
            self.calls += self.training
            return super().forward(c)

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    for total in (2, 4):
        trainer = quiet_trainer(Counts(), MeanTask(), [t(1)] * 4, callbacks=[Checkpoint(tmp_path, every=2)], total_steps=total)
        trainer.fit()
    assert trainer.model.calls == 4

    class Hides(Scalar):
        def state_dict(self, *args, **kwargs):
            return {}

    with pytest.raises(ModelError, match="leaves out 'w'"):
        quiet_trainer(Hides(), MeanTask(), [t(1)]).build()


def test_close_inside_a_fit_is_refused():
    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 2, callbacks=[At(0, lambda trainer: trainer.close())])
    with pytest.raises(StateError, match="close\\(\\) inside fit"):
        trainer.fit()


def test_a_refused_resume_leaves_the_model_as_it_was(tmp_path):
    from trainer_kit.exceptions import CheckpointError
    from trainer_kit.optim import AdamW

    def make(optimizer):
        return quiet_trainer(Scalar(), MeanTask(), [t(1)] * 4, callbacks=[Checkpoint(tmp_path, every=2)], optimizer=optimizer)

    make(sgd(1.0)).fit()
    trainer = make(AdamW(lr=1.0))
    with pytest.raises(CheckpointError, match="SGD.*AdamW"):
        trainer.fit()
    assert trainer.model.w.item() == 1.0 and trainer.step == 0


def test_state_that_cannot_be_saved_is_found_before_the_first_step(tmp_path):
    from trainer_kit.exceptions import CheckpointError

    class Keeps(Callback):
        def state_dict(self):
            return {"when": timedelta(1)}

    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 4, callbacks=[Keeps(), Checkpoint(tmp_path, every=2)])
    with pytest.raises(CheckpointError, match="callbacks/Keeps/when"):
        trainer.fit()
    assert trainer.step == 0 and list(tmp_path.iterdir()) == []
