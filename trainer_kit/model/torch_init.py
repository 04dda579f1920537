"""What initialisation needs of torch beyond its public interface, each with its reason.

`OperationMode`: a dispatch mode is the only way to see in-place operations on `.data`, views and `nn.init` alike.
`trunc_normal_replaced`: `nn.init.trunc_normal_` rejects and redraws in a loop that depends on the values; it must be seen as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OperationMode(TorchDispatchMode):
    """A dispatch mode that does not bring in the compiler: torch imports it (seconds) to keep it out of the mode's own code."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


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
