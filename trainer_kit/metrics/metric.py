"""`Metric`: the state of a value that accumulates, and how it combines over ranks.

Not here: when a metric is updated, reduced and logged, which is the loop's. Before editing: nothing in a metric may wait for the
device (`item`, `float`, a test of a tensor, a copy from the host), and the state must be detached, or each update would keep a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch

from trainer_kit.exceptions import CheckpointError, ConfigurationError

Reduction = Literal["sum", "max", "min", "last"]
Number = torch.Tensor | float | int

_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "last": lambda _, new: new,
}


class Metric:
    """Subclass it: `update` calls `accumulate` for the states named in `reductions`, `compute` reads them with `state`.

    reductions: state name -> how two values of it combine, over updates as well as over ranks.

    The states are zero-dim tensors: float64 for floating values, int64 for integers and booleans, so that sums of many small values
    and large counts are exact. A metric without an update since the last reset has no states, and `compute` gives nan.
    """

    reductions: ClassVar[dict[str, Reduction]] = {}

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}

    def update(self, *args: Any) -> None:
        """Add values."""
        raise NotImplementedError(f"{type(self).__name__} must define update")

    def compute(self) -> torch.Tensor | float:
        """The value so far, on the device; nan without an update."""
        return self._compute() if self._states else math.nan

    def _compute(self) -> torch.Tensor:
        """The value, from states that exist."""
        raise NotImplementedError(f"{type(self).__name__} must define _compute")

    def reset(self) -> None:
        """Forget everything."""
        self._states = {}

    def state(self, name: str) -> torch.Tensor:
        """One state; there is one only after an update."""
        return self._states[name]

    def accumulate(self, name: str, value: torch.Tensor) -> None:
        """Combine a zero-dim value with the state of that name."""
        known = self._states.get(name)
        # A new tensor each time: what `state_dict` handed out earlier must not change with later updates.
        self._states[name] = value if known is None else _COMBINE[self.reductions[name]](known, value)

    def widen(self, value: Number) -> torch.Tensor:
        """The value detached and as float64 or int64, on its device; a host number on the device of the states."""
        if not isinstance(value, torch.Tensor):
            dtype = torch.float64 if isinstance(value, float) else torch.int64
            return self.constant(value, next(iter(self._states.values())) if self._states else None, dtype)
        value = value.detach()
        if value.is_complex():
            raise ConfigurationError(f"{type(self).__name__}.update got complex values, expected real ones; pass their absolute value")
        return value.to(_widest(value.device) if value.is_floating_point() else torch.int64)

    def constant(self, value: float, like: torch.Tensor | None = None, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A host number as a zero-dim tensor where `like` is, filled there: a copy from the host would wait for the device."""
        device = torch.device("cpu") if like is None else like.device
        return torch.full((), value, dtype=_widest(device) if dtype == torch.float64 else dtype, device=device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The states; empty without an update. The tensors stay as they are when the metric goes on."""
        return dict(self._states)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state_dict` gave."""
        if state and set(state) != set(self.reductions):
            raise CheckpointError(
                f"the saved state of {type(self).__name__} holds {sorted(state)}, expected {sorted(self.reductions)}; "
                "it was saved by another metric under this name"
            )
        self._states = {name: tensor.detach().clone() for name, tensor in state.items()}


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64


def check_metric(name: str, value: object) -> None:
    """Refuse what cannot serve as a metric: it needs `update`, `compute` and `reset`."""
    missing = [method for method in ("update", "compute", "reset") if not callable(getattr(value, method, None))]
    if isinstance(value, type):
        raise ConfigurationError(f"metric {name!r} is the class {value.__name__}, expected an instance: {value.__name__}()")
    if missing:
        raise ConfigurationError(
            f"metric {name!r} is {value!r}, which has no {', '.join(missing)}; metrics() must return a Metric of trainer_kit.metrics "
            "or any object with update, compute and reset"
        )
