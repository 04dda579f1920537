"""When Checkpoint asks for saves, and what it removes. Saves themselves are tested with the checkpoint package."""

import logging

import pytest

from trainer_kit import events
from trainer_kit.callbacks import Checkpoint


class FakeFolder:
    """Holds step names and follows the rule of retention by itself: best, newest N, every k-th."""

    def __init__(self, *steps):
        self.steps = list(steps)

    def path_for(self, step):
        return f"runs/a/step-{step:08d}"

    def shared_by(self, context):
        return self if context.is_main else FakeFolder()

    def retain(self, keep_last=None, keep_every=None, best=()):
        kept = set(sorted(self.steps)[-keep_last:]) | {s for s in self.steps if f"step-{s:08d}" in set(best)}
        kept |= {s for s in self.steps if keep_every and s % keep_every == 0}
        self.steps = sorted(kept)


@pytest.fixture
def save(fake_trainer):
    def save(callback, trainer, step):
        path = callback.folder.path_for(step)
        callback.on_checkpoint_start(events.CheckpointStart(trainer=trainer, path=path, step=step))
        callback.folder.steps.append(step)
        callback.on_checkpoint_saved(events.CheckpointSaved(trainer=trainer, path=path, step=step))

    return save


def saves(trainer):
    return [arguments for kind, arguments in trainer.requests if kind == "save"]


def test_saves_every_k_steps_and_at_the_end_once(fake_trainer, tmp_path):
    """B143: the last checkpoint is that of the last step, and it is saved once."""
    for total, expected in ((7, 3), (6, 2)):
        trainer, callback = fake_trainer(total_steps=total), Checkpoint(tmp_path, every=3, asynchronous=False)
        trainer.start(callback)
        for _ in range(total):
            trainer.finish_step(callback)
        trainer.end(callback)
        assert len(saves(trainer)) == expected
        assert saves(trainer)[-1] == {"path": str(tmp_path / f"step-{total:08d}"), "asynchronous": False}


def test_an_early_end_is_saved_too(fake_trainer, tmp_path):
    """B81: a stopped run keeps its last step."""
    trainer, callback = fake_trainer(total_steps=100), Checkpoint(tmp_path, every=3)
    trainer.start(callback)
    for _ in range(5):
        trainer.finish_step(callback)
    assert len(saves(trainer)) == 1
    trainer.end(callback, reason="interrupted")
    assert len(saves(trainer)) == 2


def test_a_fit_without_steps_saves_nothing(fake_trainer, tmp_path):
    """Contract 32."""
    trainer, callback = fake_trainer(step=10, total_steps=10), Checkpoint(tmp_path, every=3)
    trainer.start(callback, resumed=True)
    trainer.end(callback)
    assert saves(trainer) == []


def test_the_kept_set_is_the_union_of_the_best_and_the_newest(fake_trainer, tmp_path, save):
    """B34 and contract 29: keep 1, best is step 10, newest is step 30 -> {10, 30}."""
    trainer, callback = fake_trainer(), Checkpoint(tmp_path, every=10, keep_last=1, best=("val/loss", "min", 1))
    callback.folder = FakeFolder()
    for step, value in ((10, 0.1), (20, 0.5), (30, 0.3)):
        trainer.record(callback, step, val__loss=value)
        save(callback, trainer, step)
    assert callback.folder.steps == [10, 30]
    assert callback.best_steps() == [10]


def test_without_any_value_the_newest_stays(fake_trainer, tmp_path, save, caplog):
    """B34: no metric ever recorded -> {30}; contract 45: that the metric never came is said at the end."""
    trainer, callback = fake_trainer(), Checkpoint(tmp_path, every=10, best=("val/los", "min", 1))
    callback.folder = FakeFolder()
    trainer.start(callback)
    for step in (10, 20, 30):
        trainer.record(callback, step, val__loss=0.5)
        save(callback, trainer, step)
    assert callback.folder.steps == [30]
    trainer.step = 30
    with caplog.at_level(logging.WARNING, logger="trainer_kit"):
        trainer.end(callback)
    assert "'val/los' was never recorded" in caplog.text and "did you mean 'val/loss'?" in caplog.text


def test_the_value_of_a_checkpoint_is_the_newest_at_or_before_its_step(fake_trainer, tmp_path, save):
    """B73: an evaluation of the same step counts for that step's checkpoint."""
    trainer, callback = fake_trainer(), Checkpoint(tmp_path, every=10, keep_last=1, best=("val/accuracy", "max", 2))
    callback.folder = FakeFolder()
    trainer.record(callback, 10, val__accuracy=0.2)
    save(callback, trainer, 10)
    trainer.record(callback, 20, val__accuracy=0.9)
    save(callback, trainer, 20)
    save(callback, trainer, 30)
    trainer.record(callback, 40, val__accuracy=float("nan"))
    save(callback, trainer, 40)
    assert callback.state_dict()["scores"] == {"10": 0.2, "20": 0.9, "30": 0.9, "40": 0.9}
    assert callback.best_steps() == [20, 30]
    assert callback.folder.steps == [20, 30, 40]


def test_keep_every_stays_and_without_options_everything_does(fake_trainer, tmp_path, save):
    trainer, callback = fake_trainer(), Checkpoint(tmp_path, every=10, keep_last=2, keep_every=20)
    callback.folder = FakeFolder()
    for step in range(10, 80, 10):
        save(callback, trainer, step)
    assert callback.folder.steps == [20, 40, 60, 70]
    everything = Checkpoint(tmp_path, every=10)
    everything.folder = FakeFolder()
    for step in range(10, 80, 10):
        save(everything, trainer, step)
    assert len(everything.folder.steps) == 7


def test_saves_of_others_are_not_counted(fake_trainer, tmp_path):
    """B37: what lies elsewhere is none of its business."""
    trainer, callback = fake_trainer(), Checkpoint(tmp_path, every=10, keep_last=1, best=("val/loss", "min", 1))
    callback.folder = FakeFolder(5, 7)
    trainer.record(callback, 10, val__loss=0.1)
    callback.on_checkpoint_start(events.CheckpointStart(trainer=trainer, path="elsewhere", step=10))
    callback.on_checkpoint_saved(events.CheckpointSaved(trainer=trainer, path="elsewhere", step=10))
    assert callback.best_steps() == [] and callback.folder.steps == [5, 7]


def test_only_the_main_rank_removes(fake_trainer, tmp_path, save):
    """B35."""
    trainer, callback = fake_trainer(), Checkpoint(tmp_path, every=10, keep_last=1)
    trainer.context.is_main = False
    callback.folder = FakeFolder()
    for step in (10, 20):
        save(callback, trainer, step)
    assert callback.folder.steps == [10, 20]


def test_scores_survive_a_resume_as_plain_values_without_paths(fake_trainer, tmp_path, save):
    """B27: nothing absolute is stored; the folder may move. A state of another metric is not used."""
    trainer, callback = fake_trainer(), Checkpoint(tmp_path / "old", every=10, keep_last=1, best=("val/loss", "min", 1))
    callback.folder = FakeFolder()
    trainer.record(callback, 10, val__loss=0.1)
    save(callback, trainer, 10)
    state = callback.state_dict()
    assert "old" not in repr(state)
    moved = Checkpoint(tmp_path / "new", every=10, keep_last=1, best=("val/loss", "min", 1))
    moved.load_state_dict(state)
    moved.folder = FakeFolder(10)
    trainer.record(moved, 20, val__loss=0.7)
    save(moved, trainer, 20)
    assert moved.folder.steps == [10, 20]
    other = Checkpoint(tmp_path, every=10, best=("val/accuracy", "max", 1))
    other.load_state_dict(state)
    assert other.best_steps() == []


def test_describe_tells_what_is_kept(tmp_path):
    text = Checkpoint(tmp_path, every=10, keep_last=3, best=("val/loss", "min", 1)).describe()
    assert "every 10 steps" in text and "keep_last=3" in text and "val/loss" in text
