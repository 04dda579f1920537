"""Flat buckets: gradients that are summed over the same ranks lie in one buffer, which is reduced in one collective.

`.grad` of a bucketed parameter is a view of the buffer for the whole run, so nothing is copied in or out. What a user or a hook puts in
its place is copied into the buffer. Not here: when a bucket is reduced, see `synchroniser.py`.
Before editing: every rank of a group must cut its buckets alike, so sizes are taken from the whole tensors, never from the local ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.exceptions import ModelError
from trainer_kit.gradients.placements import dims_to_sum, summand
from trainer_kit.mesh.layout import is_distributed, like
from trainer_kit.parameters import ParameterRow
from trainer_kit.torch_private import local_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_BYTES = 25 * 1024**2  # as in torch's DistributedDataParallel: large enough to use the links, small enough to start early
FIRST_BYTES = 1024**2  # the first one starts while hardly anything of the backward has run
_ALIGNMENT = 64  # bytes: vector instructions and fused kernels want aligned memory

Key = tuple[tuple[str, ...], torch.dtype, torch.device]


class Place:
    """A parameter's part of a bucket.

    view: the local gradient. during: what `.grad` of the parameter is while backward adds to it. after: what it is once summed. All of them
    share memory; for a plain parameter they are one object.
    """

    __slots__ = ("_shown", "after", "during", "row", "seen", "view")

    def __init__(self, row: ParameterRow, view: torch.Tensor) -> None:
        self.row = row
        self.seen = 0  # the last pack whose last microbatch has gone through the parameter
        self.move(view)

    def move(self, view: torch.Tensor) -> None:
        """Use this memory from now on."""
        self.view, self.during, self.after = view, summand(self.row, view), like(self.row.parameter, view)
        self.show(self.during)

    def show(self, gradient: torch.Tensor) -> None:
        """Make it `.grad`, whatever is there."""
        self._shown = gradient
        if self.row.parameter.grad is not gradient:
            self.row.parameter.grad = gradient
        if self.row.local.grad is not self.view:
            self.row.local.grad = self.view

    def mend(self) -> None:
        """Copy what somebody put in the place of `.grad` into the buffer, None as zero, and make the view `.grad` again."""
        found, local = self.row.parameter.grad, self.row.local.grad
        if found is not self._shown:
            self._take(found)
        elif local is not self.view:
            self._take(local)
        else:
            return
        self.show(self._shown)

    def _take(self, found: torch.Tensor | None) -> None:
        if found is None:
            self.view.zero_()
        elif is_distributed(found):
            self.view.copy_(local_tensor(found.redistribute(placements=self._shown.placements)))  # type: ignore[attr-defined]
        else:
            self.view.copy_(found)

    def close(self) -> None:
        """The sum is there. Raises ModelError if a gradient was put in its place when it was under way already."""
        if self.row.parameter.grad is not self._shown and self.row.parameter.grad is not None:
            raise ModelError(
                f"the gradient of {self.row.name!r} was replaced after its sum over the ranks had begun, so it is that of this rank alone. "
                "Change gradients in on_gradients_ready, where they are summed and divided"
            )
        self.show(self.after)


class Bucket:
    """A flat buffer of gradients and its sum over the ranks of `group`.

    missing: how many of its parameters the last microbatch has not gone through yet.
    """

    def __init__(self, rows: Sequence[ParameterRow], group: ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
        self._group = group
        unit = _ALIGNMENT // dtype.itemsize
        sizes = [-(-row.local.numel() // unit) * unit for row in rows]
        self._offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        self._flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self._work: Any = None
        self.places = [Place(row, self._view(row, offset)) for row, offset in zip(rows, self._offsets, strict=True)]
        self.missing = len(rows)

    def _view(self, row: ParameterRow, offset: int) -> torch.Tensor:
        return torch.as_strided(self._flat, row.local.shape, _strides(row.local), offset)

    @property
    def started(self) -> bool:
        """Whether its sum is under way."""
        return self._work is not None

    def start(self) -> None:
        """Start the sum over the ranks."""
        import torch.distributed as dist

        for place in self.places:
            place.mend()
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait for the sum, and show it as the gradients."""
        self._work.wait()
        self._work = None
        for place in self.places:
            place.close()

    def abandon(self) -> Any:
        """Give up a sum that is under way, without waiting for ranks that may never come; it keeps its buffer and gets another one."""
        work, self._work = self._work, None
        self._flat = torch.zeros_like(self._flat)
        for place, offset in zip(self.places, self._offsets, strict=True):
            place.move(self._view(place.row, offset))
        return work

    def zero(self) -> None:
        """Make the gradients zero; they stay where they are."""
        self._flat.zero_()
        for place in self.places:
            place.show(place.during)


def _strides(local: torch.Tensor) -> Sequence[int]:
    """Those of the parameter if it lies densely in any order of dims, as kernels want the same for both; else row-major ones."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(local.stride(), local.shape, strict=True) if size != 1):
        if stride != expected:
            return [math.prod(local.shape[dim + 1 :]) for dim in range(local.dim())]
        expected *= size
    return local.stride()


@dataclass(slots=True)
class _Plan:
    """A bucket to be: its rows, in the order of backward, and the position of the last of them in it."""

    key: Key
    max_bytes: int
    rows: list[ParameterRow] = field(default_factory=list)
    num_bytes: int = 0
    last: int = 0


def plan_buckets(rows: Iterable[ParameterRow], groups: Mapping[tuple[str, ...], ProcessGroup]) -> list[Bucket]:
    """Buckets for these parameters, in the order in which backward should fill them: that of the parameters, reversed.

    groups: over which ranks to sum, by mesh dimensions.
    """
    plans: list[_Plan] = []
    filling: dict[Key, _Plan] = {}
    for position, row in enumerate(reversed(list(rows))):
        dtype = row.local.grad_dtype or row.local.dtype
        key = (dims_to_sum(row), dtype, row.local.device)
        size = math.prod(row.layout.shape) // row.layout.num_shards * dtype.itemsize
        plan = filling.get(key)
        if plan is None or plan.num_bytes + size > plan.max_bytes:
            plan = filling[key] = _Plan(key, MAX_BYTES if key in filling else FIRST_BYTES)
            plans.append(plan)
        plan.rows.append(row)
        plan.num_bytes += size
        plan.last = position
    plans.sort(key=lambda plan: plan.last)
    return [Bucket(plan.rows, groups[plan.key[0]], *plan.key[1:]) for plan in plans]
