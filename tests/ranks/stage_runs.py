"""A small model in stages and runs of it on any layout, for tests of the life of a pipelined run, which must be that of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import quiet_trainer
from trainer_kit import AutoDataProvider, DataProvider, ForwardInputs, MeshStrategy, ModelProvider, StageInfo, Task, Trainer
from trainer_kit.data import Pack
from trainer_kit.metrics import Max, Mean, Sum
from trainer_kit.model import distribute_layers
from trainer_kit.optim import AdamW

WIDTH, NUM_LAYERS = 4, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "1f1b": {"pp": 2},
    "interleaved": {"pp": 2, "pipeline": "interleaved_1f1b", "stages_per_rank": 2},
    "zbv": {"pp": 2, "pipeline": "zbv"},  # the first and the last stage on pipeline place 0
    "zb1p": {"pp": 2, "pipeline": "zb1p", "stages_per_rank": 2},
    "four": {"pp": 4},
    "replicate": {"dp_replicate": 2},
    "shard": {"pp": 2, "dp_shard": 2},
    "zbv replicate": {"pp": 2, "dp_replicate": 2, "pipeline": "zbv"},
    "zbv shard": {"pp": 2, "dp_shard": 2, "fsdp_sync": "pack", "pipeline": "zbv"},
}


def num_ranks(layout: str) -> int:
    degrees = LAYOUTS[layout]
    return degrees.get("pp", 1) * degrees.get("dp_shard", 1) * degrees.get("dp_replicate", 1)


class Layer(nn.Module):
    """A residual layer. `seen` counts samples in training, `calls` all forwards; neither counts what only fills up."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.register_buffer("seen", torch.empty((), dtype=torch.int64))
        self.register_buffer("calls", torch.empty((), dtype=torch.int64), persistent=False)

    def reset_parameters(self) -> None:
        self.seen.zero_()
        self.calls.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.training:
            self.seen += len(x)
        return x + self.dropout(torch.tanh(self.linear(x)))


class Net(nn.Module):
    """The layers of one stage. Any layer may add losses: `added` maps its number to what it adds, as pairs of a name and a coefficient."""

    def __init__(self, stage: StageInfo | None = None, *, dropout: float = 0.0, added: Any = None, context: Any = None) -> None:
        super().__init__()
        self.stage, self.added, self.context = stage or StageInfo(), added or {}, context
        if self.stage.is_first:
            self.embedding = nn.Linear(WIDTH, WIDTH)
        numbers = distribute_layers(NUM_LAYERS, self.stage.num_stages)[self.stage.index]
        self.layers = nn.ModuleDict({str(number): Layer(dropout) for number in numbers})
        if self.stage.is_last:
            self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor, shared: Any = None) -> torch.Tensor:
        x = self.embedding(inputs) if self.stage.is_first else inputs
        for number, layer in self.layers.items():
            x = layer(x)
            for name, coefficient in self.added.get(int(number), ()):
                self.context.add_loss(name, x.square().mean() * (1 + int(number)), coefficient)
        return self.head(x) if self.stage.is_last else x

    def stage_transfer_spec(self, inputs: torch.Tensor, boundary: str) -> torch.Tensor:
        return torch.empty(inputs.shape, dtype=next(self.parameters()).dtype, device="meta")


class Nets(ModelProvider):
    """Stages of `Net` in fp64."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def initialize_model_stage(self, ctx: Any) -> nn.Module:
        return Net(ctx.stage, context=ctx.context, **self.options).double()


class Fit(Task):
    """A batch is rows of samples whose first number is their own. `weigh`: "declared", "returned", "none" or a mapping of terms."""

    def __init__(self, weigh: Any = "declared") -> None:
        self.weigh = weigh

    def build_forward_inputs(self, batch: torch.Tensor) -> ForwardInputs:
        weight: Any = len(batch) if self.weigh == "declared" else None
        if isinstance(self.weigh, Mapping):
            weight = {name: len(batch) if factor is None else factor for name, factor in self.weigh.items()}
        return ForwardInputs(inputs=batch / 10, state=batch, weight=weight)

    def compute_loss(self, pipeline_results: torch.Tensor, state: torch.Tensor) -> Any:
        loss = F.mse_loss(pipeline_results, state.flip(1) / 10)
        if isinstance(self.weigh, Mapping):
            return {name: loss if index == 0 else pipeline_results.square().mean() for index, name in enumerate(self.terms())}
        return loss

    def terms(self) -> list[str]:
        """Those of `compute_loss`; the weights of others are for what stages add."""
        return [name for name in self.weigh if not name.startswith("router")]

    def metrics(self) -> dict[str, Any]:
        return {"count": Sum(), "numbers": Sum(), "top": Max(), "output": Mean()}

    def update_metrics(self, metrics: dict[str, Any], pipeline_results: torch.Tensor, state: torch.Tensor) -> None:
        metrics["count"].update(len(state))
        metrics["numbers"].update(state[:, 0])
        metrics["top"].update(state[:, 0])
        metrics["output"].update(pipeline_results)

    def process_outputs(self, pipeline_results: torch.Tensor, state: torch.Tensor) -> Any:
        return {"number": state[:, 0].long(), "output": pipeline_results}


class Samples(torch.utils.data.Dataset):
    """Rows that are functions of their number, which is the first of them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        row[0] = index
        return row


def rows(*numbers: int) -> torch.Tensor:
    """A microbatch."""
    samples = Samples(100)
    return torch.stack([samples[number] for number in numbers])


def provider(size: int, batch: int, microbatch: int = 1, **options: Any) -> AutoDataProvider:
    return AutoDataProvider(Samples(size), global_batch_size=batch, microbatch_size=microbatch, **options)


class OfRanks(DataProvider):
    """The packs of each data rank; one process, with one data rank, gets the packs of all of them joined."""

    def __init__(self, *parts: list[list[torch.Tensor]]) -> None:
        self.parts = parts

    def setup(self, context: Any, seed: int) -> None:
        if context.num_data_ranks > 1:
            self.own = self.parts[context.data_rank]
        else:
            steps = range(max(map(len, self.parts)))
            self.own = [[mb for part in self.parts if step < len(part) for mb in part[step]] for step in steps]

    def packs(self, position: Any) -> Iterator[Pack]:
        for index, pack in enumerate(self.own):
            yield Pack(list(pack), (position or {}).get("epoch", 0), None, index + 1 == len(self.own))

    def num_packs(self) -> int | None:
        return len(self.own)


def run_of(layout: str, data: Any, *callbacks: Any, model: Any = None, task: Task | None = None, **settings: Any) -> Trainer:
    """A quiet trainer on a layout, in fp64."""
    strategy = MeshStrategy(device="cpu", **({"dp_replicate": 1} | LAYOUTS[layout]))
    settings = {"log_every": 1, "optimizer": AdamW(lr=0.02), "seed": 5} | settings
    return quiet_trainer(model or Nets(), task or Fit(), data, strategy=strategy, callbacks=callbacks, **settings)


def history(trainer: Trainer) -> dict[str, list[tuple[int, float]]]:
    return {name: trainer.history.values(name) for name in trainer.history.names()}


def assert_same_history(found: dict[str, list[tuple[int, float]]], expected: dict[str, list[tuple[int, float]]], rel: float = 1e-9) -> None:
    """The same names, steps and values."""
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points], rel=rel, nan_ok=True), name


def weights_of(trainer: Trainer) -> dict[str, tuple[Any, torch.Tensor]]:
    """Name -> this rank's box and values."""
    return {row.name: (row.layout.box, row.local.detach().clone()) for row in trainer.parameters}


def assert_same_weights(by_rank: list[dict[str, tuple[Any, torch.Tensor]]], expected: dict[str, tuple[Any, torch.Tensor]]) -> None:
    """The parts of all ranks are those of one process, and all of it is somewhere."""
    assert {name for found in by_rank for name in found} == expected.keys()
    for found in by_rank:
        for name, (box, value) in found.items():
            torch.testing.assert_close(value, expected[name][1][box], rtol=1e-9, atol=1e-12)
