"""Loads what several ranks had accumulated into one metric: for a run that goes on with fewer data ranks than it was saved with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_kit.metrics.metric import Metric


def load_merged(metric: Any, states: Sequence[Mapping[str, Any]]) -> str | None:
    """Put the `state_dict`s of some ranks, in their order, in place of the state of a metric; none: it begins empty.

    Returns a remark if the metric can take only one of several. A metric without `load_state_dict` is left as it is.
    """
    if not hasattr(metric, "load_state_dict"):
        return None
    states = [state for state in states if state]  # a Metric without an update has no state
    metric.reset()
    for index, state in enumerate(states):
        if index == 0:
            metric.load_state_dict(state)
        elif isinstance(metric, Metric):
            for name, value in state.items():
                metric.accumulate(name, value)
        elif hasattr(metric, "merge_state"):  # as those of torchmetrics
            metric.merge_state(dict(state))
        else:
            return f"a {type(metric).__name__} cannot merge the states of {len(states)} ranks, so it goes on with that of one"
    return None
