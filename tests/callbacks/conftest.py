"""A trainer that only remembers what callbacks ask of it, for tests that send event records by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_kit import events
from trainer_kit.config import TrainerConfig
from trainer_kit.parameters import ParameterTable
from trainer_kit.records import History


class FakeTrainer:
    """The part of Trainer's public API that the callbacks use."""

    def __init__(self, *, step: int = 0, total_steps: int | None = 10, model: torch.nn.Module | None = None, **settings: Any) -> None:
        self.step, self.total_steps, self.epoch = step, total_steps, 0
        self.config = TrainerConfig(**settings)
        self.context = SimpleNamespace(device=torch.device("cpu"), rank=0, world_size=1, data_rank=0, num_data_ranks=1, is_main=True)
        self.stages = [model if model is not None else torch.nn.Linear(2, 1)]
        self.parameters = ParameterTable(self.stages)
        self.optimizer = SimpleNamespace(param_groups=[{"params": list(self.stages[0].parameters())}])
        self.history = History()
        self.callbacks: list[Any] = []
        self.logged: list[tuple[str, Any]] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.stops: list[tuple[str, BaseException | None]] = []

    def log(self, name: str, value: Any, *, reduce: str = "mean") -> None:
        self.logged.append((name, value))

    def request(self, kind: str, **arguments: Any) -> None:
        self.requests.append((kind, arguments))

    def stop(self, reason: str, raising: BaseException | None = None) -> None:
        self.stops.append((reason, raising))

    def start(self, *callbacks: Any, resumed: bool = False, settings: dict[str, Any] | None = None) -> None:
        for callback in callbacks:
            callback.on_fit_start(events.FitStart(trainer=self, resumed=resumed, settings=settings or {"seed": 0}))

    def finish_step(self, *callbacks: Any) -> None:
        self.step += 1
        for callback in callbacks:
            callback.on_step_end(events.StepEnd(trainer=self, step=self.step - 1, skipped=False))

    def record(self, callback: Any, step: int, **values: float) -> None:
        named = {name.replace("__", "/"): value for name, value in values.items()}
        callback.on_metrics(events.Metrics(trainer=self, step=step, values=named))

    def end(self, callback: Any, reason: str | None = None) -> None:
        callback.on_fit_end(events.FitEnd(trainer=self, reason=reason, interrupted=False))


@pytest.fixture
def fake_trainer() -> type[FakeTrainer]:
    return FakeTrainer
