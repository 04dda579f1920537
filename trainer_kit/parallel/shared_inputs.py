"""One gathered input for all the column modules of a parent, such as the three projections of an attention.

Without it each projection would gather its input, and reduce its gradient, for itself. Before editing: kept tensors must be gone when
the parent's forward is over, however it ends, or a model would hold activations between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer_kit.torch_private import fingerprint


class SharedInputs:
    """What was made of the inputs during the running forward of `parent`; outside of it nothing is kept."""

    def __init__(self, parent: nn.Module) -> None:
        self._kept: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] | None = None
        parent.register_forward_pre_hook(self._begin)
        parent.register_forward_hook(self._end, always_call=True)

    def get(self, x: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`make(x)`, or what it gave for the same tensor in this forward."""
        if self._kept is None:
            return make(x)
        key = (torch.is_grad_enabled(), *fingerprint((x,)))
        if key not in self._kept:
            self._kept[key] = (x, make(x))  # with x, so that its identity is not given to another tensor
        return self._kept[key][1]

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        self._kept = {}

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._kept = None


class SharedInputsOfParents:
    """The `SharedInputs` of each module that calls column modules."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = dict(root.named_modules())
        self._made: dict[str, SharedInputs] = {}

    def of(self, name: str) -> SharedInputs | None:
        """Of the module around the one called `name` that has a forward (a ModuleList has none); None if there is none."""
        while name:
            name = name.rpartition(".")[0]
            parent = self._modules[name]
            if type(parent).forward is not nn.Module.forward:
                if name not in self._made:
                    self._made[name] = SharedInputs(parent)
                return self._made[name]
        return None
