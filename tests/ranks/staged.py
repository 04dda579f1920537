"""A model in stages with something of everything that a checkpoint holds, its task, and layouts: parts of jobs on ranks of a pipeline."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.support import quiet_trainer
from trainer_kit import AutoDataProvider, ForwardInputs, MeshStrategy, StageInfo, Task, Trainer
from trainer_kit.metrics import Mean, Sum
from trainer_kit.model import distribute_layers

WIDTH, NUM_LAYERS = 6, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "1f1b": {"pp": 2},
    "zbv": {"pp": 2, "pipeline": "zbv"},  # the first and the last stage on rank 0
    "interleaved": {"pp": 2, "pipeline": "interleaved_1f1b", "stages_per_rank": 2},
    "shard": {"pp": 2, "dp_shard": 2},
    "shard pack": {"pp": 2, "dp_shard": 2, "fsdp_sync": "pack", "pipeline": "zb1p"},
    "zbv shard": {"pp": 2, "dp_shard": 2, "fsdp_sync": "pack", "pipeline": "zbv"},
    "replicate": {"pp": 2, "dp_replicate": 2},
}


def num_ranks(layout: str) -> int:
    """Ranks of a layout."""
    degrees = LAYOUTS[layout]
    return degrees.get("pp", 1) * degrees.get("dp_shard", 1) * degrees.get("dp_replicate", 1)


class Layer(nn.Module):
    """A residual layer. It counts its calls in the training, as extra state: a number, and a tensor that is there from the first call on;
    and it adds up its inputs in a buffer, which data ranks do differently."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.calls, self.seen = 0, None
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.seen = torch.tensor([float(self.calls)])
            self.total += x.detach().mean()
        return x + self.dropout(torch.tanh(self.linear(x)))

    def get_extra_state(self) -> Any:
        return [self.calls, self.seen]

    def reset_parameters(self) -> None:
        self.total.zero_()

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.seen = state


class Net(nn.Module):
    """The layers of one stage. tie: the head is the embedding, and another pair, which the two stages have in another order.

    frozen: what the names of frozen parameters begin with.
    """

    def __init__(self, stage: StageInfo | None = None, *, dropout: float = 0.0, tie: bool = False, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.stage, self.tie = stage or StageInfo(), tie
        if self.stage.is_first:
            self.embedding, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        numbers = distribute_layers(NUM_LAYERS, self.stage.num_stages)[self.stage.index]
        self.layers = nn.ModuleDict({str(number): Layer(dropout) for number in numbers})
        if self.stage.is_last:
            self.back, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            if tie and self.stage.is_first:
                self.head.weight, self.back.weight = self.embedding.weight, self.scale.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))

    def tied_parameters(self) -> dict[str, str]:
        is_tie = self.tie and self.stage.is_last and not self.stage.is_first
        return {"back.weight": "scale.weight", "head.weight": "embedding.weight"} if is_tie else {}

    def forward(self, inputs: torch.Tensor, shared: Any = None) -> torch.Tensor:
        x = self.embedding(self.scale(inputs)) if self.stage.is_first else inputs
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.back(x)) if self.stage.is_last else x

    def stage_transfer_spec(self, inputs: Any, boundary: str) -> torch.Tensor:
        dtype = next(self.parameters()).dtype
        return torch.empty(inputs.shape, dtype=dtype, device="meta")


class Regression(Task):
    """Counts the losses that it computes, which happens on the last stage alone: as a number and as a tensor."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, torch.zeros(1)

    def build_forward_inputs(self, batch: torch.Tensor) -> ForwardInputs:
        return ForwardInputs(inputs=batch, state=batch, weight=len(batch))

    def compute_loss(self, pipeline_results: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen = self.seen + 1
        return F.mse_loss(pipeline_results.float(), state.flip(1).float())

    def metrics(self) -> dict[str, Any]:
        return {"mean": Mean(), "count": Sum()}

    def update_metrics(self, metrics: dict[str, Any], pipeline_results: torch.Tensor, state: torch.Tensor) -> None:
        metrics["mean"].update(pipeline_results.double())
        metrics["count"].update(torch.ones(len(state)))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls, self.seen = state["calls"], state["seen"]


class Samples(torch.utils.data.Dataset):
    """20 samples that are functions of their number. An epoch has packs of 4, 4 and 2 microbatches of 2."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def staged(layout: str, *callbacks: Any, model: dict[str, Any] | None = None, task: Task | None = None, **settings: Any) -> Trainer:
    """A quiet trainer of `Net` on a layout. model: arguments of `Net`."""
    strategy = MeshStrategy(device="cpu", **({"dp_replicate": 1} | LAYOUTS[layout]))
    data = AutoDataProvider(Samples(), 8, 2, shuffle=True)
    settings = {"total_steps": 6, "log_every": 1} | settings
    return quiet_trainer(
        functools.partial(Net, **(model or {})), task or Regression(), data, strategy=strategy, callbacks=callbacks, **settings
    )
