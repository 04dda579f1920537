"""Several optimizers of torch as one: the groups of all, one state by parameter, one step.

The parts keep working on the same group dicts and the same state, so LR schedulers, checkpoints and `zero_grad` see one ordinary
optimizer. Whoever replaces `state` or `param_groups` of the whole must hand them to the parts again (`_share`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer_kit.exceptions import StateError, UnsupportedError
from trainer_kit.optim.closure import loss_of


class CombinedOptimizer(torch.optim.Optimizer):
    """parts: freshly built optimizers without a parameter in common."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts: tuple[torch.optim.Optimizer, ...] = ()
        if any(part.state for part in parts):
            raise StateError("CombinedOptimizer takes optimizers that have not made a step yet")
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = tuple(parts)
        self._share()

    def _share(self) -> None:
        """Give each part its groups of this optimizer, and the one state."""
        start = 0
        for part in self.parts:
            end = start + len(part.param_groups)
            part.__setstate__({"state": self.state, "param_groups": self.param_groups[start:end]})
            start = end

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: afterwards it would be unclear which part takes the group."""
        if self.parts:
            raise UnsupportedError("a combined optimizer takes no further groups; build a new one with all parameters")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of each part, in order."""
        loss = loss_of(closure)
        for part in self.parts:
            part.step()
        return loss
