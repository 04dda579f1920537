"""The metrics of a task, checked where they enter the library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.metrics.metric import check_metric

if TYPE_CHECKING:
    from trainer_kit.task import Task


def metrics_of(task: Task) -> dict[str, Any]:
    """New metrics by name, each with update, compute and reset; no name may be that of the loss."""
    metrics = task.metrics()
    if not isinstance(metrics, Mapping):
        found = f"{type(task).__name__}.metrics() returned {metrics!r}"
        raise ConfigurationError(f"{found}, expected a dict of name and metric; is a `return` missing?")
    for name, metric in metrics.items():
        if name == "loss":
            raise ConfigurationError(f"{type(task).__name__}.metrics() has the name 'loss', which the loss itself has; rename it")
        check_metric(name, metric)
        if hasattr(metric, "persistent"):  # torchmetrics keeps its state out of state_dict unless asked
            metric.persistent(True)
    return dict(metrics)
