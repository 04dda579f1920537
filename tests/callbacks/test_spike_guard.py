"""SpikeGuard on known series."""

import logging
import math

import pytest

from trainer_kit.callbacks import SpikeGuard


def feed(trainer, callback, values, first=1):
    for step, value in enumerate(values, first):
        trainer.record(callback, step, train__loss=value)


USUAL = [1.0, 1.1, 0.9, 1.05, 0.95] * 4  # median 1.0, median absolute deviation 0.05, so one deviation is 0.07413


def test_the_threshold_counts_robust_deviations_above_the_median(fake_trainer):
    for value, expected in ((1.0 + 9.9 * 0.07413, 0), (1.0 + 10.1 * 0.07413, 1), (0.0, 0)):
        trainer, callback = fake_trainer(), SpikeGuard(threshold=10.0, window=20)
        feed(trainer, callback, [*USUAL, value])
        assert callback.num_spikes == expected


def test_a_spike_is_warned_about_and_training_goes_on(fake_trainer, caplog):
    trainer, callback = fake_trainer(), SpikeGuard()
    with caplog.at_level(logging.WARNING, logger="trainer_kit"):
        feed(trainer, callback, [*USUAL, 50.0])
    assert "train/loss rose to 50 at step 21" in caplog.text and trainer.stops == []


def test_patience_and_stop(fake_trainer):
    trainer, callback = fake_trainer(), SpikeGuard(patience=2, action="stop")
    feed(trainer, callback, [*USUAL, 50.0, 1.0, 50.0])
    assert trainer.stops == []
    feed(trainer, callback, [50.0], first=24)
    assert len(trainer.stops) == 1 and "step 24" in trainer.stops[0][0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_a_spike_at_once(fake_trainer, value):
    """B64 and B56: it needs no history, and it does not enter the window."""
    trainer, callback = fake_trainer(), SpikeGuard(action="stop")
    feed(trainer, callback, [value])
    assert len(trainer.stops) == 1 and callback.state_dict()["values"] == []


def test_a_constant_value_has_some_tolerance(fake_trainer):
    trainer, callback = fake_trainer(), SpikeGuard(threshold=10.0)
    feed(trainer, callback, [2.0] * 20 + [2.0 + 9e-3 * 2] + [2.0] + [2.0 + 11e-3 * 2])
    assert callback.num_spikes == 1


def test_state_survives_a_resume(fake_trainer):
    """B76: patience 2, one spike, resume, one spike -> stops, without a new history."""
    trainer, callback = fake_trainer(), SpikeGuard(patience=2, action="stop")
    feed(trainer, callback, [*USUAL, 50.0])
    again = SpikeGuard(patience=2, action="stop")
    again.load_state_dict(callback.state_dict())
    trainer.start(again, resumed=True)
    feed(trainer, again, [50.0], first=22)
    assert len(trainer.stops) == 1


def test_a_metric_that_never_came_is_reported(fake_trainer, caplog):
    """Contract 45."""
    trainer, callback = fake_trainer(), SpikeGuard("train/los")
    trainer.start(callback)
    feed(trainer, callback, [1.0])
    trainer.step = 1
    with caplog.at_level(logging.WARNING, logger="trainer_kit"):
        trainer.end(callback)
    assert "did you mean 'train/loss'?" in caplog.text
