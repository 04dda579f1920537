"""Weights, tails and gradients that are not finite, through whole runs on ranks: what a closed form or the run of one process says."""

import math

import pytest
import torch
from torch import nn

from tests.ranks.support import MESHES, MeanOutput, Parts, Weight, on_mesh, t
from trainer_kit import AutoDataProvider, Callback, ForwardInputs
from trainer_kit.exceptions import NonFiniteError
from trainer_kit.mesh.layout import local_of
from trainer_kit.testing import run_on_ranks

DATA_MESHES = {name: MESHES[name] for name in ("replicate", "fsdp")} | {"pack": {"dp_shard": 2, "fsdp_sync": "pack"}}


class Notes(Callback):
    """By step: the local gradients when they are ready, and the local weights after it; whether a step was skipped."""

    def __init__(self) -> None:
        self.gradients, self.weights, self.skipped = [], [], []

    def on_gradients_ready(self, event):
        self.gradients.append([row.local.grad.flatten().tolist() for row in event.trainer.parameters])

    def on_step_end(self, event):
        self.weights.append([row.local.detach().flatten().tolist() for row in event.trainer.parameters])
        self.skipped.append(event.skipped)


def left(trainer) -> bool:
    """Whether any gradient is left on this rank."""
    gradients = [row.parameter.grad for row in trainer.parameters if row.parameter.grad is not None]
    return any(bool(local_of(gradient).any()) for gradient in gradients)


class TwoRows(nn.Module):
    """Two weights of 1, of which FSDP gives each rank one: the outputs are w1 * c and w2 * c."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.layer.weight)

    def forward(self, c: torch.Tensor) -> torch.Tensor:
        return self.layer(c)


class SumOutput(MeanOutput):
    """The gradient of each of the two weights is the mean sample; samples of `nothing` do not count."""

    def build_forward_inputs(self, batch):
        counts = int((batch != 100).sum())
        return ForwardInputs(inputs=batch, state=batch, weight=counts)

    def compute_loss(self, pipeline_results, state):
        return pipeline_results[state.squeeze(1) != 100].mean() * 2


NOTHING = t(100, 100)

RUNS = {
    # B02, and the same in two microbatches: the mean over four samples is 1.
    "unequal": (Parts([[t(4)], [t(4), t(0)]], [[t(0, 0, 0)], [t(0, 0), t(0)]]), [1.0, 0.8]),
    # B07: nothing counts on rank 0; then nothing counts anywhere; then one microbatch of rank 1 counts.
    "zero": (Parts([[NOTHING], [NOTHING], [NOTHING, NOTHING]], [[t(2, 4)], [NOTHING], [NOTHING, t(5)]]), [3.0, 0.0, 5.0]),
}


def job_closed_form(name, degrees):
    data, _ = RUNS[name]
    notes = Notes()
    trainer = on_mesh(TwoRows(), SumOutput(), data, degrees, callbacks=[notes])
    trainer.fit()
    losses = [value for _, value in trainer.history.values("train/loss")]
    found = (notes.gradients, notes.weights, notes.skipped, losses, left(trainer))
    trainer.close()
    return found


@pytest.mark.parametrize("mesh", DATA_MESHES)
@pytest.mark.parametrize("name", RUNS)
def test_the_mean_is_over_all_samples_of_all_ranks(name, mesh):
    """B02 and B07: whatever the ranks hold. A step in which nothing counts changes nothing, and is no nan in any record."""
    _, expected = RUNS[name]
    for gradients, weights, skipped, losses, is_left in run_on_ranks(2, job_closed_form, name, DATA_MESHES[mesh]):
        per_rank = 2 if mesh == "replicate" else 1
        weight = 1.0
        of_steps = []
        for gradient in expected:
            of_steps.append(2 * gradient * weight)
            weight -= gradient
        for step, gradient in enumerate(expected):
            assert gradients[step] == [pytest.approx([gradient] * per_rank)]
        assert weights[-1] == [pytest.approx([weight] * per_rank)] and not is_left
        assert skipped == [gradient == 0 for gradient in expected]
        assert losses == pytest.approx([loss for loss, gradient in zip(of_steps, expected, strict=True) if gradient])


# ---- tails


class Tail(MeanOutput):
    """The gradient is the number of the sample; counts what it was given."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def compute_loss(self, pipeline_results, state):
        self.seen += state.flatten().tolist()
        return pipeline_results.mean()


class Column(torch.utils.data.Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def job_tail(degrees):
    task, notes = Tail(), Notes()
    data = AutoDataProvider(Column(), global_batch_size=4, microbatch_size=1)
    trainer = on_mesh(Weight(), task, data, degrees, callbacks=[notes], epochs=2)
    trainer.fit()
    norms = [value for _, value in trainer.history.values("optim/grad_norm")]
    found = (trainer.step, norms, sorted(task.seen), left(trainer), notes.weights[-1])
    trainer.close()
    return found


@pytest.mark.parametrize("mesh", ["replicate", "fsdp"])
def test_a_short_last_pack_is_used_with_its_real_weight(mesh):
    """B05: 7 samples in packs of 4 are packs of 4 and 3, of which one rank has 2 and 1; every sample once per epoch, nothing left over."""
    found = run_on_ranks(2, job_tail, DATA_MESHES[mesh])
    assert sorted(number for _, _, seen, _, _ in found for number in seen) == sorted([float(n) for n in range(7)] * 2)
    for step, norms, _, is_left, _ in found:
        assert step == 4 and norms == pytest.approx([1.5, 5.0] * 2) and not is_left
    assert found[0][4] == [pytest.approx([1.0 - 13.0])]


# ---- gradients that are not finite


class Spoils(Callback):
    """Makes the gradient that rank 1 holds nan in step 3."""

    def on_gradients_ready(self, event):
        if event.step == 3 and event.trainer.context.rank == 1:
            for row in event.trainer.parameters:
                row.local.grad.fill_(math.nan)


def job_nonfinite(degrees, policy):
    """Rank 1 has a nan among its samples in step 1; where gradients are cut, one is spoilt on rank 1 in step 3."""
    data = Parts([[t(1)]] * 5, [[t(1)], [t(math.nan)], [t(1)], [t(1)], [t(1)]])
    notes = Notes()
    callbacks = [notes, Spoils()] if "dp_shard" in degrees else [notes]
    trainer = on_mesh(TwoRows(), SumOutput(), data, degrees, callbacks=callbacks, nonfinite=policy)
    text = ""
    try:
        trainer.fit()
    except NonFiniteError as error:
        text = str(error)
    found = (text, trainer.step, notes.weights, notes.skipped, trainer._training().loop.guard.num_skipped, left(trainer))
    trainer.close()
    return found


@pytest.mark.parametrize("mesh", DATA_MESHES)
def test_a_gradient_that_is_not_finite_on_one_rank_is_one_decision_of_all(mesh):
    """B55 and design decision 6: skipped on both ranks, bitwise, counted, and the next step is normal; or an error on both."""
    per_rank = 2 if mesh == "replicate" else 1
    is_cut = mesh != "replicate"
    weights = [0.0, 0.0, -1.0, -1.0 if is_cut else -2.0, -2.0 if is_cut else -3.0]
    for text, step, seen, skipped, num_skipped, is_left in run_on_ranks(2, job_nonfinite, DATA_MESHES[mesh], "skip"):
        assert text == "" and step == 5 and not is_left
        assert seen == [[[weight] * per_rank] for weight in weights]
        assert skipped == [False, True, False, is_cut, False] and num_skipped == 1 + is_cut
    (first, *_), (second, *_) = errors = run_on_ranks(2, job_nonfinite, DATA_MESHES[mesh], "error")
    assert first == second and first.startswith("step 1: a gradient is inf or nan; the first parameter with one is 'layer.weight'")
    for _, step, seen, _, _, is_left in errors:
        assert step == 1 and seen == [[[0.0] * per_rank]] and not is_left
