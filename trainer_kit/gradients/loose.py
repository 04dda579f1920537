"""Gradients that lie in no bucket: FSDP or autograd makes them anew in each step, so they are looked up when they are needed.

A missing one, of a parameter that nothing used, counts as zero. Not here: gradients that only the synchroniser sums, see `buckets.py`.
Before editing: the tensor at `row.local.grad` is the local part of the DTensor at `row.parameter.grad`, the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from trainer_kit.gradients.placements import in_place_of
from trainer_kit.mesh.layout import is_distributed, like
from trainer_kit.parameters import ParameterRow
from trainer_kit.torch_private import local_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LooseGradient:
    """The gradient of a parameter outside of the buckets."""

    __slots__ = ("_distributed", "_known", "_shown", "row")

    def __init__(self, row: ParameterRow) -> None:
        self.row = row
        self._distributed = is_distributed(row.parameter)
        self._shown: torch.Tensor | None = None  # what was at row.parameter.grad when it was looked up last
        self._known: torch.Tensor | None = None  # and at row.local.grad

    def look_up(self) -> None:
        """Bring `row.local.grad` up to date with what autograd, FSDP or a user put at `row.parameter.grad`, and the other way round."""
        parameter, local = self.row.parameter, self.row.local
        gradient = parameter.grad
        if gradient is not None and gradient is self._shown and local.grad is self._known:
            return
        if gradient is None:
            zeros = torch.zeros_like(local, dtype=local.grad_dtype)
            gradient = parameter.grad = like(parameter, zeros) if self._distributed else zeros
        if not self._distributed:
            return
        placed = in_place_of(self.row, gradient)
        if placed is not gradient:
            parameter.grad = placed
        inner = local_tensor(placed)
        if local.grad is not self._known and local.grad is not inner:  # by a user who works with the parameters of the optimizer
            inner.zero_() if local.grad is None else inner.copy_(local.grad)
        local.grad = inner
        self._shown, self._known = placed, inner

    def drop(self) -> None:
        """Forget the gradient; the next backward makes a new one."""
        self.row.parameter.grad = self.row.local.grad = self._shown = self._known = None


def start_sum(gradients: Sequence[LooseGradient], group: ProcessGroup) -> Callable[[], None]:
    """Start one sum of local gradients of one dtype over the ranks of a group; the callable waits and puts the result in place."""
    import torch.distributed as dist

    parts = [gradient.row.local.grad for gradient in gradients if gradient.row.local.grad is not None]
    flat = torch.cat([part.reshape(-1) for part in parts])
    work = dist.all_reduce(flat, group=group, async_op=True)

    def finish() -> None:
        work.wait()
        sums = flat.split([part.numel() for part in parts])
        torch._foreach_copy_(parts, [total.view_as(part) for total, part in zip(sums, parts, strict=True)])

    return finish
