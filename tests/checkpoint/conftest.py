"""Shared by the checkpoint tests: a small state, and a folder that fails or dies at its k-th operation."""

from __future__ import annotations

import pytest
import torch

from trainer_kit.checkpoint import CheckpointSaver, flatten_state
from trainer_kit.storage import Folder


class Killed(BaseException):
    """The process is gone: no handler gets to do anything any more."""


class FaultyFolder(Folder):
    """Fails at operation `fail_at` (from 0) with `error`; when `dead`, all later operations fail too, as after a kill."""

    def __init__(self, url, fail_at=None, error=None, *, dead=False):
        super().__init__(url)
        self.fail_at, self.error, self.dead, self.count = fail_at, error or Killed(), dead, 0

    def step(self):
        self.count += 1
        if self.fail_at is not None and (self.count - 1 == self.fail_at or (self.dead and self.count - 1 > self.fail_at)):
            raise self.error

    def make(self):
        self.step()
        super().make()

    def names(self):
        self.step()
        return super().names()

    def exists(self, name=""):
        self.step()
        return super().exists(name)

    def rename(self, old, new):
        self.step()
        super().rename(old, new)

    def remove(self, name=""):
        self.step()
        super().remove(name)

    def sync(self):
        self.step()
        super().sync()

    def open(self, name, mode="rb"):
        self.step()
        return FaultyFile(super().open(name, mode), self)


class FaultyFile:
    """Writes half of the bytes before it fails: what a kill inside of a write leaves."""

    def __init__(self, file, folder):
        self._file, self._folder = file, folder

    def write(self, data):
        try:
            self._folder.step()
        except BaseException:
            self._file.write(data[: len(data) // 2])
            raise
        return self._file.write(data)

    def flush(self):
        self._folder.step()
        self._file.flush()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self._file.close()


@pytest.fixture
def faulty_folder():
    return FaultyFolder


@pytest.fixture
def killed():
    return Killed


def make_state(step=0):
    return {
        "model": {"weight": torch.arange(12.0).view(3, 4) + step, "bias": torch.full((3,), step, dtype=torch.bfloat16)},
        "optimizer": {"state": {"weight": {"exp_avg": torch.full((3, 4), 0.5 * step), "step": torch.tensor(float(step))}}},
        "data": {"epoch": 1, "samples": 17 * step},
    }


@pytest.fixture
def state():
    return make_state


@pytest.fixture
def save():
    """Save the state of a step into a folder (path or Folder)."""

    def save_state(path, step, nested=None, **options):
        tensors, values = flatten_state(make_state(step) if nested is None else nested)
        CheckpointSaver().save(path, tensors, values, step=step, **options)

    return save_state
