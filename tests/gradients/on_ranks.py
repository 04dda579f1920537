"""What the jobs of the tests on ranks share: gradients of a module on a mesh, and a pack through it. Losses are sums, as in training."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer_kit import MeshStrategy
from trainer_kit.gradients import Gradients, buckets
from trainer_kit.parallel import FSDPSync, fsdp_units
from trainer_kit.parameters import ParameterTable


@contextmanager
def context_of(**degrees: Any) -> Iterator[Any]:
    """A mesh over all ranks of the job."""
    context = MeshStrategy(**degrees).build()
    try:
        yield context
    finally:
        context.close()


def gradients_of(module: nn.Module, context: Any, *, mode: str = "microbatch", **settings: Any) -> Gradients:
    """The gradients of a module that is distributed already."""
    units = fsdp_units(module)
    sync = FSDPSync(units, mode) if units else None
    return Gradients(ParameterTable([module]).trainable(), context=context, sync=sync, **settings)


def run_pack(
    gradients: Gradients, losses: Sequence[Callable[[], torch.Tensor]], weight: float = 1, flag: torch.Tensor | None = None
) -> None:
    """A pack of one microbatch per callable, which makes its loss; then everything up to the division."""
    for index, loss in enumerate(losses):
        gradients.begin_microbatch(index == len(losses) - 1)
        loss().backward()
    gradients.finish(weight, flag)


@contextmanager
def counted(name: str = "all_reduce") -> Iterator[list[int]]:
    """The sizes of the tensors given to a function of torch.distributed meanwhile."""
    real, sizes = getattr(dist, name), []

    def count(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    setattr(dist, name, count)
    try:
        yield sizes
    finally:
        setattr(dist, name, real)


@contextmanager
def bucket_sizes(first: int, others: int) -> Iterator[None]:
    """So many bytes per bucket meanwhile; 1 means a bucket per parameter."""
    before = buckets.FIRST_BYTES, buckets.MAX_BYTES
    buckets.FIRST_BYTES, buckets.MAX_BYTES = first, others
    try:
        yield
    finally:
        buckets.FIRST_BYTES, buckets.MAX_BYTES = before


class Weights(nn.Module):
    """Parameters by name; `self(a=2.0)` is the sum of the elements of the named ones, each times its factor."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, **factors: Any) -> torch.Tensor:
        return torch.stack([(getattr(self, name) * factor).sum() for name, factor in factors.items()]).sum()


class NaNBackward(torch.autograd.Function):
    """A gradient that is nan after a finite forward (B56)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan")
