"""Bad input through the public API: one table of cases, each with its error and the words that the message must contain.

A message says what was found, what was expected, and which argument to change. Every case runs beside a saved run (checkpoints, an
export, a log): afterwards each of those files is there, byte for byte. To add a case, write one line of the table.
"""

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support import MeanTask, Scalar, quiet_trainer, sgd
from trainer_kit import (
    AutoDataProvider,
    Callback,
    CausalLMTask,
    DataProvider,
    ForwardInputs,
    Loss,
    MeshStrategy,
    ModelProvider,
    SupervisedTask,
    Task,
    Trainer,
)
from trainer_kit.callbacks import (
    CSV,
    EMA,
    Checkpoint,
    EarlyStopping,
    Evaluate,
    GradientClipping,
    JSONLines,
    SpikeGuard,
    TensorBoard,
    Throughput,
)
from trainer_kit.exceptions import CheckpointError, ConfigurationError, ModelError, NonFiniteError, StateError, UnsupportedError
from trainer_kit.metrics import Mean
from trainer_kit.models import DecoderConfig
from trainer_kit.optim import SGD, AdamW, Muon, ParameterGroup, Piecewise, parse_optimizer
from trainer_kit.weights import IdentityMapper


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def make(model: Any = None, task: Any = None, data: Any = None, **settings: Any) -> Trainer:
    """A trainer in which everything that is not given is fine."""
    return quiet_trainer(Scalar() if model is None else model, task or MeanTask(), [t(1)] * 4 if data is None else data, **settings)


def resumed(folder: Path, **settings: Any) -> Trainer:
    """A trainer of the saved run of `folder`, with some settings changed."""
    settings = {"optimizer": AdamW(lr=0.1), "total_steps": 6, "callbacks": [Checkpoint(folder / "run", every=2)], **settings}
    return make(settings.pop("model", None), settings.pop("task", None), **settings)


def fit(*args: Any, **settings: Any) -> None:
    make(*args, **settings).fit()


def samples(count: int) -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.arange(float(count)))


class Calls(Callback):
    """Calls a function inside a step."""

    def __init__(self, act: Callable[[Trainer], Any]):
        self.act = act

    def on_forward_backward_end(self, event):
        self.act(event.trainer)


def inside_step(act: Callable[[Trainer], Any]) -> None:
    fit(callbacks=[Calls(act)])


def returning(loss: Callable[[torch.Tensor], Any]) -> Task:
    """A task whose loss is made from the model's output."""
    return type("Returning", (MeanTask,), {"compute_loss": lambda self, pipeline_results, state: loss(pipeline_results)})()


def feeding(inputs: Callable[[Any], Any]) -> Task:
    """A task whose forward inputs are made from the batch."""
    return type("Feeding", (MeanTask,), {"build_forward_inputs": lambda self, batch: inputs(batch)})()


def measuring(**metrics: Any) -> Task:
    """A task with these metrics."""
    return type("Measuring", (MeanTask,), {"metrics": lambda self: metrics})()


def two_terms() -> Task:
    """Two loss terms, and a metric with the name of one of them."""
    methods = {"compute_loss": lambda self, out, state: {"main": out, "aux": 2 * out}, "metrics": lambda self: {"aux": Mean()}}
    return type("Terms", (MeanTask,), methods)()


def owning(kind: str) -> Callable[[], nn.Module]:
    """Builds a model with a tensor that no reset gives a value."""

    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            if kind == "parameter":
                self.scale = nn.Parameter(torch.ones(3))
            else:
                self.register_buffer("scale", torch.ones(3), persistent=kind == "persistent")

    return lambda: nn.Sequential(nn.Linear(3, 3), Owner())


def frozen() -> nn.Module:
    return Scalar().requires_grad_(False)


def two_blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))


class Keeps(Callback):
    """Wants to save an object of its own."""

    def state_dict(self):
        return {"thing": object()}


class Typo(Callback):
    def on_step_ends(self, event): ...


class Provider(ModelProvider):
    def initialize_model_stage(self, ctx):
        return Scalar()


class NoPacks(DataProvider):
    """Yields something that is no pack."""

    def setup(self, context, seed): ...

    def packs(self, position):
        yield t(1)


class Unbound(Task):
    """Defines nothing."""


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)

    def forward(self, c):
        return self.table(c.long()).mean()


def full_disk(file, data):
    """Writes a part, as a file system does before it says that it is full."""
    file.write(bytes(memoryview(data).cast("B")[:10]))
    raise OSError(errno.ENOSPC, "No space left on device")


def on_full_disk(act: Callable[[], Any]) -> None:
    with mock.patch("trainer_kit.checkpoint.writer.write_all", full_disk), mock.patch("trainer_kit.weights.publish.write_all", full_disk):
        act()


def damage(folder: Path, kind: str, steps: tuple[int, ...] = (4,)) -> None:
    """What happened to the checkpoints of these steps before the case."""
    for step in steps:
        path = folder / "run" / f"step-{step:08d}"
        data, manifest = path / "rank-00000.safetensors", path / "manifest.json"
        if kind == "truncated":
            os.truncate(data, data.stat().st_size - 1)
        elif kind == "flipped":
            content = data.read_bytes()
            data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        elif kind == "unmarked":
            manifest.unlink()
        else:
            text = manifest.read_text()
            text = text[text.index('"manifest":') + len('"manifest":') : -1].replace("rank-00000.safetensors", "../rank-00000.safetensors")
            manifest.write_text(f'{{"crc32":{zlib.crc32(text.encode())},"manifest":{text}}}')


def torchrun(world_size: int, act: Callable[[], Any], **environment: str) -> None:
    given = {"WORLD_SIZE": str(world_size), "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with mock.patch.dict(os.environ, given | environment):
        act()


def closed(act: Callable[[Trainer], Any]) -> None:
    trainer = make()
    trainer.fit()
    trainer.close()
    act(trainer)


def write_pickle(folder: Path) -> Path:
    (folder / "pickled").mkdir()
    torch.save({"w": torch.ones(())}, folder / "pickled" / "model.bin")
    return folder / "pickled"


class Case(NamedTuple):
    """`act` gets the folder with the saved run. `before`: what happens to that folder first."""

    act: Callable[[Path], Any]
    error: type[Exception]
    words: tuple[str, ...]
    before: Callable[[Path], Any] | None = None


C, U, M, S, K = ConfigurationError, UnsupportedError, ModelError, StateError, CheckpointError

SETTINGS = {
    "unknown setting": Case(lambda f: make(totel_steps=3), C, ("totel_steps", "did you mean 'total_steps'")),
    "unknown key of config": Case(lambda f: make(config={"sed": 1}), C, ("sed", "did you mean 'seed'")),
    "setting twice": Case(lambda f: make(config={"seed": 1}, seed=1), C, ("seed", "config=", "once")),
    "config of a wrong type": Case(lambda f: make(config=3), C, ("config=", "int", "TrainerConfig")),
    "negative total_steps": Case(lambda f: make(total_steps=-1), C, ("total_steps=-1", "greater than or equal to 0")),
    "half a step": Case(lambda f: make(total_steps=2.5), C, ("total_steps=2.5", "integer")),
    "log_every=0": Case(lambda f: make(log_every=0), C, ("log_every=0", "greater than or equal to 1")),
    "epochs=0": Case(lambda f: make(epochs=0), C, ("epochs=0",)),
    "max_time=0": Case(lambda f: make(max_time=0), C, ("max_time=0", "greater than 0")),
    "negative seed": Case(lambda f: make(seed=-1), C, ("seed=-1",)),
    "seed of a wrong type": Case(lambda f: make(seed="nine"), C, ("seed='nine'", "integer")),
    "fp16": Case(lambda f: make(precision="fp16"), U, ("precision='fp16'", "bf16-mixed")),
    "fp16 mixed": Case(lambda f: make(precision="16-mixed"), U, ("precision='16-mixed'", "bf16-mixed")),
    "unknown precision": Case(lambda f: make(precision="fp8"), C, ("precision='fp8'", "'fp32'", "'bf16-mixed'")),
    "unknown policy": Case(lambda f: make(nonfinite="warn"), C, ("nonfinite='warn'", "'skip'")),
    "grad_dtype below the parameters": Case(
        lambda f: make(grad_dtype="bf16"), C, ("grad_dtype='bf16'", "precision='fp32'", "precision='bf16'")
    ),
    "adapters without a base": Case(lambda f: make(checkpoint_trainable_only=True), C, ("checkpoint_trainable_only", "source_model=")),
    "negative fast_dev_run": Case(lambda f: make(fast_dev_run=-3), C, ("fast_dev_run=-3", "number of steps")),
    "accumulate=0": Case(lambda f: make(accumulate=0), C, ("accumulate=0",)),
    "accumulate with a provider": Case(
        lambda f: make(data=AutoDataProvider(samples(4), 2), accumulate=2), C, ("accumulate=2", "AutoDataProvider", "global_batch_size=")
    ),
    "host syncs on a CPU": Case(
        lambda f: fit(detect_host_syncs=True, strategy=MeshStrategy(device="cpu")), C, ("detect_host_syncs", "CUDA", "cpu")
    ),
    "no blocks to recompute": Case(
        lambda f: fit(two_blocks(), activation_checkpointing=True), C, ("activation_checkpointing=True", "patterns")
    ),
    "no module of that name": Case(
        lambda f: fit(two_blocks(), activation_checkpointing=("layer*",)), C, ("activation_checkpointing", "'layer*'")
    ),
}

PARTS = {
    "task class": Case(lambda f: make(task=MeanTask), C, ("task=", "MeanTask", "instance, not the class")),
    "task function": Case(lambda f: make(task=nn.functional.mse_loss), C, ("task=", "trainer_kit.Task")),
    "strategy text": Case(lambda f: make(strategy="ddp"), C, ("strategy=", "'ddp'", "MeshStrategy")),
    "strategy class": Case(lambda f: make(strategy=MeshStrategy), C, ("strategy=", "instance")),
    "callback class": Case(lambda f: make(callbacks=[EMA]), C, ("callbacks=", "EMA", "instance, not the class")),
    "callback function": Case(lambda f: make(callbacks=[print]), C, ("callbacks=", "print", "trainer_kit.Callback")),
    "one callback": Case(lambda f: Trainer(Scalar(), MeanTask(), [1], callbacks=EMA()), C, ("callbacks=", "EMA", "list")),
    "callbacks None": Case(lambda f: Trainer(Scalar(), MeanTask(), [1], callbacks=None), C, ("callbacks=", "None", "list")),
    "unknown event": Case(lambda f: make(callbacks=[Typo()]), C, ("on_step_ends", "did you mean 'on_step_end'")),
    "equal state keys": Case(lambda f: make(callbacks=[EMA(), EMA()]), C, ("'EMA'", "state_key")),
    "optimizer instance": Case(
        lambda f: make(optimizer=torch.optim.SGD([nn.Parameter(t(1))])), C, ("optimizer=", "exists already", "lambda parameters")
    ),
    "optimizer class": Case(lambda f: make(optimizer=AdamW), C, ("optimizer=", "AdamW", "instance")),
    "optimizer text": Case(lambda f: make(optimizer="adamw"), C, ("optimizer=", "'adamw'", "AdamW(lr=3e-4)")),
    "optimizer of other parameters": Case(
        lambda f: fit(optimizer=lambda p: torch.optim.SGD([nn.Parameter(t(1))])), C, ("optimizer=", "not given", "only the parameters")
    ),
    "schedule instance": Case(
        lambda f: make(lr_scheduler=torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(t(1))]), 1)),
        C,
        ("lr_scheduler=", "StepLR", "lambda optimizer"),
    ),
    "schedule class": Case(lambda f: make(lr_scheduler=Piecewise), C, ("lr_scheduler=", "Piecewise")),
    "schedule by metric": Case(
        lambda f: fit(lr_scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)), U, ("ReduceLROnPlateau", "metric", "Piecewise")
    ),
    "schedule too long": Case(
        lambda f: fit(lr_scheduler=Piecewise().linear(1.0, steps=9), total_steps=3), C, ("9 steps", "total_steps=3", "percent=")
    ),
    "schedule without a segment": Case(lambda f: fit(lr_scheduler=Piecewise()), C, ("no segment", ".linear(")),
    "optimizer with a closure": Case(lambda f: fit(optimizer=lambda p: torch.optim.LBFGS(p)), U, ("LBFGS", "closure", "optimizer=")),
    "model text": Case(lambda f: make("llama"), C, ("model_provider=", "str", "nn.Module")),
    "model provider class": Case(lambda f: make(Provider), C, ("model_provider=", "Provider", "instance")),
    "model callable with arguments": Case(
        lambda f: make(lambda size, depth: nn.Linear(size, depth)), C, ("size, depth", "functools.partial")
    ),
    "model callable without return": Case(lambda f: fit(lambda: None), M, ("NoneType", "nn.Module", "return")),
    "loss function": Case(lambda f: SupervisedTask("mse"), C, ("loss_fn=", "'mse'", "callable")),
    "negative lr": Case(lambda f: AdamW(lr=-1), C, ("AdamW.lr", "-1")),
    "unknown optimizer setting": Case(lambda f: AdamW(learning_rate=1), C, ("learning_rate", "did you mean 'lr'")),
    "nested optimizer setting": Case(
        lambda f: parse_optimizer({"name": "adamw", "lerning_rate": 1}, "optim"), C, ("optim.lerning_rate", "learning_rate", "'lr'")
    ),
    "pattern without a parameter": Case(
        lambda f: fit(optimizer=AdamW(groups=(ParameterGroup(pattern="head.*", lr=1),))), C, ("'head.*'", "groups[0]", "valid names: w")
    ),
    "Muon without a matrix": Case(lambda f: fit(optimizer=Muon()), C, ("Muon", "matrices", "AdamW")),
    "decoder sizes": Case(
        lambda f: DecoderConfig(vocab_size=8, num_layers=1, num_heads=3, hidden_size=8), C, ("hidden_size=8", "num_heads=3")
    ),
    "EMA decay": Case(lambda f: EMA(1.5), C, ("EMA(decay=1.5)", "below 1")),
    "clipping without a limit": Case(lambda f: GradientClipping(), C, ("max_norm=", "max_value=")),
    "checkpoints never": Case(lambda f: Checkpoint(f / "c", every=0), C, ("every=0", "at least 1")),
    "best by an unknown mode": Case(
        lambda f: Checkpoint(f / "c", every=1, best=("val/loss", "smallest", 1)), C, ("'smallest'", "'min'", "'max'")
    ),
    "best in short": Case(lambda f: Checkpoint(f / "c", every=1, best="val/loss"), C, ("best='val/loss'", "('val/loss', 'min', 1)")),
    "unknown file system": Case(lambda f: Checkpoint("gss://bucket/run", every=1), C, ("gss://", "local path")),
    "remote log": Case(lambda f: JSONLines("s3://bucket/log.jsonl"), C, ("s3://", "local path")),
    "log to no path": Case(lambda f: TensorBoard(None), C, ("TensorBoard(folder=None)", "path")),
    "evaluation of nothing": Case(lambda f: Evaluate(None), C, ("data=None", "DataLoader")),
    "evaluation never": Case(lambda f: Evaluate([1], at_end=False), C, ("never evaluates", "every=None")),
    "patience": Case(lambda f: EarlyStopping(patience=0), C, ("patience=0", "at least 1")),
    "unknown action": Case(lambda f: SpikeGuard(action="halt"), C, ("'halt'", "'stop'")),
    "peak without FLOPs": Case(lambda f: Throughput(peak_flops=1e12), C, ("peak_flops=", "flops_per_token=")),
}

MESH = {
    "unknown degree": Case(lambda f: MeshStrategy(dp_sharde=2), C, ("dp_sharde", "did you mean 'dp_shard'")),
    "degree 0": Case(lambda f: MeshStrategy(tp=0), C, ("tp=0", "positive")),
    "two free degrees": Case(lambda f: fit(strategy=MeshStrategy(dp_shard=-1, dp_replicate=-1)), C, ("dp_replicate, dp_shard", "-1")),
    "a free degree of another kind": Case(
        lambda f: fit(strategy=MeshStrategy(tp=-1, dp_replicate=1)), C, ("tp", "dp_replicate and dp_shard")
    ),
    "B144": Case(
        lambda f: torchrun(2, lambda: fit(strategy=MeshStrategy(dp_replicate=1, tp=2, pp=2))),
        C,
        ("tp 2", "pp 2", "4", "world has 2", "torchrun"),
    ),
    "more than there is": Case(lambda f: fit(strategy=MeshStrategy(dp_shard=8)), C, ("dp_shard 8", "world has 1 rank")),
    "experts on one rank": Case(lambda f: fit(strategy=MeshStrategy(ep=2)), C, ("ep=2", "leave it at 1")),
    "ranks without a launcher": Case(
        lambda f: torchrun(2, lambda: fit(strategy=MeshStrategy()), MASTER_PORT=""), C, ("WORLD_SIZE=2", "MASTER_PORT", "torchrun")
    ),
    "absent device": Case(lambda f: fit(strategy=MeshStrategy(device="xpu")), C, ("device='xpu'", "not available", "cpu")),
    "device that is none": Case(lambda f: fit(strategy=MeshStrategy(device="gpu")), C, ("device='gpu'", "no torch device")),
}

DATA = {
    "no data": Case(lambda f: Trainer(Scalar(), MeanTask(), None), C, ("data=", "NoneType", "DataLoader")),
    "data function": Case(lambda f: make(data=lambda: [t(1)]), C, ("data=", "function", "call the function")),
    "data set as microbatches": Case(lambda f: make(data=samples(4)), C, ("data=", "TensorDataset", "global_batch_size")),
    "empty data set": Case(lambda f: fit(data=AutoDataProvider([], 2)), C, ("dataset= is empty", "0 samples")),
    "empty iterable": Case(lambda f: fit(data=[]), C, ("no pack", "empty")),
    "empty loader": Case(lambda f: fit(data=torch.utils.data.DataLoader([], 2), epochs=2), C, ("no pack", "empty")),
    "empty iterable, some steps": Case(lambda f: fit(data=[], total_steps=3), C, ("no pack", "empty")),
    "batch on ranks": Case(lambda f: AutoDataProvider(samples(8), 8, 16), C, ("global_batch_size=8", "microbatch_size=16")),
    "batch that does not divide": Case(
        lambda f: AutoDataProvider(samples(8), 6, 4), C, ("global_batch_size=6", "microbatch_size=4", "multiple")
    ),
    "batch size 0": Case(lambda f: AutoDataProvider(samples(8), 0), C, ("global_batch_size=", "0", "at least 1")),
    "only batch dropped": Case(
        lambda f: fit(data=AutoDataProvider(samples(3), 4, drop_last=True)), C, ("3 samples", "global_batch_size=4", "drop_last=False")
    ),
    "iterable as data set": Case(lambda f: AutoDataProvider(iter([1]), 2), C, ("dataset=", "__getitem__", "data=iterable")),
    "mapping as data set": Case(lambda f: AutoDataProvider({"x": t(1)}, 1), C, ("dataset=", "['x']", "TensorDataset")),
    "collate": Case(lambda f: AutoDataProvider(samples(4), 2, collate_fn=3), C, ("collate_fn=", "3", "function")),
    "unknown length": Case(lambda f: fit(data=(t(1) for _ in range(3))), C, ("total_steps=", "epochs=", "max_time=")),
    "packs that are none": Case(lambda f: fit(data=NoPacks(), total_steps=1), C, ("NoPacks.packs", "Tensor", "Pack")),
    "batch of another form": Case(
        lambda f: fit(nn.Linear(1, 1), SupervisedTask(nn.functional.mse_loss), [{"x": t(1), "y": t(1)}]),
        C,
        ("['x', 'y']", "inputs=", "targets="),
    ),
    "tokens of another form": Case(lambda f: fit(task=CausalLMTask(), data=[t(1)]), C, ("(batch, length)", "(1,)")),
    "evaluation of no data": Case(lambda f: make().evaluate([]), C, ("no pack", "empty data")),
    "evaluation of weight 0": Case(lambda f: make().evaluate([t()]), C, ("evaluate(data)", "no sample that counts")),
    "evaluation of a data set": Case(lambda f: make().evaluate(samples(2)), C, ("TensorDataset", "AutoDataProvider")),
}

MODEL = {
    "parameter without a reset": Case(lambda f: fit(owning("parameter"), task=MeanTask()), M, ("1.scale", "Owner", "reset_parameters")),
    "buffer without a reset": Case(lambda f: fit(owning("persistent")), M, ("1.scale", "Owner", "reset_parameters")),
    "table without a reset": Case(lambda f: fit(owning("not persistent")), M, ("1.scale", "Owner", "reset_parameters")),
    "lazy callable": Case(lambda f: fit(lambda: nn.LazyLinear(2)), M, ("weight", "lazy", "nn.Linear")),
    "lazy instance": Case(lambda f: fit(nn.LazyLinear(2)), M, ("weight", "lazy", "nn.Linear")),
    "instance on meta": Case(lambda f: fit(nn.Linear(1, 1, device="meta")), M, ("weight", "meta device", "callable")),
    "nothing to train": Case(lambda f: fit(frozen()), M, ("no trainable parameter", "requires_grad_(True)")),
    "sparse gradient": Case(lambda f: fit(Sparse()), M, ("'table.weight'", "sparse=False")),
    "shared inputs": Case(
        lambda f: fit(task=feeding(lambda b: ForwardInputs(inputs=b, shared=b))), M, ("shared=", "Scalar", "forward(self, inputs, shared)")
    ),
    "loss of several elements": Case(lambda f: fit(task=returning(lambda out: out.expand(3))), M, ("shape (3,)", "scalar", "compute_loss")),
    "loss without a graph": Case(lambda f: fit(task=returning(lambda out: out.detach())), M, ("no graph", "detach()")),
    "loss as a number": Case(lambda f: fit(task=returning(lambda out: 3.0)), M, ("float", "scalar tensor", "compute_loss")),
    "no loss": Case(lambda f: fit(task=returning(lambda out: None)), M, ("NoneType", "compute_loss")),
    "weight twice": Case(lambda f: fit(task=returning(lambda out: Loss(out, 1))), C, ("ForwardInputs.weight", "Loss", "once")),
    "negative weight": Case(lambda f: fit(task=feeding(lambda b: ForwardInputs(inputs=b, weight=-1))), C, ("weight", "-1", "not negative")),
    "inputs that are none": Case(lambda f: fit(task=feeding(lambda b: b)), C, ("build_forward_inputs", "Tensor", "ForwardInputs(inputs=")),
    "task without methods": Case(lambda f: fit(task=Unbound()), NotImplementedError, ("Unbound", "build_forward_inputs")),
    "metric named loss": Case(lambda f: fit(task=measuring(loss=Mean())), C, ("'loss'", "metrics()", "rename")),
    "metric named as a loss term": Case(lambda f: fit(task=two_terms(), log_every=1), C, ("'aux'", "metrics()", "rename")),
    "metric class": Case(lambda f: fit(task=measuring(mean=Mean)), C, ("'mean'", "instance", "Mean()")),
    "metric that is none": Case(lambda f: fit(task=measuring(mean=3)), C, ("'mean'", "update, compute, reset")),
    "weight as a text": Case(lambda f: fit(task=feeding(lambda b: ForwardInputs(inputs=b, weight="1"))), C, ("weight", "'1'", "number")),
    "metrics without a return": Case(
        lambda f: fit(task=type("Forgets", (MeanTask,), {"metrics": lambda self: None})()), C, ("Forgets.metrics()", "None")
    ),
    "gradient of inf": Case(lambda f: fit(data=[t(1), t(float("inf"))]), NonFiniteError, ("step 1", "'w'", "nonfinite='skip'")),
}

CALLS = {
    "log of a text": Case(lambda f: make().log("x", "high"), C, ("log('x'", "str", "number")),
    "log of a vector": Case(lambda f: make().log("x", t(1, 2)), C, ("log('x'", "(2,)", "one element")),
    "unknown request": Case(lambda f: make().request("sav"), C, ("'sav'", "'save'", "'evaluate'")),
    "request with an unknown argument": Case(lambda f: make().request("save", folder="x"), C, ("request('save'", "folder", "path")),
    "request in a step with an unknown argument": Case(
        lambda f: inside_step(lambda tr: tr.request("save", folder="x")), C, ("request('save'", "folder", "path")
    ),
    "request of an evaluation without data": Case(lambda f: make().request("evaluate"), C, ("request('evaluate'", "data=")),
    "event that is none": Case(lambda f: make().emit("step_end"), C, ("emit", "str", "Event")),
    "metric named loss in an evaluation": Case(
        lambda f: make().evaluate([t(1)], task=measuring(loss=Mean())), C, ("'loss'", "metrics()", "rename")
    ),
    "evaluation with a task class": Case(lambda f: make().evaluate([t(1)], task=MeanTask), C, ("task=", "MeanTask", "instance")),
    "save to nowhere": Case(lambda f: make().save_checkpoint(), C, ("no Checkpoint callback", "path")),
    "evaluate in a step": Case(
        lambda f: inside_step(lambda tr: tr.evaluate([t(1)])), S, ("evaluate() inside a step", "trainer.request('evaluate'")
    ),
    "predict in a step": Case(lambda f: inside_step(lambda tr: tr.predict([t(1)])), S, ("predict() inside a step", "after fit()")),
    "export in a step": Case(lambda f: inside_step(lambda tr: tr.export(f / "export")), S, ("export() inside a step", "after fit()")),
    "load in a step": Case(
        lambda f: inside_step(lambda tr: tr.load_checkpoint(f / "run" / "step-00000004")), S, ("load_checkpoint() inside a step", "resume=")
    ),
    "fit in a fit": Case(lambda f: inside_step(lambda tr: tr.fit()), S, ("fit() inside fit()", "stop()")),
    "stop outside of a fit": Case(lambda f: make().stop("no"), S, ("stop()", "outside of fit()")),
    "model before the build": Case(lambda f: make().model, S, ("not built", "build()")),
    "fit of a closed trainer": Case(lambda f: closed(lambda tr: tr.fit(9)), S, ("closed", "new one")),
    "export of a closed trainer": Case(lambda f: closed(lambda tr: tr.export(f / "new")), S, ("closed", "new one")),
    "negative length of a fit": Case(lambda f: make().fit(-2), C, ("total_steps=-2", "not negative")),
    "length of a fit as a text": Case(lambda f: make().fit("10"), C, ("total_steps='10'", "number of steps")),
}

SAVED = {
    "resume by an unknown word": Case(lambda f: resumed(f).fit(resume="nevr"), K, ("nevr", "resume=", "'never'")),
    "resume of a wrong type": Case(lambda f: resumed(f).fit(resume=True), C, ("resume=True", "'auto'", "'never'")),
    "absent checkpoint": Case(lambda f: resumed(f).fit(resume=str(f / "run" / "step-00000009")), K, ("step-00000009", "does not exist")),
    "an export as a checkpoint": Case(
        lambda f: resumed(f).fit(resume=str(f / "export")), K, ("export", "manifest.json", "no training checkpoint")
    ),
    "truncated checkpoint": Case(
        lambda f: resumed(f).fit(resume=str(f / "run" / "step-00000004")),
        K,
        ("step-00000004/rank-00000.safetensors", "truncated"),
        lambda f: damage(f, "truncated"),
    ),
    "altered checkpoint": Case(
        lambda f: resumed(f).fit(resume=str(f / "run" / "step-00000004")),
        K,
        ("step-00000004/rank-00000.safetensors", "CRC-32"),
        lambda f: damage(f, "flipped"),
    ),
    "unfinished checkpoint": Case(
        lambda f: resumed(f).fit(resume=str(f / "run" / "step-00000004")),
        K,
        ("step-00000004", "incomplete"),
        lambda f: damage(f, "unmarked"),
    ),
    "hostile checkpoint": Case(
        lambda f: resumed(f).fit(resume=str(f / "run" / "step-00000004")),
        K,
        ("../rank-00000.safetensors", "inside the folder"),
        lambda f: damage(f, "hostile"),
    ),
    "no checkpoint that is whole": Case(
        lambda f: resumed(f).fit(), K, ("step-00000002", "step-00000004", 'resume="never"'), lambda f: damage(f, "truncated", (2, 4))
    ),
    "another seed": Case(lambda f: resumed(f, seed=5).fit(), K, ("another run", "seed: 0", "5 now", "seed=")),
    "another run name": Case(lambda f: resumed(f, run_name="b").fit(), K, ("another run", "'run'", "'b' now", "run_name=")),
    "another model": Case(lambda f: resumed(f, model=nn.Linear(1, 1)).fit(), K, ("another run", "parameters", "same model")),
    "another optimizer": Case(lambda f: resumed(f, optimizer=SGD(momentum=0.9)).fit(), K, ("AdamW", "SGD", "optimizer=")),
    "optimizer without moments": Case(lambda f: resumed(f, optimizer=sgd()).fit(), K, ("AdamW", "SGD", "optimizer=")),
    "unknown part": Case(
        lambda f: resumed(f).load_checkpoint(f / "run" / "step-00000004", parts=["optim"]), C, ("'optim'", "did you mean 'optimizer'")
    ),
    "full disk": Case(
        lambda f: on_full_disk(lambda: resumed(f, callbacks=[Checkpoint(f / "run", every=2, asynchronous=False)]).fit()),
        K,
        ("step 6", "No space left", "bytes", "keep_last="),
    ),
    "full disk in the background": Case(lambda f: on_full_disk(lambda: resumed(f).fit()), K, ("step 6", "No space left", "keep_last=")),
    "full disk at an export": Case(
        lambda f: on_full_disk(lambda: resumed(f).export(f / "export")), K, ("export", "No space left", "bytes", "is kept")
    ),
    "checkpoints in a file": Case(lambda f: fit(callbacks=[Checkpoint(f / "notes.txt", every=1)]), K, ("notes.txt", "step 1")),
    "state that is no data": Case(
        lambda f: resumed(f, callbacks=[Keeps(), Checkpoint(f / "run", every=2)]).fit(),
        K,
        ("callbacks/Keeps/thing", "object", "state_dict"),
    ),
    "a log of another kind": Case(lambda f: fit(callbacks=[CSV(f / "log.jsonl")]), C, ("log.jsonl, line 1", "another path")),
    "export over other weights": Case(lambda f: resumed(f).export(f / "foreign"), K, ("foreign", "model.safetensors", "new folder")),
    "export over other files": Case(lambda f: resumed(f).export(f), K, ("notes.txt", "new folder")),
    "export to a file": Case(lambda f: resumed(f).export(f / "model.safetensors"), K, ("model.safetensors", "folder")),
    "shards of no size": Case(lambda f: resumed(f).export(f / "export", max_shard_size="4 gigs"), C, ("max_shard_size='4 gigs'", "4GB")),
    "export as integers": Case(lambda f: resumed(f).export(f / "export", dtype=torch.int8), C, ("dtype=torch.int8", "floating-point")),
    "export as a text": Case(lambda f: resumed(f).export(f / "export", dtype="bf16"), C, ("dtype='bf16'", "floating-point")),
    "mapper function": Case(lambda f: resumed(f).export(f / "export", mapper=print), C, ("mapper=", "StateMapper")),
    "mapper of another model": Case(lambda f: resumed(f).export(f / "export", mapper=IdentityMapper(["v"])), M, ("mapper", "v")),
    "weights that are absent": Case(lambda f: fit(source_model=f / "nothing"), K, ("nothing", "model.safetensors")),
    "weights as a pickle": Case(lambda f: fit(source_model=str(write_pickle(f))), K, ("model.bin", "pickled", "safetensors")),
    "weights of another model": Case(
        lambda f: fit(nn.Linear(1, 1), source_model=f / "export"), K, ("'weight'", "missing", "'w'", "unexpected")
    ),
}

CASES = {**SETTINGS, **PARTS, **MESH, **DATA, **MODEL, **CALLS, **SAVED}


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A run with checkpoints of steps 2 and 4, its export and log; weights of somebody else; notes."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = resumed(folder, total_steps=4, callbacks=[Checkpoint(folder / "run", every=2), JSONLines(folder / "log.jsonl")])
    trainer.fit()
    trainer.export(folder / "export")
    (folder / "foreign").mkdir()
    from safetensors.torch import save_file

    save_file({"theirs": t(1)}, folder / "foreign" / "model.safetensors")
    (folder / "notes.txt").write_text("mine")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_a_clear_error_and_nothing_saved_is_lost(name, saved_run, tmp_path):
    """B59 (fp16 is refused), B142, B144, B146 and the rest of the table. Contract 31: what was saved stays."""
    case, folder = CASES[name], tmp_path / "saved"
    shutil.copytree(saved_run, folder)
    if case.before is not None:
        case.before(folder)
    before = contents(folder)
    with pytest.raises(case.error) as caught:
        case.act(folder)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert [word for word in case.words if word not in text] == [], text
    after = contents(folder)
    lost = [path for path in before if after.get(path) != before[path] and not path.endswith(".previous")]
    assert lost == []


def test_the_table_is_long_enough():
    assert len(CASES) >= 60 and len(CASES) == sum(map(len, (SETTINGS, PARTS, MESH, DATA, MODEL, CALLS, SAVED)))


# What only the model, the device or the length of the run can tell; the rest is wrong by itself.
NEEDS_A_BUILD = {
    "host syncs on a CPU", "no blocks to recompute", "no module of that name", "optimizer of other parameters", "schedule by metric",
    "schedule too long", "schedule without a segment", "model callable without return", "pattern without a parameter",
    "Muon without a matrix", "optimizer with a closure",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in (*SETTINGS, *PARTS) if name not in NEEDS_A_BUILD])
def test_wrong_settings_fail_before_anything_is_built(name, tmp_path):
    """Design section 2: the constructor validates and builds nothing, so that no process group and no model exist by then."""
    case = CASES[name]
    with mock.patch.object(MeshStrategy, "build", side_effect=AssertionError("built")), pytest.raises(case.error):
        case.act(tmp_path)


def test_a_damaged_newest_checkpoint_is_passed_over(saved_run, tmp_path):
    """B23: "auto" goes on from the one before, and says what it left out."""
    shutil.copytree(saved_run, tmp_path / "saved")
    damage(tmp_path / "saved", "truncated")
    starts = []

    class Look(Callback):
        def on_fit_start(self, event):
            starts.append(event.trainer.step)

    with pytest.warns(UserWarning, match="step-00000004"):
        resumed(tmp_path / "saved", callbacks=[Look(), Checkpoint(tmp_path / "saved" / "run", every=2)]).fit()
    assert starts == [2]


def test_the_disk_is_full_and_then_it_is_not(saved_run, tmp_path):
    """Contract 31, B43: what was there loads after a failed save, and the run goes on when there is space."""
    shutil.copytree(saved_run, tmp_path / "saved")
    with pytest.raises(CheckpointError):
        on_full_disk(lambda: resumed(tmp_path / "saved").fit())
    assert sorted(p.name for p in (tmp_path / "saved" / "run").iterdir()) == ["step-00000002", "step-00000004"]
    again = resumed(tmp_path / "saved")
    again.fit()
    assert again.step == 6
    assert json.loads((tmp_path / "saved" / "log.jsonl").read_text().splitlines()[-1])["step"] == 4
