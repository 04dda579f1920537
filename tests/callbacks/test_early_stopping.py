"""EarlyStopping and its state."""

import logging
import math

import pytest
import torch

from tests.support import MeanTask, Scalar, quiet_trainer, sgd
from trainer_kit.callbacks import EarlyStopping


def feed(trainer, callback, *values, first=1):
    for step, value in enumerate(values, first):
        trainer.record(callback, step, val__loss=value)


def test_stops_after_patience_records_without_improvement(fake_trainer):
    trainer, callback = fake_trainer(), EarlyStopping(patience=3)
    feed(trainer, callback, 1.0, 0.9, 0.95, 0.9, 0.85)
    assert trainer.stops == []
    feed(trainer, callback, 0.9, 0.9, 0.9, first=6)
    assert len(trainer.stops) == 1
    assert callback.best == 0.85 and callback.best_step == 5


def test_patience_survives_a_resume(fake_trainer):
    """B76: patience 3, two bad records, resume, one bad record -> stops. The start hook resets nothing."""
    trainer, callback = fake_trainer(), EarlyStopping(patience=3)
    feed(trainer, callback, 0.5, 0.6, 0.6)
    again, resumed = EarlyStopping(patience=3), fake_trainer(step=3)
    again.load_state_dict(callback.state_dict())
    resumed.start(again, resumed=True)
    assert resumed.stops == []
    feed(resumed, again, 0.6, first=4)
    assert len(resumed.stops) == 1


def test_a_stopped_run_that_is_started_again_stops_again(fake_trainer):
    """Contract 32, for a run that ended before its planned end."""
    trainer, callback = fake_trainer(), EarlyStopping(patience=1)
    feed(trainer, callback, 0.5, 0.6)
    again, resumed = EarlyStopping(patience=1), fake_trainer(step=2)
    again.load_state_dict(callback.state_dict())
    resumed.start(again, resumed=True)
    assert len(resumed.stops) == 1


def test_mode_and_min_delta(fake_trainer):
    trainer, callback = fake_trainer(), EarlyStopping(mode="max", min_delta=0.1, patience=2)
    feed(trainer, callback, 0.5, 0.55, 0.61)
    assert trainer.stops == [] and callback.best == 0.61
    feed(trainer, callback, 0.7, 0.71)
    assert len(trainer.stops) == 1


def test_nan_is_no_improvement(fake_trainer):
    """B64: what happened counts."""
    trainer, callback = fake_trainer(), EarlyStopping(patience=2)
    feed(trainer, callback, math.nan, math.nan)
    assert len(trainer.stops) == 1 and callback.best is None


@pytest.mark.parametrize("steps", [0, 3])
def test_a_metric_that_never_came_is_reported(fake_trainer, caplog, steps):
    """Contract 45; nothing is said when no step was made."""
    trainer, callback = fake_trainer(), EarlyStopping("val/lose")
    trainer.start(callback)
    feed(trainer, callback, *[0.5] * steps)
    trainer.step = steps
    with caplog.at_level(logging.WARNING, logger="trainer_kit"):
        trainer.end(callback)
    assert ("did you mean 'val/loss'?" in caplog.text) == (steps > 0)


def test_an_object_in_a_second_trainer_starts_anew():
    """The losses are the means of the batches: 1 is best, and the two after it are worse, so each run ends after its third step."""
    callback = EarlyStopping("train/loss", patience=2)
    for best in (1.0, 5.0):
        data = [torch.tensor([best + n]) for n in range(6)]
        trainer = quiet_trainer(Scalar(), MeanTask(), data, callbacks=[callback], log_every=1, log_delay=0, optimizer=sgd(0.0))
        trainer.fit()
        assert (callback.best, callback.best_step, trainer.step) == (best, 1, 3)


def test_what_a_checkpoint_holds_is_not_reset(tmp_path):
    """The build comes before the load."""
    def trainer():
        data = [torch.tensor([1.0 + n]) for n in range(6)]
        callback = EarlyStopping("train/loss", patience=4)
        return quiet_trainer(Scalar(), MeanTask(), data, callbacks=[callback], log_every=1, log_delay=0, optimizer=sgd(0.0)), callback

    first, _ = trainer()
    first.fit(total_steps=3)
    first.save_checkpoint(tmp_path / "saved")
    second, callback = trainer()
    second.load_checkpoint(tmp_path / "saved")
    assert (callback.best, callback.best_step, callback.num_bad) == (1.0, 1, 2)
    second.fit()
    assert second.step == 5
