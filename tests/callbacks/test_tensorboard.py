"""TensorBoard, read back by TensorBoard's own reader."""

import math

import pytest

from trainer_kit.callbacks import TensorBoard


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def write(fake_trainer, folder, steps, *, step=0):
    callback, trainer = TensorBoard(folder), fake_trainer(step=step)
    trainer.start(callback, resumed=step > 0, settings={"seed": 3})
    for at in steps:
        trainer.record(callback, at, train__loss=float(at + 100 * step))
    callback.close()


def test_a_resumed_run_has_one_value_per_step(fake_trainer, tmp_path):
    """B68 and contract 30b: steps 1-8, resume from 5, log to 10: the reader shows 1..10 once, the later values from 6 on."""
    write(fake_trainer, tmp_path, range(1, 9))
    write(fake_trainer, tmp_path, range(6, 11), step=5)
    scalars = read(tmp_path).Scalars("train/loss")
    assert [s.step for s in scalars] == list(range(1, 11))
    assert [s.value for s in scalars] == [1, 2, 3, 4, 5, 506, 507, 508, 509, 510]


def test_a_run_that_starts_anew_hides_the_old_one(fake_trainer, tmp_path):
    """B68, for a run that was killed before its first checkpoint."""
    write(fake_trainer, tmp_path, range(4))
    write(fake_trainer, tmp_path, range(2))
    assert [s.step for s in read(tmp_path).Scalars("train/loss")] == [0, 1]


def test_values_are_readable_before_the_end(fake_trainer, tmp_path):
    """B72: flushed with each record, so also after an exception or a kill."""
    callback, trainer = TensorBoard(tmp_path), fake_trainer()
    trainer.start(callback)
    trainer.record(callback, 10, train__loss=0.5, val__loss=math.nan)
    accumulator = read(tmp_path)
    assert [(s.step, s.value) for s in accumulator.Scalars("train/loss")] == [(10, 0.5)]
    assert math.isnan(accumulator.Scalars("val/loss")[0].value)
    callback.close()
    callback.close()
    assert callback.writer is None


def test_settings_are_written_once_as_text(fake_trainer, tmp_path):
    write(fake_trainer, tmp_path, [1])
    write(fake_trainer, tmp_path, [2], step=1)
    texts = read(tmp_path).Tensors("settings/text_summary")
    assert len(texts) == 1 and b'"seed": 3' in texts[0].tensor_proto.string_val[0]


def test_only_the_main_rank_writes(fake_trainer, tmp_path):
    callback, trainer = TensorBoard(tmp_path), fake_trainer()
    trainer.context.is_main = False
    trainer.start(callback)
    trainer.record(callback, 1, train__loss=0.5)
    callback.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["str", "url"])
def test_the_folder_may_be_a_text_or_a_file_url(fake_trainer, tmp_path, form):
    """B39."""
    folder = str(tmp_path / "tb") if form == "str" else f"file://{tmp_path}/tb"
    write(fake_trainer, folder, [1])
    assert read(tmp_path / "tb").Scalars("train/loss")[0].value == 1.0
