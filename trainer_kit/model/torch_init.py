"""What initialisation needs of torch beyond its public interface, each with its reason.

`TorchDispatchMode`: the only way to see in-place operations on `.data`, views and `nn.init` alike.
`trunc_normal_replaced`: `nn.init.trunc_normal_` rejects and redraws in a loop that depends on the values; it must be seen as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "trunc_normal_replaced"]


@contextmanager
def trunc_normal_replaced(replacement: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Within the block, `nn.init.trunc_normal_` calls `replacement(original, tensor, mean, std, a, b, generator=...)`."""
    init: Any = torch.nn.init
    original = init._no_grad_trunc_normal_
    init._no_grad_trunc_normal_ = partial(replacement, original)
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original
