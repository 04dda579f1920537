"""What every `step` of an optimizer does first: it evaluates the closure, as torch's optimizers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure gives, with gradients on; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
