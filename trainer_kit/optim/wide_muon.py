"""`WideMuon`: Muon whose orthogonalisation runs in the dtype of the parameter, at least float32.

torch's runs in bfloat16, where the last digit of a gradient, which depends on the order of a sum over ranks, turns into the third digit
of the update: then no two meshes give the same run. The state and the settings are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer_kit.optim.closure import loss_of


class WideMuon(torch.optim.Muon):
    """The constructor is that of `torch.optim.Muon`."""

    saved_as = "Muon"  # its state is that of torch's, so a checkpoint of either goes on with the other

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every matrix that has a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
        update = orthogonalised(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
        lr = float(group["lr"])
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(update.to(parameter.dtype), alpha=-lr * _scale(parameter.shape, group["adjust_lr_fn"]))


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """The quintic Newton-Schulz iteration of Jordan (https://kellerjordan.github.io/posts/muon/) on a matrix (M, N).

    X -> aX + b(XX')X + c(XX')^2 X from X = matrix / max(|matrix|, eps); brings the singular values near 1, in float32 or wider.
    """
    a, b, c = coefficients
    x = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    is_tall = x.size(0) > x.size(1)
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _scale(shape: torch.Size, adjust: str | None) -> float:
    """What the learning rate is multiplied by; the formulas of `torch.optim.Muon`."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
