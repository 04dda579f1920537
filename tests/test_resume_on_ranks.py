"""Runs of two data ranks that are saved and resumed: bitwise on the same mesh, in order on another one, and errors on every rank."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support import quiet_trainer
from trainer_kit import AutoDataProvider, Callback, MeshStrategy, SupervisedTask
from trainer_kit.callbacks import EMA, Checkpoint, Evaluate
from trainer_kit.checkpoint import read_manifest
from trainer_kit.checkpoint.writer import CheckpointWriter
from trainer_kit.exceptions import CheckpointError
from trainer_kit.mesh.layout import local_of
from trainer_kit.metrics import Sum
from trainer_kit.optim import SGD, AdamW, Muon
from trainer_kit.testing import run_on_ranks


class Samples(torch.utils.data.Dataset):
    """Twelve samples that are functions of their index."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([1.0, index, index % 3, index % 5]), torch.tensor([index / 10])


class Network(nn.Module):
    """With `noise`: dropout, and running statistics, which differ between the ranks until they are shared."""

    def __init__(self, noise=True, size=5):
        super().__init__()
        self.first, self.out = nn.Linear(4, size), nn.Linear(size, 1)
        self.between = nn.Sequential(nn.BatchNorm1d(size), nn.Dropout(0.5)) if noise else nn.Tanh()

    def forward(self, x):
        return self.out(self.between(self.first(x)))


class Sums(SupervisedTask):
    """Counts the samples since the last record."""

    def __init__(self):
        super().__init__(nn.functional.mse_loss, metrics={"count": (Sum, lambda out, target: (torch.ones(len(out)),))})


def make(folder, *callbacks, model=Network, total_steps=6, optimizer=None, **degrees):
    data = AutoDataProvider(Samples(), 4, shuffle=True)
    callbacks = [Checkpoint(folder, every=1), EMA(0.5), *callbacks]
    return quiet_trainer(
        model, Sums(), data, strategy=MeshStrategy(device="cpu", **degrees), optimizer=optimizer or AdamW(lr=0.02),
        callbacks=callbacks, total_steps=total_steps, log_every=4,
    )  # fmt: skip


def checkpoint(folder, step):
    return {path.name: path.read_bytes() for path in sorted((Path(folder) / f"step-{step:08d}").iterdir())}


def job_straight_and_resumed(folder, degrees):
    """The last checkpoints of a run, and of one that goes on with its third; what each rank has of a running mean and of an evaluation."""
    held_out = AutoDataProvider(Samples(), 4)
    straight = make(f"{folder}/straight", Evaluate(held_out, every=6), **degrees)
    straight.fit()
    resumed = make(f"{folder}/resumed", Evaluate(held_out, every=6), **degrees)
    torch.manual_seed(5)
    resumed.fit(resume=f"{folder}/straight/step-00000003")
    files = resumed.export(f"{folder}/export")
    found = resumed.model.between[0].running_mean.tolist(), resumed.history.values("val/loss"), files
    resumed.close()
    return found


@pytest.mark.parametrize("degrees", [{}, {"dp_shard": 2}], ids=str)
def test_on_the_same_mesh_it_is_bitwise_the_uninterrupted_run(tmp_path, degrees):
    """Contracts 17, 27, 28: dropout of each rank, its part of a sum in progress, averages, moments; byte by byte. Buffers, the evaluation
    and the export are those of rank 0 on every rank."""
    results = run_on_ranks(2, job_straight_and_resumed, str(tmp_path), degrees)
    assert results[0] == results[1]
    assert checkpoint(tmp_path / "straight", 6) == checkpoint(tmp_path / "resumed", 6)
    assert set(checkpoint(tmp_path / "straight", 6)) == {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}
    assert {"random/ranks/0", "random/ranks/1"} <= set(read_manifest(tmp_path / "straight" / "step-00000006").tensors)


def without_noise():
    return Network(noise=False)


def job_resume(folder, step, degrees):
    """What rank 0 says at a resume, and the losses and counts that are recorded."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("trainer_kit").addHandler(handler)
    try:
        trainer = make(folder, model=without_noise, **degrees)
        trainer.fit(resume=f"{folder}/step-{step:08d}" if step else "never")
    finally:
        logging.getLogger("trainer_kit").removeHandler(handler)
    trainer.export(f"{folder}-export")
    trainer.close()
    return [line for line in said if "random streams" in line], trainer.history.values("train/loss"), trainer.history.values("train/count")


def test_another_number_of_data_ranks_goes_on_in_order(tmp_path):
    """Contracts 17, 28: two ranks and one, both ways; sums in progress count once, and streams that begin anew are told once."""
    said, losses, counts = job_resume(str(tmp_path / "one"), 0, {})
    assert said == [] and counts == [(4, 16.0), (6, 8.0)]
    for result in run_on_ranks(2, job_resume, str(tmp_path / "two"), 0, {}):
        assert result[2] == counts
    said, again, counted = job_resume(str(tmp_path / "two"), 2, {})
    assert len(said) == 1 and "is of 2 data ranks, this run has 1" in said[0]
    first, second = run_on_ranks(2, job_resume, str(tmp_path / "one"), 2, {"dp_shard": 2})
    assert len(first[0]) == 1 and second[0] == [] and first[1:] == second[1:]
    for found, number in ((again, counted), first[1:]):
        assert number == counts
        assert found == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in losses]


def other_model():
    return Network(size=7)


def job_refused(folder, which):
    """What a resume says that does not fit, and whether the weights and the step are what they were."""
    make(folder, total_steps=1).fit()
    other = {"model": {"model": other_model}, "optimizer": {"optimizer": SGD(lr=0.1)}}[which]
    trainer = make(f"{folder}-other", dp_shard=2, **other)
    trainer.build()
    before = [local_of(parameter).clone() for parameter in trainer.model.parameters()]
    try:
        trainer.load_checkpoint(f"{folder}/step-00000001")
    except CheckpointError as error:
        same = all(torch.equal(local_of(parameter), old) for parameter, old in zip(trainer.model.parameters(), before, strict=True))
        return str(error), same and trainer.step == 0
    return None


@pytest.mark.parametrize("which, said", [("model", "belongs to another run"), ("optimizer", "of the checkpoint is that of AdamW")])
def test_what_does_not_fit_is_refused_on_every_rank(tmp_path, which, said):
    """Contract 27, B25: before anything changed."""
    results = run_on_ranks(2, job_refused, str(tmp_path / "run"), which)
    assert results[0] == results[1]
    assert said in results[0][0] and results[0][1]


def job_lost_moment(folder):
    """A moment of one whole matrix is missing, which only the rank that updates this matrix can notice."""
    muon = {"model": without_noise, "optimizer": Muon(lr=0.02), "dp_shard": 2}
    trainer = make(folder, total_steps=1, **muon)
    trainer.fit()
    saved = f"{folder}/step-00000001"
    trainer.load_checkpoint(saved)
    if trainer.context.is_main:
        manifest = read_manifest(saved)
        lost = "optimizer/tensors/first.weight/momentum_buffer"
        (Path(saved) / "manifest.json").write_bytes(manifest.without([lost]).encode())
    trainer.context.host.barrier()
    try:
        trainer.load_checkpoint(saved)
    except CheckpointError as error:
        return str(error)
    return None


def test_what_does_not_fit_on_one_rank_is_refused_on_all(tmp_path):
    """B25, contract 41: each matrix of Muon has its state on one rank alone."""
    results = run_on_ranks(2, job_lost_moment, str(tmp_path))
    assert results[0] == results[1] and "missing 'first.weight/momentum_buffer'" in results[0]


class OfOneRank(Callback):
    """Keeps a tensor that is another one on each rank."""

    def state_dict(self):
        return {"seen": torch.tensor([float(torch.distributed.get_rank())])}


def job_differing(folder):
    try:
        make(folder, OfOneRank(), total_steps=1).fit()
    except CheckpointError as error:
        return str(error)
    return None


def test_state_that_differs_between_ranks_is_not_merged(tmp_path):
    """Contract 28: a callback with a tensor per rank and one key."""
    results = run_on_ranks(2, job_differing, str(tmp_path))
    assert results[0] == results[1] and results[0].startswith("callbacks/OfOneRank/seen on rank 1 differs")


def job_disk_full(folder):
    """The second save fails on rank 1, in the background of a fit."""
    create, trainer = CheckpointWriter._create, make(folder, dp_shard=2)

    def full(self, name):
        if self.team.rank == 1 and self._step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(self, name)

    with mock.patch.object(CheckpointWriter, "_create", full):
        try:
            trainer.fit()
        except CheckpointError as error:
            return str(error), trainer.step
    return None


def test_a_disk_that_is_full_for_one_rank_ends_the_fit_on_all(tmp_path):
    """B40, B43: in a background save; the one before is there and can be resumed from."""
    results = run_on_ranks(2, job_disk_full, str(tmp_path), timeout=30.0)
    assert results[0] == results[1]
    text, step = results[0]
    assert "step-00000002 failed on rank 1: No space left on device" in text and step < 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    assert read_manifest(tmp_path / "step-00000001").step == 1
