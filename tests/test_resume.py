"""A run that was stopped and resumed in a new Trainer is bitwise the run that was not.

The comparison is of whole checkpoints, byte by byte: parameters, moments, averages, random streams, data position, metrics in progress,
the state of callbacks. Beside it: what a checkpoint is keyed by, when an asynchronous save copies, and what a resume says.
"""

import enum
import gc
import json
import logging
import random
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support import MeanTask, Scalar, quiet_trainer, sgd
from trainer_kit import AutoDataProvider, Callback, SupervisedTask, Trainer
from trainer_kit.callbacks import EMA, Checkpoint, EarlyStopping, Evaluate, GradientClipping, JSONLines
from trainer_kit.checkpoint import CheckpointSaver, read_manifest, unflatten_state
from trainer_kit.checkpoint.per_rank import decode_state
from trainer_kit.exceptions import CheckpointError
from trainer_kit.metrics import Mean
from trainer_kit.optim import SGD, Adam, AdamW, Muon, Piecewise, StochasticAdamW


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


class NoisyData(torch.utils.data.Dataset):
    """Ten samples; each adds noise from torch's, python's and numpy's streams."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        x = torch.full((4,), float(index) / 10) + 0.1 * torch.randn(4)
        return x, x.sum(0, keepdim=True) + random.random() + np.random.rand()


class Centered(nn.Module):
    """Takes a running mean away, as normalisations do, in a buffer of its own dtype."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def reset_parameters(self):
        self.mean.zero_()

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().float().mean(0), 0.1)
        return x - self.mean.to(x.dtype)


class Network(nn.Module):
    """Dropout, a buffer that moves, matrices for Muon and vectors for the rest."""

    def __init__(self):
        super().__init__()
        self.first, self.center, self.drop, self.second = nn.Linear(4, 6), Centered(), nn.Dropout(0.5), nn.Linear(6, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        hidden = self.drop(torch.tanh(self.center(self.first(x.to(self.first.weight.dtype)))))
        return self.out(torch.tanh(self.second(hidden))).float()


class Measured(SupervisedTask):
    """Squared error, and a metric that is in progress whenever a save falls between two records."""

    def __init__(self):
        super().__init__(nn.functional.mse_loss, metrics={"mean": (Mean, lambda out, target: (out,))})


OPTIMIZERS = {
    "adamw": {"optimizer": AdamW(lr=0.02)},
    "amsgrad": {"optimizer": Adam(lr=0.02, amsgrad=True)},
    "sgd": {"optimizer": SGD(lr=0.02, momentum=0.9, nesterov=True)},
    "muon": {"optimizer": Muon(lr=0.02)},
    "stochastic": {"optimizer": StochasticAdamW(lr=1e-3), "precision": "bf16"},
    "bf16 moments": {"optimizer": StochasticAdamW(lr=1e-3, state_dtype="bf16"), "precision": "bf16"},
    "fetched ahead": {"optimizer": AdamW(lr=0.02), "prefetch_packs": 2},
    "mixed precision": {"optimizer": AdamW(lr=0.02), "precision": "bf16-mixed"},
    "torch schedule": {
        "optimizer": AdamW(lr=0.02),
        "lr_scheduler": lambda o, total_steps: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps),
    },
}
NUM_STEPS = 7  # packs of 4, 4 and 2 samples: the third epoch has begun


def make(folder: Path, **settings: Any) -> Trainer:
    """A trainer with everything that has a state."""
    settings = {"lr_scheduler": Piecewise().linear(1.0, steps=2).cosine(0.1, rest=True), "total_steps": NUM_STEPS, **settings}
    held_out = [(torch.ones(2, 4), torch.ones(2, 1))]
    callbacks = [
        Checkpoint(folder / "checkpoints", every=1, best=("val/loss", "min", 9), keep_last=9),
        JSONLines(folder / "log.jsonl"), EMA(0.9, every=2), GradientClipping(0.5), Evaluate(held_out, every=3),
    ]  # fmt: skip
    data = AutoDataProvider(NoisyData(), global_batch_size=4, microbatch_size=2, shuffle=True)
    return quiet_trainer(Network, Measured(), data, callbacks=callbacks, log_every=2, **settings)


def checkpoint_bytes(folder: Path, step: int = NUM_STEPS) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "checkpoints" / f"step-{step:08d}").iterdir()}


@pytest.mark.parametrize(("name", "stops"), [(name, range(1, NUM_STEPS) if name == "adamw" else (3, 5)) for name in OPTIMIZERS])
def test_resumed_from_any_step_it_is_bitwise_the_uninterrupted_run(name, stops, tmp_path):
    """B15, B17, B18, B19, B25 and contracts 17, 27, 28, 30b: the last checkpoints and the logs are equal, byte for byte."""
    straight = make(tmp_path / "straight", **OPTIMIZERS[name])
    straight.fit()
    expected, log = checkpoint_bytes(tmp_path / "straight"), (tmp_path / "straight" / "log.jsonl").read_bytes()
    assert len(log.splitlines()) == 7  # steps 2, 4, 6, 7 and evaluations at 3, 6, 7
    for step in stops:
        folder = tmp_path / f"from {step}"
        folder.mkdir()
        shutil.copy(tmp_path / "straight" / "log.jsonl", folder / "log.jsonl")  # ahead of the checkpoint, as after a kill
        torch.manual_seed(step)  # a new process has other streams
        resumed = make(folder, **OPTIMIZERS[name])
        resumed.fit(resume=str(tmp_path / "straight" / "checkpoints" / f"step-{step:08d}"))
        assert (folder / "log.jsonl").read_bytes() == log
        assert checkpoint_bytes(folder) == expected
        ours, theirs = resumed.model.state_dict(), straight.model.state_dict()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_two_runs_of_one_layout_are_bitwise_equal(tmp_path):
    """B60: the order of every sum is fixed."""
    for name in ("a", "b"):
        make(tmp_path / name, optimizer=AdamW(lr=0.02)).fit()
    assert checkpoint_bytes(tmp_path / "a") == checkpoint_bytes(tmp_path / "b")


def test_a_fit_in_two_parts_is_a_fit_in_one():
    """Without a schedule the length of a run changes nothing; the trainer goes on in the middle of an epoch."""

    def run(*lengths: int) -> torch.Tensor:
        trainer = quiet_trainer(Network, Measured(), AutoDataProvider(NoisyData(), 4, shuffle=True), optimizer=AdamW(lr=0.02))
        for length in lengths:
            trainer.fit(total_steps=length)
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    assert torch.equal(run(6), run(2, 5, 6))


class Stop(Callback):
    """Ends the run after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, event):
        if event.trainer.step == self.step:
            event.trainer.stop("enough")


class Ids(Callback):
    """Notes the ids of each step."""

    def __init__(self):
        self.seen = []

    def on_step_start(self, event):
        self.seen += [int(i) for microbatch in event.microbatches for i in microbatch[0]]


class OfTuples(MeanTask):
    def build_forward_inputs(self, batch):
        return super().build_forward_inputs(batch[0].float())


def ids_of(
    folder: Path, stop_at: int = -1, *, count: int = 10, batch: int = 2, workers: int = 0, more: Any = (), **settings: Any
) -> list[int]:
    ids = Ids()
    data = AutoDataProvider(torch.utils.data.TensorDataset(torch.arange(count)), batch, shuffle=True, num_workers=workers)
    settings = {"epochs": 3, "optimizer": sgd(0.01), **settings}
    quiet_trainer(Scalar(), OfTuples(), data, callbacks=[ids, Stop(stop_at), *more, Checkpoint(folder, every=100)], **settings).fit()
    return ids.seen


def test_stopped_in_the_second_epoch_the_ids_go_on(tmp_path):
    """B11: 10 ids, batch 2, 3 epochs, stopped after global batch 7; each epoch has its own order."""
    reference = ids_of(tmp_path / "whole")
    assert ids_of(tmp_path / "a", 7) + ids_of(tmp_path / "a") == reference
    epochs = [reference[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]


class SavesAtOnce(Callback):
    """Saves before the first step of a fit."""

    def __init__(self, folder):
        self.folder = folder

    def on_fit_start(self, event):
        event.trainer.request("save", path=str(self.folder / f"step-{event.trainer.step:08d}"), asynchronous=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_again_and_again(workers, tmp_path):
    """B13: stop at 3, resume, save at once, resume, stop at 5, resume."""
    reference = ids_of(tmp_path / "whole", workers=workers)
    seen = ids_of(tmp_path / "a", 3, workers=workers)
    ids_of(tmp_path / "a", 4, workers=workers, more=[SavesAtOnce(tmp_path / "a")])
    shutil.rmtree(tmp_path / "a" / "step-00000004")
    seen += ids_of(tmp_path / "a", 5, workers=workers) + ids_of(tmp_path / "a", workers=workers)
    assert seen == reference


def test_a_resume_shortens_only_its_own_epoch(tmp_path):
    """B14: 4 batches per epoch, resumed at batch 2 of epoch 1 of 3: 2, 4 and 4 batches follow."""
    batches = []

    class Count(Callback):
        def on_epoch_start(self, event):
            batches.append(0)

        def on_step_end(self, event):
            batches[-1] += 1

    ids_of(tmp_path, 2, count=8)
    ids_of(tmp_path, count=8, more=[Count()])
    assert batches == [2, 4, 4]


SCHEDULES = {
    "piecewise": Piecewise().linear(1.0, steps=3).cosine(0.0, rest=True),
    "torch": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rates_of_a_resumed_run(name, tmp_path):
    """B17: 10 straight equal 4 + 6, exactly; the first resumed step uses the fifth rate."""

    def rates(steps: int, folder: Path) -> list[float]:
        settings = {"lr_scheduler": SCHEDULES[name], "log_every": 1, "total_steps": 10}
        trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 10, callbacks=[Stop(steps), Checkpoint(folder, every=100)], **settings)
        trainer.fit()
        return [value for _, value in trainer.history.values("optim/lr")]

    straight = rates(10, tmp_path / "a")
    assert rates(4, tmp_path / "b") + rates(10, tmp_path / "b") == straight
    assert len(set(straight)) == 10


def test_the_settings_decide_the_length_of_a_schedule_and_the_change_is_said(tmp_path, caplog):
    """B28 and design decision 9: linear to 0 over 10, stopped at 5, resumed with 20: rate of update i is 1 - (i + 1) / 20."""

    def run(total: int, *callbacks: Callback) -> dict[int, float]:
        schedule = Piecewise(start=1.0).linear(0.0, rest=True)
        callbacks = (*callbacks, Checkpoint(tmp_path, every=100))
        trainer = quiet_trainer(
            Scalar(), MeanTask(), [t(1)] * 20, callbacks=callbacks, lr_scheduler=schedule, log_every=1, total_steps=total
        )
        trainer.fit()
        return dict(trainer.history.values("optim/lr"))

    assert run(10, Stop(5)) == {i + 1: 1 - (i + 1) / 10 for i in range(5)}
    with caplog.at_level(logging.WARNING, logger="trainer_kit"):
        rates = run(20)
    assert rates == pytest.approx({i + 1: 1 - (i + 1) / 20 for i in range(5, 20)}) and min(rates.values()) >= 0
    assert "total_steps was 10, is 20 now" in caplog.text


def test_a_finished_run_is_extended_from_its_checkpoint(tmp_path):
    """Contract 32: 3 steps and 3 more in a new trainer are 6 steps; w is 1 - 6."""
    for total in (3, 6):
        trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 6, callbacks=[Checkpoint(tmp_path, every=2)], total_steps=total)
        trainer.fit()
    assert trainer.step == 6 and trainer.model.w.item() == -5.0
    assert [saved.step for saved in trainer.callbacks[-1].folder.list_valid()] == [2, 3, 4, 6]


def test_values_logged_between_two_records_survive(tmp_path):
    """Promise 2: the log of a resumed run is that of the uninterrupted one; a value joins the next record."""

    class Logs(Callback):
        def on_step_end(self, event):
            if event.trainer.step == 1:
                event.trainer.log("mine", 7.0)

    def run(**settings):
        trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 2, callbacks=[Logs(), Checkpoint(tmp_path, every=1)], log_every=2)
        trainer.fit(**settings)
        return trainer.history.last("mine")

    assert run() == (2, 7.0)
    assert run(resume=str(tmp_path / "step-00000001")) == (2, 7.0)


def test_never_starts_anew_beside_old_checkpoints(tmp_path):
    """`resume="never"`: the same steps are saved again, over the old ones."""
    for start in (1.0, 3.0):
        trainer = quiet_trainer(Scalar(start), MeanTask(), [t(1)] * 2, callbacks=[Checkpoint(tmp_path, every=1)])
        trainer.fit(resume="never")
    template = safetensors.torch.load_file(next((tmp_path / "step-00000002").glob("*.safetensors")))
    assert trainer.step == 2 and template["model/w"].item() == 1.0


def test_everything_is_keyed_by_the_name_of_a_parameter(tmp_path):
    """Design decision 12 and contract 28: no rank, stage or number of a parameter; a tied weight under its first name alone."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layers = nn.Embedding(3, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.head = nn.Linear(4, 3, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("table", torch.zeros(2), persistent=False)

        def forward(self, x):
            return self.head(self.layers[1](self.layers[0](self.embed(x)))).mean()

    trainer = quiet_trainer(Tied(), MeanTask(), [torch.tensor([0, 1])], callbacks=[Checkpoint(tmp_path, every=1)], optimizer=AdamW(lr=0.1))
    trainer.fit()
    manifest = read_manifest(tmp_path / "step-00000001")
    parameters = ["embed.weight", *(f"layers.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias"))]
    expected = {f"model/{name}" for name in (*parameters, "seen")}
    expected |= {f"optimizer/tensors/{name}/{key}" for name in parameters for key in ("step", "exp_avg", "exp_avg_sq")}
    assert {name for name in manifest.tensors if name.startswith(("model/", "optimizer/"))} == expected


def test_parameters_without_an_element_take_part_everywhere(tmp_path):
    """Contract 14 on one process: norm, clipping, update, checkpoint and export with an empty and a zero-dim parameter."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.empty, self.w = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(1.0))

        def forward(self, c):
            return self.w * c.mean() + self.empty.sum()

    def run(**settings):
        callbacks = [GradientClipping(1.0), Checkpoint(tmp_path, every=1)]
        trainer = quiet_trainer(Odd(), MeanTask(), [t(3), t(4)], callbacks=callbacks, optimizer=AdamW(lr=0.1), log_every=1)
        trainer.fit(**settings)
        return trainer

    straight = run()
    resumed = run(resume=str(tmp_path / "step-00000001"))
    assert [value for _, value in straight.history.values("optim/grad_norm")] == [3.0, 4.0]
    assert torch.equal(resumed.model.w, straight.model.w) and resumed.model.w.item() < 1.0
    resumed.export(tmp_path / "model")
    assert safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")["empty"].shape == (0, 3)


def test_moments_are_really_restored_with_their_dtype(tmp_path):
    """B18, B25 and contract 27: fp32 parameters with bf16 moments; not zero, equal, and the step counter stays float32."""

    def make():
        optimizer = StochasticAdamW(lr=0.01, state_dtype="bf16")
        return quiet_trainer(
            nn.Linear(3, 1), SupervisedTask(nn.functional.mse_loss), [(torch.ones(2, 3), torch.ones(2, 1))] * 2, optimizer=optimizer
        )

    first, second = make(), make()
    first.fit()
    first.save_checkpoint(tmp_path / "saved")
    second.load_checkpoint(tmp_path / "saved")
    for ours, theirs in zip(second.model.parameters(), first.model.parameters(), strict=True):
        state, expected = second.optimizer.state[ours], first.optimizer.state[theirs]
        assert state["exp_avg"].dtype == torch.bfloat16 and state["exp_avg"].count_nonzero() > 0
        assert all(torch.equal(state[key], expected[key]) and state[key].dtype == expected[key].dtype for key in expected if key != "step")
        assert float(state["step"]) == 2.0


PARTS = {"model", "optimizer", "schedule", "data", "random", "callbacks", "task"}
# An average starts at the weights that were loaded; a schedule sets the rates of the optimizer's groups.
FOLLOW = {"model": {"callbacks"}, "schedule": {"optimizer"}}


@pytest.mark.parametrize("part", sorted(PARTS))
def test_a_part_is_loaded_alone(part, tmp_path):
    """`load_checkpoint(parts=...)`: what was not asked for stays, the step counter too."""
    make(tmp_path, optimizer=AdamW(lr=0.02)).fit()
    saved = tmp_path / "checkpoints" / "step-00000003"
    fresh, loaded = (make(tmp_path / name, optimizer=AdamW(lr=0.02), seed=5) for name in ("fresh", "loaded"))
    fresh.save_checkpoint(tmp_path / "before")
    loaded.load_checkpoint(saved, parts=[part])
    loaded.save_checkpoint(tmp_path / "after")
    assert loaded.step == 0

    def state(folder: Path) -> dict[str, Any]:
        manifest = read_manifest(folder)
        tensors = {}
        for file in folder.glob("*.safetensors"):
            tensors |= {name: tensor.tolist() for name, tensor in safetensors.torch.load_file(file).items()}
        values = {name: unflatten_state(tensors, manifest.values.get(name)) for name in PARTS}
        return {part: (values[part], {k: v for k, v in tensors.items() if k.startswith(f"{part}/")}) for part in PARTS}

    before, after, expected = state(tmp_path / "before"), state(tmp_path / "after"), state(saved)
    assert {name for name in PARTS if after[name] != before[name]} == {part} | FOLLOW.get(part, set())
    assert plain(after[part]) == plain(expected[part])


def plain(state: Any) -> Any:
    """Without the values of groups as the schedule set them, which the schedule sets again."""
    values, tensors = state
    if isinstance(values, dict) and "groups" in values:
        values = {name: value for name, value in values.items() if name != "groups"}
    return values, tensors


def test_loading_a_part_beside_the_weights_leaves_the_averages_alone(tmp_path):
    """`parts=["data"]`: an average starts anew with weights that were loaded, and with nothing else."""
    make(tmp_path, optimizer=AdamW(lr=0.02)).fit()
    trainer = make(tmp_path / "other", optimizer=AdamW(lr=0.02))
    trainer.fit()
    ema = next(callback for callback in trainer.callbacks if isinstance(callback, EMA))
    before = {name: average.clone() for name, average in ema.averages.items()}
    trainer.load_checkpoint(tmp_path / "checkpoints" / "step-00000003", parts=["data"])
    assert all(torch.equal(average, before[name]) for name, average in ema.averages.items())


def test_a_checkpoint_that_no_trainer_saved_is_refused(tmp_path):
    """Contract 27: tensors alone, as `CheckpointSaver` writes them for others; the weights stay what they are."""
    trainer = quiet_trainer(Scalar(2.0), MeanTask(), [t(1)])
    CheckpointSaver().save(tmp_path / "c", {"model/w": torch.tensor(5.0)}, None, step=1)
    with pytest.raises(CheckpointError, match="something else than a Trainer"):
        trainer.load_checkpoint(tmp_path / "c", parts=["model"])
    assert trainer.model.w.item() == 2.0


class Counter(Callback):
    """Counts steps under a key of its own."""

    def __init__(self, key: str, by: int):
        self.key, self.by, self.count = key, by, 0

    @property
    def state_key(self):
        return self.key

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def on_step_end(self, event):
        self.count += self.by


def test_two_callbacks_of_one_class_keep_their_own_states(tmp_path):
    """B75."""
    quiet_trainer(Scalar(), MeanTask(), [t(1)] * 3, callbacks=[Counter("a", 1), Counter("b", 10), Checkpoint(tmp_path, every=3)]).fit()
    one, ten = Counter("a", 1), Counter("b", 10)
    quiet_trainer(Scalar(), MeanTask(), [t(1)] * 3, callbacks=[ten, one, Checkpoint(tmp_path, every=3)], epochs=2).fit()
    assert (one.count, ten.count) == (6, 60)


def test_patience_survives_a_resume(tmp_path):
    """B76: patience 3; the loss of an untrained model never improves: best at step 1, bad at 2 and 3, resumed, bad at 4: it stops."""

    def run(*callbacks: Callback) -> int:
        callbacks = (*callbacks, EarlyStopping(patience=3), Evaluate([t(1)], every=1), Checkpoint(tmp_path, every=1))
        trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 20, callbacks=callbacks, optimizer=sgd(0.0))
        trainer.fit()
        return trainer.step

    assert run(Stop(3)) == 3
    assert run() == 4


def test_a_state_that_appears_later_is_saved(tmp_path):
    """B47: the callback has no state at save 1 and one at save 2."""

    class Late(Callback):
        state: dict[str, Any] = {}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

        def on_step_end(self, event):
            self.state = {"average": t(3)} if event.trainer.step == 2 else {}

    quiet_trainer(Scalar(), MeanTask(), [t(1)] * 2, callbacks=[Late(), Checkpoint(tmp_path, every=1)]).fit()
    again = Late()
    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 2, callbacks=[again, Checkpoint(tmp_path, every=1)])
    trainer.load_checkpoint(tmp_path / "step-00000002")
    assert again.state["average"].item() == 3.0


def test_callbacks_that_come_and_go_are_told(tmp_path, caplog):
    """Contract 27: a state that nobody takes, and a callback that finds none, are said."""
    quiet_trainer(Scalar(), MeanTask(), [t(1)] * 2, callbacks=[Counter("a", 1), Checkpoint(tmp_path, every=2)]).fit()
    quiet_trainer(Scalar(), MeanTask(), [t(1)] * 2, callbacks=[Counter("b", 1), Checkpoint(tmp_path, every=2)], epochs=2).fit()
    assert "callback 'a'" in caplog.text and "callback 'b'" in caplog.text


class Color(enum.Enum):
    RED = 1


@dataclass
class Options:
    color: Color
    sizes: tuple[int, ...]


def test_a_checkpoint_is_data_whatever_the_settings_are(tmp_path):
    """B26 and promise 5: numpy's streams, an enum and a dataclass in use; JSON and safetensors, and nothing else."""

    class WithOptions(MeanTask):
        def hparams(self):
            return {"options": Options(Color.RED, (1, 2)), "folder": Path("a"), "dtype": torch.float32, "color": Color.RED}

    quiet_trainer(Scalar(), WithOptions(), [t(1)], callbacks=[Checkpoint(tmp_path, every=1)]).fit()
    files = sorted(path.name for path in (tmp_path / "step-00000001").iterdir())
    assert files == ["manifest.json", "rank-00000.safetensors"]
    manifest = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())["manifest"]
    tensors = safetensors.torch.load_file(tmp_path / "step-00000001" / "rank-00000.safetensors")
    assert "numpy" in decode_state(tensors["random/ranks/0"]) and manifest["identity"]["settings"]["task"]["color"] == "Color.RED"
    assert "model/w" in tensors


def test_settings_without_a_plain_value_are_not_told_as_changes(tmp_path, caplog):
    """Design decision 8: a function or an object has no address in what is saved, which would differ in every process."""

    class WithObjects(MeanTask):
        def hparams(self):
            return {"function": lambda x: x, "object": object(), "activation": nn.functional.relu}

    for total in (2, 4):
        callbacks = [Checkpoint(tmp_path, every=2)]
        quiet_trainer(Scalar(), WithObjects(), [t(1)] * 4, callbacks=callbacks, optimizer=SGD(lr=1.0), total_steps=total).fit()
    assert "settings.task" not in caplog.text
    assert " at 0x" not in json.dumps(read_manifest(tmp_path / "step-00000004").identity["settings"])


class Held:
    """Holds the writer until it is let go."""

    def __init__(self):
        from trainer_kit.storage import write_all

        self.write_all, self.go = write_all, threading.Event()

    def __call__(self, file, data):
        assert self.go.wait(20)
        self.write_all(file, data)


def test_an_asynchronous_save_holds_the_state_of_its_step(tmp_path):
    """Contract 30: parameters and moments change right after the call, in place, while the writer has not begun."""
    held, expected = Held(), {}

    class Changes(Callback):
        def on_checkpoint_start(self, event):
            if event.step == 1:
                expected["w"] = event.trainer.model.w.item()

        def on_step_start(self, event):
            if event.step == 1:
                event.trainer.model.w.data.fill_(99.0)
                event.trainer.optimizer.state[event.trainer.model.w]["exp_avg"].fill_(99.0)
                held.go.set()

    with mock.patch("trainer_kit.checkpoint.writer.write_all", held):
        callbacks = [Changes(), Checkpoint(tmp_path, every=1, asynchronous=True)]
        quiet_trainer(Scalar(), MeanTask(), [t(1)] * 2, callbacks=callbacks, optimizer=AdamW(lr=0.1)).fit()
    saved = safetensors.torch.load_file(tmp_path / "step-00000001" / "rank-00000.safetensors")
    assert saved["model/w"].item() == expected["w"] != 99.0
    assert saved["optimizer/tensors/w/exp_avg"].item() == pytest.approx(0.1)


def test_a_failed_background_save_is_a_note_on_the_error_that_ends_the_run(tmp_path):
    """B40 and contract 30: it never hides the first error."""

    def fail(file, data):
        raise OSError("the disk left")

    class Breaks(Callback):
        def on_step_start(self, event):
            if event.step == 1:
                raise ValueError("first")

    trainer = quiet_trainer(Scalar(), MeanTask(), [t(1)] * 3, callbacks=[Breaks(), Checkpoint(tmp_path, every=1)])
    with mock.patch("trainer_kit.checkpoint.writer.write_all", fail), pytest.raises((ValueError, CheckpointError)) as caught:
        trainer.fit()
    assert str(caught.value) == "first" and "the disk left" in "".join(caught.value.__notes__)


def adapters(folder: Path, **settings: Any) -> Trainer:
    """A frozen base from `folder / "base"` and a trainable layer; the base differs from the file until it is loaded."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    model[0].requires_grad_(False)
    task = SupervisedTask(nn.functional.mse_loss)
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 4
    settings = {"source_model": folder / "base", "checkpoint_trainable_only": True, **settings}
    return quiet_trainer(model, task, data, callbacks=[Checkpoint(folder / "run", every=2)], optimizer=sgd(0.1), **settings)


def write_base(folder: Path, value: float) -> None:
    state = {"0.weight": torch.full((2, 2), value), "1.weight": torch.full((1, 2), 0.5)}
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(state, folder / "model.safetensors")


def test_adapters_resume_with_the_base_of_the_source_model(tmp_path):
    """Contract 33: the checkpoint has the trainable weights alone; 2 + 2 steps are 4."""
    write_base(tmp_path / "base", 0.25)
    whole = adapters(tmp_path, total_steps=4)
    whole.fit()
    assert [name for name in read_manifest(tmp_path / "run" / "step-00000002").tensors if name.startswith("model/")] == ["model/1.weight"]
    resumed = adapters(tmp_path, total_steps=4)
    resumed.fit(resume=str(tmp_path / "run" / "step-00000002"))
    assert torch.equal(resumed.model[0].weight, torch.full((2, 2), 0.25))
    assert torch.equal(resumed.model[1].weight, whole.model[1].weight)


@pytest.mark.parametrize("where", ["base", "other"])
def test_a_changed_source_model_is_said(where, tmp_path, caplog):
    """Contract 33: other weights at the same place, and another place."""
    write_base(tmp_path / "base", 0.25)
    adapters(tmp_path, total_steps=2).fit()
    write_base(tmp_path / where, 0.75)
    with caplog.at_level(logging.WARNING, logger="trainer_kit"):
        adapters(tmp_path, total_steps=4, source_model=tmp_path / where).fit()
    assert "frozen_weights" in caplog.text


def test_other_settings_are_said_and_used(tmp_path, caplog):
    """Design decision 8: what is no part of the identity may change, and is printed."""
    for lr in (1.0, 0.5):
        quiet_trainer(
            Scalar(), MeanTask(), [t(1)] * 4, callbacks=[Checkpoint(tmp_path, every=2)], optimizer=SGD(lr=lr), total_steps=int(2 / lr)
        ).fit()
    assert "lr" in caplog.text and "1.0" in caplog.text and "0.5" in caplog.text


@pytest.fixture
def no_collection():
    """What exists already is out of sight, and nothing is collected."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def test_repeated_saves_leave_nothing_alive(no_collection, tmp_path):
    """B133: 20 saves; the number of live tensors is constant after the 2nd, without a garbage collection."""
    counts = []

    class Count(Callback):
        def on_step_start(self, event):
            counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))

    callbacks = [Count(), Checkpoint(tmp_path, every=1, keep_last=2, asynchronous=False)]
    data = [(torch.ones(2, 3), torch.ones(2, 1))] * 21
    quiet_trainer(nn.Linear(3, 1), SupervisedTask(nn.functional.mse_loss), data, callbacks=callbacks, optimizer=AdamW(lr=0.1)).fit()
    assert counts[2:] == [counts[2]] * 19
