"""The metrics of a task, and what they compute, as single values under their names."""

from types import SimpleNamespace

import numpy
import pytest
import torch

from trainer_kit import Task
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.metrics import Mean
from trainer_kit.metrics.of_task import computed, metrics_of


class With(Task):
    def __init__(self, **metrics):
        self.given = metrics

    def metrics(self):
        return self.given


def giving(value):
    return SimpleNamespace(compute=lambda: value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(2.0), {"m": 2.0}),
        (torch.tensor([[3]]), {"m": 3.0}),
        (1, {"m": 1.0}),
        (numpy.float32(0.5), {"m": 0.5}),
        (torch.tensor([1.0, 2.0]), {"m/0": 1.0, "m/1": 2.0}),
        ({"a": torch.tensor(1.0), "b": {"c": torch.tensor([2.0, 3.0])}, 4: 5.0}, {"m/a": 1.0, "m/b/c/0": 2.0, "m/b/c/1": 3.0, "m/4": 5.0}),
    ],
)
def test_every_value_has_one_number(value, expected):
    found = computed("m", giving(value))
    assert {name: float(single) for name, single in found.items()} == expected


@pytest.mark.parametrize("value", [torch.zeros(2, 3), torch.zeros(0), "high", None, [1.0], numpy.zeros(2), {"part": torch.zeros(2, 2)}])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ConfigurationError, match=r"metric 'confusion': compute\(\) returned a "):
        computed("confusion", giving(value))


def test_metrics_that_can_be_moved_are_brought_to_the_device():
    class Moves(Mean):
        def to(self, device):
            self.moved_to = device
            return self

    device = torch.device("meta")
    found = metrics_of(With(a=Moves(), b=Mean()), device)
    assert found["a"].moved_to == device and list(found) == ["a", "b"]
    assert not hasattr(metrics_of(With(a=Moves()))["a"], "moved_to")


def test_torchmetrics_on_the_device_and_with_several_values():
    """A collection, and an accuracy per class: 2 of 2 and 1 of 3 are right, so 3 of 5 together."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class Task(With):
        def metrics(self):
            accuracy = torchmetrics.classification.MulticlassAccuracy
            return {"all": torchmetrics.MetricCollection({"micro": accuracy(2, average="micro")}), "each": accuracy(2, average=None)}

    moved = metrics_of(Task(), torch.device("meta"))
    assert (moved["each"].device.type, moved["all"]["micro"].device.type) == ("meta", "meta")
    metrics = metrics_of(Task(), torch.device("cpu"))
    for metric in metrics.values():
        metric.update(torch.tensor([0, 0, 1, 0, 0]), torch.tensor([0, 0, 1, 1, 1]))
    values = computed("all", metrics["all"]) | computed("each", metrics["each"])
    assert {name: float(value) for name, value in values.items()} == pytest.approx({"all/micro": 3 / 5, "each/0": 1.0, "each/1": 1 / 3})
