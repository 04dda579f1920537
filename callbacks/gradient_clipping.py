"""Clips the gradients once per optimizer step, by their norm or by value, and logs the norm from before the clipping.

Not here: what happens to a non-finite gradient, which the trainer's `nonfinite` setting decides. Know before editing: nothing may
wait for the device, so the factor stays a tensor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from trainer_kit.callback import Callback
from trainer_kit.callbacks._arguments import number
from trainer_kit.callbacks._records import is_recorded
from trainer_kit.exceptions import ConfigurationError

if TYPE_CHECKING:
    from trainer_kit.events import GradientsReady

_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds the same to the norm


class GradientClipping(Callback):
    """Clip by norm (`max_norm`) or element by element (`max_value`); exactly one of them.

    max_norm: gradients are multiplied by `min(1, max_norm / (norm + 1e-6))`, the formula of torch. `math.inf` measures and changes nothing.
    max_value: every element is brought into `[-max_value, max_value]`.
    norm_type: the p of the norm; `math.inf` for the largest absolute value.
    log: record the norm before clipping, of this `norm_type`, as `optim/grad_norm`.

    A norm that is not finite gives the factor 1: `max_norm / inf` would turn every gradient into zero without a word.
    """

    def __init__(self, max_norm: float | None = None, *, max_value: float | None = None, norm_type: float = 2.0, log: bool = True) -> None:
        if (max_norm is None) == (max_value is None):
            found = "none of them" if max_norm is None else f"max_norm={max_norm!r} and max_value={max_value!r}"
            raise ConfigurationError(
                f"GradientClipping takes exactly one of max_norm= and max_value=, found {found}; max_norm=math.inf only measures"
            )
        self.max_norm = None if max_norm is None else number(self, "max_norm", max_norm, above=0)
        self.max_value = None if max_value is None else number(self, "max_value", max_value, above=0)
        self.norm_type = number(self, "norm_type", norm_type, above=0)
        self.log = log
        if self.max_norm == math.inf and not log:
            raise ConfigurationError("GradientClipping(max_norm=inf, log=False) has no effect; use log=True to measure, or a finite norm")

    @property
    def state_key(self) -> str:
        return f"GradientClipping.{'norm' if self.max_value is None else 'value'}"

    def describe(self) -> str:
        limit = f"max_value={self.max_value}" if self.max_norm is None else f"max_norm={self.max_norm}, norm_type={self.norm_type}"
        return f"GradientClipping({limit})"

    def on_gradients_ready(self, event: GradientsReady) -> None:
        if self.log and is_recorded(event.trainer, event.step):
            event.trainer.log("optim/grad_norm", event.grad_norm(self.norm_type))
        if self.max_norm is not None and self.max_norm != math.inf:
            norm = event.grad_norm(self.norm_type)
            factor = (self.max_norm / (norm + _EPSILON)).clamp(max=1.0)
            event.scale(torch.where(norm.isfinite(), factor, 1.0))
        if self.max_value is not None:
            event.grad_norm()  # before an inf becomes a finite value: the trainer's check looks at this norm
            groups = event.trainer.optimizer.param_groups
            torch.nn.utils.clip_grad_value_([p for group in groups for p in group["params"]], self.max_value)
