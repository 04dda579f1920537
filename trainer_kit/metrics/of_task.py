"""The metrics of a task, checked where they enter the library, and what they compute, as single values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.metrics.metric import check_metric

if TYPE_CHECKING:
    from trainer_kit.task import Task


def metrics_of(task: Task, device: torch.device | None = None) -> dict[str, Any]:
    """New metrics by name, each with update, compute and reset; no name may be that of the loss.

    device: where metrics go that can be moved, as those of torchmetrics must be.
    """
    metrics = task.metrics()
    if not isinstance(metrics, Mapping):
        found = f"{type(task).__name__}.metrics() returned {metrics!r}"
        raise ConfigurationError(f"{found}, expected a dict of name and metric; is a `return` missing?")
    checked: dict[str, Any] = dict(metrics)
    for name, metric in checked.items():
        if name == "loss":
            raise ConfigurationError(f"{type(task).__name__}.metrics() has the name 'loss', which the loss itself has; rename it")
        check_metric(name, metric)
        if hasattr(metric, "persistent"):  # torchmetrics keeps its state out of state_dict unless asked
            metric.persistent(True)
        if device is not None and callable(getattr(metric, "to", None)):
            checked[name] = metric.to(device)
    return checked


def computed(name: str, metric: Any) -> dict[str, torch.Tensor | float]:
    """What `compute` gives, as numbers and one-element tensors: `<name>`, or `<name>/<key>` and `<name>/<index>` of several."""
    return _single_values(name, metric.compute(), name)


def _single_values(label: str, value: Any, name: str) -> dict[str, torch.Tensor | float]:
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() > 1:
        parts = enumerate(value.unbind())
    elif isinstance(value, torch.Tensor) and value.numel() == 1:
        return {label: value}
    elif not isinstance(value, torch.Tensor) and hasattr(value, "__float__") and not getattr(value, "ndim", 0):
        return {label: float(value)}
    else:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ConfigurationError(
            f"metric {name!r}: compute() returned {found}, expected a number, a tensor with one or no dim, or a mapping of those; "
            "choose an average, or reduce it in the metric"
        )
    return {key: single for part, inner in parts for key, single in _single_values(f"{label}/{part}", inner, name).items()}
