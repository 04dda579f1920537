"""Optimizers over stages, through the Trainer: the run of one process, its resume, equal copies of tied weights, non-finite steps."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ranks.staged import num_ranks, staged
from trainer_kit import Callback
from trainer_kit.callbacks import GradientClipping
from trainer_kit.checkpoint import read_manifest
from trainer_kit.exceptions import NonFiniteError
from trainer_kit.optim import SGD, AdamW, Muon, ParameterGroup, StochasticAdamW
from trainer_kit.testing import run_on_ranks


def by_place(parameters):
    """A learning rate per parameter, by its place in the model, as for layer-wise decay."""
    return torch.optim.Adam([{"params": [parameter], "lr": 0.05 * 0.9**place} for place, parameter in enumerate(parameters)])


GROUPS = (ParameterGroup(pattern="head.*", lr=0.1), ParameterGroup(pattern="layers.0.*", weight_decay=0.5))
FIRST_HALF = ("embedding", "scale", "layers.0", "layers.1")
KINDS = {
    "adamw": {"optimizer": AdamW(lr=0.05, groups=GROUPS)},  # patterns that match names of one stage
    "callable": {"optimizer": by_place},
    "muon": {"optimizer": Muon(lr=0.1, rest=AdamW(lr=0.05))},  # one of the tied weights is for Muon
    "stochastic": {"optimizer": StochasticAdamW(lr=0.05), "precision": "bf16"},
    "sgd, a frozen stage": {"optimizer": SGD(lr=0.2, momentum=0.9), "model": {"tie": False, "frozen": FIRST_HALF}},
}
ON = {"1f1b": list(KINDS), "zbv": ["callable", "muon"], "zbv shard": ["muon", "stochastic"]}


def make(layout, kind):
    settings = {"model": {"tie": True}, "total_steps": 4} | KINDS[kind]
    return staged(layout, GradientClipping(0.5), **settings)


def weights(trainer):
    """This rank's parts of the parameters: name, stage, box, values."""
    return [(row.name, row.stage, row.layout.box, row.local.detach().clone()) for row in trainer.parameters]


def records(trainer):
    return [value for name in ("train/loss", "optim/grad_norm") for _, value in trainer.history.values(name)]


def job_optimizers(layout, kinds, folder):
    """The weights and records after 4 steps, and the weights when the last two of them are made again from a checkpoint."""
    found = {}
    for kind in kinds:
        trainer = make(layout, kind)
        trainer.fit(2)
        trainer.save_checkpoint(f"{folder}/{kind}")
        trainer.fit(4)
        found[kind] = weights(trainer), records(trainer)
        trainer.close()
        if layout != "one":
            resumed = make(layout, kind)
            resumed.fit(resume=f"{folder}/{kind}")
            found[kind] += (weights(resumed),)
            resumed.close()
    return found


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("one"))
    (found,) = run_on_ranks(1, job_optimizers, "one", list(KINDS), folder)
    return folder, found


def saved(folder, kind):
    """Key, shape and dtype of each tensor of a checkpoint that belongs to no rank."""
    tensors = read_manifest(f"{folder}/{kind}").tensors
    return {name: (record.shape, record.dtype) for name, record in tensors.items() if "/ranks/" not in name}


@pytest.mark.parametrize("layout", ON)
def test_every_optimizer_makes_the_run_of_one_process(tmp_path, one_process, layout):
    """Contracts 7, 8, 12, 27 with clipping; copies of a tied weight are equal bit by bit, on one rank and on two."""
    results = run_on_ranks(num_ranks(layout), job_optimizers, layout, ON[layout], str(tmp_path))
    folder, of_one = one_process
    for kind in ON[layout]:
        expected, numbers = of_one[kind]
        assert saved(tmp_path, kind) == saved(folder, kind)
        whole = {name: values for name, _, _, values in expected}
        limit = 0.02 if kind == "stochastic" else 2e-5  # bf16 rounds the sums of gradients
        copies, names = {}, set()
        for of_rank in results:
            parts, found, again = of_rank[kind]
            assert all(torch.equal(a[-1], b[-1]) for a, b in zip(parts, again, strict=True)), kind
            assert found == pytest.approx(numbers, rel=limit) and found == results[0][kind][1], kind
            for name, _, box, values in parts:
                names.add(name)
                assert torch.allclose(values, whole[name][box], rtol=limit, atol=limit), (kind, name)
                assert torch.equal(values, copies.setdefault((name, str(box)), values)), (kind, name)
        assert names == whole.keys()


class Spoils(Callback):
    """Makes a gradient of one parameter nan in the second step, on the ranks that hold it."""

    def __init__(self, name):
        self.name = name

    def on_gradients_ready(self, event):
        for row in event.trainer.parameters:
            if event.step == 1 and row.name == self.name and row.local.numel():
                row.local.grad.view(-1)[0] = torch.nan


NAMES = ("layers.0.linear.bias", "layers.3.linear.weight")


def job_not_finite(layout):
    """For a parameter of each end of the model: the error, and whether the weights are as before; then a run that skips the step."""
    told, settings = [], {"model": {"tie": True}, "optimizer": AdamW(lr=0.05), "total_steps": 3}
    trainer = staged(layout, spoils := Spoils(""), **settings)
    trainer.fit(1)
    before = weights(trainer)
    for spoils.name in NAMES:
        with pytest.raises(NonFiniteError) as caught:
            trainer.fit(3)
        unchanged = all(torch.equal(a[-1], b[-1]) for a, b in zip(before, weights(trainer), strict=True))
        told.append((str(caught.value), unchanged))
    trainer.close()
    trainer = staged(layout, Spoils(NAMES[0]), GradientClipping(0.5), **settings, nonfinite="skip")
    trainer.fit()
    trainer.close()
    return told, [math.isfinite(value) for value in records(trainer)], weights(trainer)


def test_a_gradient_that_is_not_finite_is_named_on_every_rank_or_skipped_on_all():
    """Design decision 6 over stages: with either end of the model, and the weights of the run of one process without that step."""
    ((_, _, expected),) = run_on_ranks(1, job_not_finite, "one")
    whole = {name: values for name, _, _, values in expected}
    results = run_on_ranks(num_ranks("shard"), job_not_finite, "shard")
    for told, finite, parts in results:
        assert told == results[0][0]
        assert all(repr(name) in text and unchanged for name, (text, unchanged) in zip(NAMES, told, strict=True))
        assert finite == [True] * 4 + [False, True]  # losses, and norms as they are before clipping
        assert all(torch.allclose(values, whole[name][box], rtol=1e-5, atol=1e-6) for name, _, box, values in parts)
