"""Losses, metrics and logged values of all ranks brought together, on the host, from sums.

Every rank puts the sums of a record (never means) under structured keys; when the record is delivered the numbers of the ranks are
exchanged once and every rank computes the same values from them, in the order of the ranks. Tensor peers hold the same samples, so
only counted ranks enter. Not here: when a record is made and delivered (`records.py`, `loop.py`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.metrics import Metric
from trainer_kit.metrics.of_task import computed
from trainer_kit.pipeline import LossSums

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext

FOLD: dict[str, Callable[[list[Any]], Any]] = {
    "sum": math.fsum,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
    "mean": lambda values: math.fsum(values) / len(values),
}


class LossKey(NamedTuple):
    """A number of a loss term; `part` is "sum", "weight" or "coefficient"."""

    prefix: str
    term: str
    part: str


class MetricKey(NamedTuple):
    """A state of a metric."""

    prefix: str
    metric: str
    state: str
    is_integer: bool


def with_metrics(losses: LossSums, metrics: Mapping[str, Any], prefix: str) -> dict[Hashable, Any]:
    """The losses and the computed metrics of one process under their names; a metric may not take the place of a loss term."""
    means = losses.values(prefix)
    found: dict[Hashable, Any] = {
        key: value for name, metric in metrics.items() for key, value in computed(f"{prefix}/{name}", metric).items()
    }
    if both := sorted(str(key) for key in means.keys() & found.keys()):
        name = both[0].removeprefix(f"{prefix}/")
        raise ConfigurationError(f"{name!r} is the name of a loss term and of a metric of metrics(); rename one of them")
    return {**means, **found}


def sums_of(losses: LossSums, metrics: Mapping[str, Any], prefix: str) -> dict[Hashable, Any]:
    """The same of one rank of several, as the sums that `Reduction.combine` takes."""
    found: dict[Hashable, Any] = {}
    for term, total in losses.sums.items():
        found[LossKey(prefix, term, "sum")] = total
        found[LossKey(prefix, term, "weight")] = losses.weights[term]
        found[LossKey(prefix, term, "coefficient")] = losses.coefficients[term]
    for name, metric in metrics.items():
        if isinstance(metric, Metric):
            for state, value in metric.state_dict().items():
                found[MetricKey(prefix, name, state, not value.is_floating_point())] = value
        else:  # it has brought its ranks together itself
            found.update(computed(f"{prefix}/{name}", metric))
    return found


def prepare_metrics(metrics: Mapping[str, Any], context: DistributedContext) -> None:
    """Let metrics of other libraries reduce over the data ranks. Raises UnsupportedError for one that cannot."""
    for name, metric in metrics.items():
        if isinstance(metric, Metric) or context.world_size == 1:
            continue
        if not hasattr(metric, "sync_on_compute"):
            raise UnsupportedError(
                f"metric {name!r} is a {type(metric).__name__}, which does not say how its values of {context.world_size} ranks combine; "
                "subclass trainer_kit.metrics.Metric, whose `reductions` say it, or use one of torchmetrics"
            )
        metric.sync_on_compute = context.data_group is not None
        metric.process_group = context.data_group


class Reduction:
    """Combines the values of a record over the ranks. `metrics` are those whose states it will meet."""

    def __init__(self, context: DistributedContext, metrics: Mapping[str, Any]) -> None:
        self._context, self._metrics = context, metrics

    def combine(self, values: Mapping[Hashable, float], reductions: Mapping[str, str]) -> dict[str, float]:
        """The values of the run from those of this rank; every rank calls it and gets the same.

        reductions: how logged values combine, by name; the mean where it says nothing. Raises ConfigurationError on every rank if two
        ranks mean different things by one name.
        """
        mine = [(tuple(key) if isinstance(key, tuple) else key, value) for key, value in values.items()]
        kinds = {key: reductions.get(key, "mean") for key in values if isinstance(key, str)}
        parts = self._context.host.exchange((mine, kinds) if self._context.is_counted else None)
        numbers: dict[Any, list[float]] = {}
        ways: dict[str, str] = {}
        for part in parts:
            for key, value in part[0] if part is not None else ():
                numbers.setdefault(key, []).append(value)
            for name, way in part[1].items() if part is not None else ():
                if ways.setdefault(name, way) != way:
                    raise ConfigurationError(f"{name!r} was logged with reduce={ways[name]!r} on one rank and {way!r} on another")
        found = {key: FOLD[ways[key]](values) for key, values in numbers.items() if isinstance(key, str)}
        computed_sums = self._losses(numbers) | self._metric_values(numbers)
        if both := sorted(found.keys() & computed_sums.keys()):
            raise ConfigurationError(f"{both[0]!r} was logged by trainer.log on one rank and is a loss or metric on another; rename one")
        return computed_sums | found

    def _losses(self, numbers: Mapping[Any, list[float]]) -> dict[str, float]:
        by_prefix: dict[str, LossSums] = {}
        for key in numbers:
            if isinstance(key, tuple) and len(key) == len(LossKey._fields) and key[2] == "sum":
                prefix, term, _ = key
                sums = by_prefix.setdefault(prefix, LossSums())
                sums.sums[term] = torch.tensor(math.fsum(numbers[key]), dtype=torch.float64)
                sums.weights[term] = math.fsum(numbers[prefix, term, "weight"])
                sums.coefficients[term] = numbers[prefix, term, "coefficient"][0]
        return {name: float(value) for prefix, sums in by_prefix.items() for name, value in sums.values(prefix).items()}

    def _metric_values(self, numbers: Mapping[Any, list[float]]) -> dict[str, float]:
        states: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
        for key, values in numbers.items():
            if isinstance(key, tuple) and len(key) == len(MetricKey._fields):
                prefix, name, state, is_integer = key
                folded = FOLD[self._metrics[name].reductions[state]](values)
                kept = torch.tensor(int(folded)) if is_integer else torch.tensor(folded, dtype=torch.float64)
                states.setdefault((prefix, name), {})[state] = kept
        found = {}
        for (prefix, name), state_dict in states.items():
            for key, value in self._compute(f"{prefix}/{name}", self._metrics[name], state_dict):
                found[key] = value
        return found

    def _compute(self, label: str, metric: Metric, states: dict[str, torch.Tensor]) -> Iterator[tuple[str, float]]:
        combined = copy.copy(metric)
        combined.load_state_dict(states)
        yield from ((key, float(value)) for key, value in computed(label, combined).items())
