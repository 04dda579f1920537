"""`log_softmax` and the losses on it for logits that are cut over the classes: each rank works on its classes, a few sums go around.

DTensor's own rules gather the logits for these. torch's `loss_parallel` does not, but must be active around the backward, and gives
`log_softmax` outside of a cross-entropy a wrong gradient. Here each operator is right by itself, for any placements, so it stays in place.
Before editing: these run below autograd, forward and backward are operators of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from trainer_kit.mesh.layout import is_distributed, layout_of, like
from trainer_kit.torch_private import handle_on_dtensors, local_tensor

_IGNORED = -100
_SUM = 2  # how operators number the reduction="sum"


@functools.cache
def enable_vocabulary_ops() -> None:
    """From now on in this process."""
    aten = torch.ops.aten
    handle_on_dtensors(
        {
            aten._log_softmax.default: _log_softmax,
            aten._log_softmax_backward_data.default: _log_softmax_backward_data,
            aten.nll_loss_forward.default: _nll_loss,
            aten.nll_loss2d_forward.default: _nll_loss,
            aten.nll_loss_backward.default: _nll_loss_backward,
            aten.nll_loss2d_backward.default: _nll_loss_backward,
        }
    )


def _log_softmax(_op: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    x, dim, to_float = _without_sums(args[0]), args[1], args[2]
    local = local_tensor(x).float() if to_float else local_tensor(x)
    shape = [1 if index == dim % x.dim() else size for index, size in enumerate(local.shape)]
    largest = local.amax(dim, keepdim=True) if local.shape[dim] else local.new_full(shape, -torch.inf)  # more ranks than classes
    shifted = local - _over_classes(x, dim, largest, "max")
    return like(x, (shifted - _over_classes(x, dim, shifted.exp().sum(dim, keepdim=True), "sum").log()).contiguous())


def _log_softmax_backward_data(_op: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    gradient, output, dim, dtype = args
    gradient = local_tensor(gradient.redistribute(placements=output.placements))
    total = _over_classes(output, dim, gradient.sum(dim, keepdim=True), "sum")
    return like(output, (gradient - local_tensor(output).exp() * total).to(dtype).contiguous())


def _nll_loss(op: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    x, target, weight, reduction, ignore_index = args
    x = _cut_over_classes_only(x)
    targets, weights = _local_targets(x, target, ignore_index), _local_weights(x, weight)
    # The operator on the classes of this rank, and sums over the ranks; a mean is their quotient.
    loss, total_weight = op(local_tensor(x), targets, weights, reduction and _SUM, _IGNORED)
    loss, total_weight = (_over_classes(x, _class_dim(x), value, "sum") for value in (loss, total_weight))
    if reduction not in (0, _SUM):
        loss = loss / total_weight
    return _replicated(x, loss), _replicated(x, total_weight)


def _nll_loss_backward(op: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    gradient, x, target, weight, reduction, ignore_index, total_weight = args
    x = _cut_over_classes_only(x)
    targets, weights = _local_targets(x, target, ignore_index), _local_weights(x, weight)
    return like(x, op(_whole(gradient), local_tensor(x), targets, weights, reduction, _IGNORED, _whole(total_weight)))


def _over_classes(x: Any, dim: int, value: torch.Tensor, reduction: str) -> torch.Tensor:
    """A value per rank, reduced over the ranks among which dim `dim` of `x` is cut."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    cut = [Partial(reduction) if placement.is_shard(dim % x.dim()) else Replicate() for placement in x.placements]
    return local_tensor(DTensor.from_local(value, x.device_mesh, cut, run_check=False).redistribute(placements=[Replicate()] * len(cut)))


def _without_sums(x: Any) -> Any:
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[Replicate() if placement.is_partial() else placement for placement in x.placements])


def _cut_over_classes_only(x: Any) -> Any:
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[p if p.is_shard(_class_dim(x)) else Replicate() for p in x.placements])


def _class_dim(x: Any) -> int:
    return 1 if x.dim() > 1 else 0


def _local_targets(x: Any, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Class numbers among those of this rank; the classes of other ranks are ignored, and numbers that are no class stay wrong."""
    layout, dim, target = layout_of(x), _class_dim(x), _whole(target)
    index = target - layout.offsets[dim]
    mine = (index >= 0) & (index < layout.sizes[dim])
    is_class = (target >= 0) & (target < layout.shape[dim])
    return index.masked_fill((target == ignore_index) | (is_class & ~mine), _IGNORED)


def _local_weights(x: Any, weight: torch.Tensor | None) -> torch.Tensor | None:
    layout, dim = layout_of(x), _class_dim(x)
    return None if weight is None else _whole(weight)[layout.offsets[dim] : layout.offsets[dim] + layout.sizes[dim]]


def _whole(tensor: Any) -> torch.Tensor:
    """The local tensor of one that is the same on every rank, or is made so."""
    if not is_distributed(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    return local_tensor(tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim))


def _replicated(x: Any, value: torch.Tensor) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(value, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)
