"""Small parts that many tests share: closed-form tasks, a list as data, and a trainer without bars and prints."""

from typing import Any

import torch
from torch import nn

from trainer_kit import Callback, ForwardInputs, Loss, Task, Trainer
from trainer_kit.callbacks import Progress, Signals, Summary

QUIET = (Progress(False), Summary(False), Signals(False))


class Scalar(nn.Module):
    """One weight; `forward(c)` is w * mean(c), so the gradient is mean(c)."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, c: torch.Tensor) -> torch.Tensor:
        return self.w * c.mean() if c.numel() else self.w * float("nan")


class MeanTask(Task):
    """The model's output is the loss; a batch is the tensor of its samples. `weigh`: "declared", "returned", "tensor" or "none"."""

    def __init__(self, weigh: str = "declared") -> None:
        self.weigh = weigh

    def build_forward_inputs(self, batch: Any) -> ForwardInputs:
        return ForwardInputs(inputs=batch, state=batch, weight=len(batch) if self.weigh == "declared" else None)

    def compute_loss(self, pipeline_results: Any, state: Any) -> torch.Tensor | Loss:
        if self.weigh == "returned":
            return Loss(pipeline_results, len(state))
        if self.weigh == "tensor":
            return Loss(pipeline_results, torch.tensor(len(state)))
        return pipeline_results


class Gradients(Callback):
    """Keeps every parameter's gradient as it is when it is ready, by step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_gradients_ready(self, event: Any) -> None:
        self.seen.append({name: p.grad.clone() for name, p in event.trainer.model.named_parameters()})


def sgd(lr: float = 1.0, **options: Any) -> Any:
    """Plain gradient descent."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **options)


def quiet_trainer(model: Any, task: Task, data: Any, *, callbacks: Any = (), **settings: Any) -> Trainer:
    """A Trainer without bar, summary and signal handlers."""
    given = list(callbacks)
    silent = [type(c)(False) for c in QUIET if not any(isinstance(g, type(c)) for g in given)]
    settings.setdefault("optimizer", sgd())
    return Trainer(model, task, data, callbacks=[*silent, *given], **settings)
