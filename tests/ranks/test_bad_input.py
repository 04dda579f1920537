"""Bad input on ranks: an error on every rank, before the first step, after which the process goes on."""

import torch
from torch import nn

from tests.ranks.support import MESHES, MeanOutput, Parts, Weight, on_mesh, t
from trainer_kit import Callback, MeshStrategy, ModelProvider, Trainer
from trainer_kit.exceptions import CheckpointError, ConfigurationError, ModelError, StateError, TrainerKitError
from trainer_kit.optim import AdamW
from trainer_kit.parallel import parallelize_fsdp, parallelize_replicate
from trainer_kit.testing import run_on_ranks


def data() -> Parts:
    return Parts(*([[t(1)]] * 3 for _ in range(2)))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.forgotten = nn.Linear(1, 2), nn.Linear(2, 1)

    def forward(self, c: torch.Tensor) -> torch.Tensor:
        return self.forgotten(self.seen(c))


class Forgets(ModelProvider):
    """Distributes one of two layers."""

    def __init__(self, function) -> None:
        self.function = function

    def initialize_model_stage(self, ctx):
        return Two()

    def parallelize_model_stage(self, ctx):
        mesh = ctx.mesh("dense")["dp_replicate" if self.function is parallelize_replicate else "dp_cp_shard"]
        self.function(ctx.module.seen, mesh)


class Unreducible(ModelProvider):
    """A parameter whose parts are to be added up, which is no way to hold a parameter."""

    def initialize_model_stage(self, ctx):
        return Weight()

    def parallelize_model_stage(self, ctx):
        from torch.distributed.tensor import DTensor, Partial

        layer = ctx.module.layer
        mesh = ctx.mesh("dense")["dp_replicate"]
        layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), mesh, [Partial()]))


class StepCount(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_start(self, event):
        self.steps += 1


def attempt(make, fit=lambda trainer: trainer.fit()):
    """What the fit of a trainer raises, and how many steps were begun."""
    count, trainer = StepCount(), None
    try:
        trainer = make(count)
        fit(trainer)
        found = ("", "")
    except TrainerKitError as error:
        found = (type(error).__name__, str(error))
    finally:
        if trainer is not None:
            trainer.close()
    return *found, count.steps


def usual(count, degrees=MESHES["replicate"], model=None, **settings):
    return on_mesh(Weight() if model is None else model, MeanOutput(), data(), degrees, callbacks=[count], **settings)


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, c: torch.Tensor) -> torch.Tensor:
        return self.layer(c)


def job_bad_input(folder):
    import torch.distributed as dist

    rank = dist.get_rank()
    kept = usual(StepCount(), optimizer=AdamW(lr=0.1))
    kept.fit()
    kept.save_checkpoint(f"{folder}/step-00000003")
    kept.close()
    found = {
        "degrees": attempt(lambda count: usual(count, {"dp_shard": 3})),
        "plain in replicate": attempt(lambda count: usual(count, model=Forgets(parallelize_replicate))),
        "plain in fsdp": attempt(lambda count: usual(count, MESHES["fsdp"], model=Forgets(parallelize_fsdp))),
        "partial": attempt(lambda count: usual(count, model=Unreducible())),
        "seed": attempt(lambda count: usual(count, seed=rank)),
        "lr": attempt(lambda count: usual(count, optimizer=AdamW(lr=0.1 * (1 + rank)))),
        "total_steps": attempt(lambda count: usual(count, total_steps=2 + rank)),
        "fit(total_steps)": attempt(usual, lambda trainer: trainer.fit(2 + rank)),
        "callbacks": attempt(lambda count: on_mesh(Weight(), MeanOutput(), data(), MESHES["replicate"], callbacks=[count] * (1 - rank))),
        "another model": attempt(
            lambda count: usual(count, model=Other(), optimizer=AdamW(lr=0.1)),
            lambda trainer: trainer.fit(resume=f"{folder}/step-00000003"),
        ),
        "no such checkpoint": attempt(usual, lambda trainer: trainer.fit(resume=f"{folder}/step-00000009")),
    }
    found["at last"] = attempt(usual)
    return found


EXPECTED = {
    "degrees": (ConfigurationError, "dp_shard 3", "the world has 2 ranks"),
    "plain in replicate": (ModelError, "'forgotten.weight'", "parallelize_model_stage"),
    "plain in fsdp": (ModelError, "'forgotten.weight'", "parallelize_model_stage"),
    "partial": (ModelError, "'layer.weight'"),
    "seed": (ConfigurationError, "trainer.seed: 0 on rank 0, 1 on rank 1"),
    "lr": (ConfigurationError, "optimizer.lr: 0.1 on rank 0, 0.2 on rank 1"),
    "total_steps": (ConfigurationError, "trainer.total_steps: 2 on rank 0, 3 on rank 1"),
    "fit(total_steps)": (StateError, "total_steps=2, resume='auto' on rank 0", "total_steps=3, resume='auto' on rank 1"),
    "callbacks": (ConfigurationError, "callbacks: ", "StepCount"),
    "another model": (CheckpointError, "the model has other parameters (names or shapes) than the saved one"),
    "no such checkpoint": (CheckpointError, "step-00000009"),
}


def test_bad_input_is_an_error_on_every_rank_before_the_first_step(tmp_path):
    """Contracts 6, 9 and 41, design decision 8: long before a timeout, and the next trainer works."""
    for of_rank in run_on_ranks(2, job_bad_input, str(tmp_path), timeout=30.0):
        assert of_rank.pop("at last") == ("", "", 3)
        assert of_rank.keys() == EXPECTED.keys()
        for name, (kind, text, num_steps) in of_rank.items():
            expected, *parts = EXPECTED[name]
            assert kind == expected.__name__ and num_steps == 0, (name, kind, text)
            for part in parts:
                assert part in text, (name, text)


def job_same_settings():
    """Settings that look different on each rank, and are not."""
    import torch.distributed as dist

    rank = dist.get_rank()
    task = MeanOutput()
    task.hparams = lambda: {"numbers": set([8, 0] if rank else [0, 8]), "object": object()}
    strategy = MeshStrategy(dp_replicate=2, device=f"cpu:{rank}")
    trainer = Trainer(Weight(), task, data(), strategy, total_steps=1)
    trainer.build()
    trainer.close()


def test_settings_that_only_look_different_are_the_same():
    """A set has another order in each process, an object another address, and each rank its own device."""
    run_on_ranks(2, job_same_settings)
