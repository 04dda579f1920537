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
    "last": lambda _, new: new.clone(),
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

    def accumulate(self, name: str, value: Number) -> None:
        """Combine a zero-dim value, wide already, or a host number with the state of that name."""
        known, reduction = self._states.get(name), self.reductions[name]
        if known is None and isinstance(value, torch.Tensor) and value.dim():
            raise ConfigurationError(
                f"{type(self).__name__} accumulates a tensor of shape {tuple(value.shape)} in {name!r}, expected one without a dim: ranks "
                "bring their numbers together. Have a state per number, or use a metric of torchmetrics"
            )
        # A new tensor each time: `state_dict` handed out the old one, and the caller may change the new one.
        if known is not None and reduction == "sum" and not isinstance(value, torch.Tensor):
            self._states[name] = plus(known, value)
        else:
            wide = value if isinstance(value, torch.Tensor) else self.widen(value)
            self._states[name] = wide.clone() if known is None else _COMBINE[reduction](known, wide)

    def widen(self, value: Number) -> torch.Tensor:
        """The value detached and as float64 or int64, on its device; a host number on the device of the states."""
        if not isinstance(value, torch.Tensor):
            device = next(iter(self._states.values())).device if self._states else torch.device("cpu")
            # Filled where it is needed: a copy from the host would wait for the device.
            return torch.full((), value, dtype=_widest(device) if isinstance(value, float) else torch.int64, device=device)
        if value.is_complex():
            raise ConfigurationError(f"{type(self).__name__}.update got complex values, expected real ones; pass their absolute value")
        return value.detach().to(_widest(value.device) if value.is_floating_point() else torch.int64)

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


def _keeps_digits(tensor: torch.Tensor, number: float | int) -> bool:
    """Whether torch combines them in the tensor's dtype: an integer tensor and a float would meet in float32."""
    return isinstance(number, int) or tensor.is_floating_point()


def total(values: torch.Tensor) -> torch.Tensor:
    """The sum of wide values; a single one is that already."""
    return values.sum() if values.dim() else values


def plus(value: torch.Tensor, number: float | int) -> torch.Tensor:
    """A wide value plus a host number, without losing digits."""
    return (value if _keeps_digits(value, number) else value.to(_widest(value.device))) + number


def times(value: torch.Tensor, number: float | int) -> torch.Tensor:
    """A wide value times a host number, without losing digits."""
    return (value if _keeps_digits(value, number) else value.to(_widest(value.device))) * number


def quotient(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Two wide values divided in the widest floating dtype; counts too, whose quotient torch would give in fp32."""
    return numerator.to(_widest(numerator.device)) / denominator


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
