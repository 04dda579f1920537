"""Losses, metrics and logged values of all ranks brought together, on the host, from sums.

Every rank puts the sums of a record (never means) under structured keys; when the record is delivered the numbers of the ranks are
exchanged once and every rank computes the same values from them, in the order of the ranks. Tensor peers hold the same samples, so
their sums enter once; those of context ranks, of other parts of the sequences, add up; in a pipeline the last stage has the metrics, and
any stage may have added losses. Not here: when a record is made and delivered (`records.py`, `loop.py`).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.metrics import Metric
from trainer_kit.metrics.of_task import computed
from trainer_kit.pipeline import LossSums

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext


def _sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # a sum that is too large on the way, or of both infinities
        return sum(values)


def _extreme(choose: Callable[[Sequence[float]], float]) -> Callable[[Sequence[float]], float]:
    """The largest or smallest, and nan if one is nan, as torch has it; Python's depends on the order."""
    return lambda values: math.nan if any(value != value for value in values) else choose(values)


FOLD: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": _sum,
    "max": _extreme(max),
    "min": _extreme(min),
    "last": lambda values: values[-1],
    "mean": lambda values: _sum(values) / len(values),
}


class LossKey(NamedTuple):
    """A number of a loss term; `part` is "sum", "weight" or "coefficient"."""

    prefix: str
    term: str
    part: str


class MetricKey(NamedTuple):
    """A state of a metric. One without a name says that there is such a metric, even if it had no update."""

    prefix: str
    metric: str
    state: str
    is_integer: bool


class Logged(NamedTuple):
    """What one rank logged under a name, or a metric of another library found there. `reduce`: how it combines over the data ranks."""

    name: str
    value: float
    reduce: str


def with_metrics(losses: LossSums, metrics: Mapping[str, Any], prefix: str) -> dict[Hashable, Any]:
    """The losses and the computed metrics of one process under their names; a metric may not take the place of a loss term."""
    means = losses.values(prefix)
    of_metrics: dict[Hashable, Any] = {}
    for name, metric in metrics.items():
        of_metrics.update(computed(f"{prefix}/{name}", metric))
    _check_names(means, of_metrics)
    return dict[Hashable, Any](means.items()) | of_metrics


def _check_names(of_losses: Mapping[Any, Any], of_metrics: Mapping[Any, Any]) -> None:
    if both := sorted(str(key) for key in of_losses.keys() & of_metrics.keys()):
        name = both[0].partition("/")[2]
        raise ConfigurationError(f"{name!r} is the name of a loss term and of a metric of metrics(); rename one of them")


def sums_of(losses: LossSums, metrics: Mapping[str, Any], prefix: str) -> dict[Hashable, Any]:
    """The same of one rank of several, as the sums that `Reduction.combine` takes."""
    found: dict[Hashable, Any] = {}
    for term, total in losses.sums.items():
        found[LossKey(prefix, term, "sum")] = total
        found[LossKey(prefix, term, "weight")] = losses.weights[term]
        found[LossKey(prefix, term, "coefficient")] = losses.coefficients[term]
    for name, metric in metrics.items():
        if isinstance(metric, Metric):
            found[MetricKey(prefix, name, "", True)] = 0
            for state, value in metric.state_dict().items():
                found[MetricKey(prefix, name, state, not value.is_floating_point())] = value
        else:
            with warnings.catch_warnings():  # that this rank had no update says nothing about the others
                warnings.filterwarnings("ignore", message=r".*was called before the ``update`` method")
                found.update(computed(f"{prefix}/{name}", metric))  # brings the ranks together
    return found


def prepare_metrics(metrics: Mapping[str, Any], context: DistributedContext) -> None:
    """Let metrics of other libraries reduce over the data ranks. Raises UnsupportedError for one that cannot."""
    for name, metric in metrics.items():
        if isinstance(metric, Metric) or context.world_size == 1:
            continue
        parts = metric.modules() if isinstance(metric, torch.nn.Module) else [metric]  # a collection or a wrapper holds others
        reducing = [part for part in parts if hasattr(part, "sync_on_compute")]
        if not reducing:
            raise UnsupportedError(
                f"metric {name!r} is a {type(metric).__name__}, which does not say how its values of {context.world_size} ranks combine; "
                "subclass trainer_kit.metrics.Metric, whose `reductions` say it, or use one of torchmetrics"
            )
        for part in reducing:
            part.process_group = context.loss_group
            if context.loss_group is None:  # all ranks see the same samples; no group would mean all ranks
                part.sync_on_compute, part.distributed_available_fn = False, _is_not_distributed


def _is_not_distributed() -> bool:
    return False


class Reduction:
    """Combines the values of a record over the ranks. `metrics` are those whose states it will meet."""

    def __init__(self, context: DistributedContext, metrics: Mapping[str, Any]) -> None:
        self._context, self._metrics = context, metrics

    def combine(self, values: Mapping[Hashable, float], reductions: Mapping[str, str]) -> dict[str, float]:
        """The values of the run from those of this rank; every rank calls it and gets the same.

        reductions: how logged values combine, by name; the mean where it says nothing. Raises ConfigurationError on every rank if two
        ranks mean different things by one name.
        """
        is_peer = self._context.tensor_rank > 0  # the stages of a pipeline may all have added losses
        sums = [] if is_peer else [(tuple(key), value) for key, value in values.items() if isinstance(key, tuple)]
        logged = [Logged(key, value, reductions.get(key, "mean")) for key, value in values.items() if isinstance(key, str)]
        place = self._context.data_rank, self._context.loss_rank
        parts = self._context.host.exchange((*place, sums, [tuple(each) for each in logged]))
        found = _of_logged([(data_rank, [Logged(*each) for each in theirs]) for data_rank, _, _, theirs in parts])
        of_losses = _of_losses([(loss_rank, *item) for _, loss_rank, theirs, _ in parts for item in theirs])
        of_metrics = self._of_metrics([item for *_, theirs, _ in parts for item in theirs])
        _check_names(of_losses, of_metrics)
        computed_sums = of_losses | of_metrics
        if both := sorted(found.keys() & computed_sums.keys()):
            raise ConfigurationError(f"{both[0]!r} was logged by trainer.log on one rank and is a loss or metric on another; rename one")
        return computed_sums | found

    def _of_metrics(self, sums: Sequence[tuple[Any, float]]) -> dict[str, float]:
        folded: dict[tuple[str, str], dict[str, list[tuple[float, bool]]]] = {}
        for key, value in sums:
            if len(key) == len(MetricKey._fields):
                prefix, name, state, is_integer = key
                states = folded.setdefault((prefix, name), {})
                if state:
                    states.setdefault(state, []).append((value, is_integer))
        found: dict[str, float] = {}
        for (prefix, name), states in folded.items():
            metric = self._metrics[name]
            combined = {state: _folded(metric.reductions[state], numbers) for state, numbers in states.items()}
            found |= dict(_compute(f"{prefix}/{name}", metric, combined))
        return found


def _of_logged(parts: Sequence[tuple[int, Sequence[Logged]]]) -> dict[str, float]:
    """The logged values of all ranks as one each. `parts`: data rank and values, by rank.

    A data rank counts once in a sum or mean, with the first of its peers that has the name; extremes are those of all ranks.
    """
    numbers: dict[str, list[float]] = {}
    ways: dict[str, str] = {}
    seen: set[tuple[int, str]] = set()
    for data_rank, logged in parts:
        for name, value, way in logged:
            if ways.setdefault(name, way) != way:
                raise ConfigurationError(f"{name!r} was logged with reduce={ways[name]!r} on one rank and reduce={way!r} on another")
            if way in ("max", "min") or (data_rank, name) not in seen:
                seen.add((data_rank, name))
                numbers.setdefault(name, []).append(value)
    return {name: FOLD[ways[name]](values) for name, values in numbers.items()}


def _of_losses(sums: Sequence[tuple[int, Any, float]]) -> dict[str, float]:
    """The losses from the sums of all ranks. `sums`: loss rank, key, value.

    A term that several stages of a pipeline add to has one weight there, that of the microbatches, which each of them tells.
    """
    numbers: dict[tuple[str, ...], dict[int, list[float]]] = {}
    for loss_rank, key, value in sums:
        if len(key) == len(LossKey._fields):
            numbers.setdefault(key, {}).setdefault(loss_rank, []).append(value)
    by_prefix: dict[str, LossSums] = {}
    for prefix, term, part in numbers:
        if part == "sum":
            total = by_prefix.setdefault(prefix, LossSums())
            weights = numbers[prefix, term, "weight"].values()
            value, coefficient = _combined(numbers[prefix, term, "sum"], numbers[prefix, term, "coefficient"])
            total.sums[term] = torch.tensor(value, dtype=torch.float64)
            total.weights[term] = _sum([FOLD["max"](values) for values in weights])
            total.coefficients[term] = coefficient
    return {name: float(value) for prefix, total in by_prefix.items() for name, value in total.values(prefix).items()}


def _combined(sums: Mapping[int, Sequence[float]], coefficients: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """The sum of a term over all ranks and its coefficient; that of the products, and 1, if the coefficients differ, as in one process."""
    values = [value for of_rank in sums.values() for value in of_rank]
    factors = [factor for of_rank in coefficients.values() for factor in of_rank]
    if len(set(factors)) == 1:
        return _sum(values), factors[0]
    return _sum([value * factor for value, factor in zip(values, factors, strict=True)]), 1.0


def _folded(reduction: str, numbers: Sequence[tuple[float, bool]]) -> torch.Tensor:
    """One state from those of the ranks; an integer if it is one on all of them."""
    value = FOLD[reduction]([number for number, _ in numbers])
    if all(is_integer for _, is_integer in numbers):
        return torch.tensor(int(value))
    return torch.tensor(value, dtype=torch.float64)


def _compute(label: str, metric: Metric, states: dict[str, torch.Tensor]) -> Iterator[tuple[str, float]]:
    combined = copy.copy(metric)
    combined.load_state_dict(states)
    yield from ((key, float(value)) for key, value in computed(label, combined).items())
