"""Small parts of jobs on ranks: data that says what each data rank holds, a model with one weight, and a quiet trainer on a mesh."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support import quiet_trainer
from trainer_kit import DataProvider, ForwardInputs, MeshStrategy, Task, Trainer
from trainer_kit.data import Pack
from trainer_kit.metrics import Mean

MESHES: dict[str, dict[str, int]] = {
    "replicate": {"dp_replicate": 2},
    "fsdp": {"dp_shard": 2},
    "tp": {"tp": 2},
}


def t(*values: float) -> torch.Tensor:
    """A microbatch of so many samples."""
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


class Parts(DataProvider):
    """The packs of each data rank: `parts[data_rank]` is a list of packs, a pack a list of microbatches."""

    def __init__(self, *parts: list[list[torch.Tensor]]) -> None:
        self.parts = parts

    def setup(self, context: Any, seed: int) -> None:
        self.own = self.parts[context.data_rank]

    def packs(self, position: Any) -> Any:
        for index, pack in enumerate(self.own):
            yield Pack(pack, (position or {}).get("epoch", 0), None, index + 1 == len(self.own))

    def num_packs(self) -> int | None:
        return len(self.own)


class Weight(nn.Module):
    """One weight of 1, in a matrix that FSDP can cut and tensor parallelism can leave: the output is w * c for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.layer.weight)

    def forward(self, c: torch.Tensor) -> torch.Tensor:
        return self.layer(c)

    def tensor_plan(self, num_ranks: int) -> dict[str, str]:
        return {}


class MeanOutput(Task):
    """The loss is the mean output, weighed by the number of samples; the metric is the mean of the samples themselves."""

    def build_forward_inputs(self, batch: torch.Tensor) -> ForwardInputs:
        return ForwardInputs(inputs=batch, state=batch, weight=len(batch))

    def compute_loss(self, pipeline_results: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return pipeline_results.mean()

    def metrics(self) -> dict[str, Any]:
        return {"mean": Mean()}

    def update_metrics(self, metrics: dict[str, Any], pipeline_results: torch.Tensor, state: torch.Tensor) -> None:
        metrics["mean"].update(state)


def on_mesh(model: Any, task: Task, data: Any, degrees: dict[str, int], **settings: Any) -> Trainer:
    """A quiet trainer on a mesh of CPU ranks."""
    settings.setdefault("log_every", 1)
    return quiet_trainer(model, task, data, strategy=MeshStrategy(device="cpu", **{"dp_replicate": 1, **degrees}), **settings)


def delay_saves(trainer: Trainer, wait: Callable[[], None]) -> None:
    """Every save of the trainer first waits, where it writes: in the background, if it is a background save."""
    make = trainer._saver._make

    def slow(*args: Any) -> Any:
        save = make(*args)
        write = save.write
        save.write = lambda: (wait(), write())
        return save

    trainer._saver._make = slow


def weight_of(trainer: Trainer) -> list[float]:
    """All elements that this rank holds."""
    return [value for row in trainer.parameters for value in row.local.detach().flatten().tolist()]
