"""Weights that several pipeline stages hold, such as an embedding that is the head too: one value, and one gradient, the sum of all.

Within a stage a tied weight is one parameter with two names. Between stages it is a parameter in each, under one canonical name: the one
that the first of these stages has for it. Values come from that stage, gradients are summed over all of them in the order of the stages, so
that every copy gets the same update, bit by bit. Before editing: every method is a collective of the ranks of a pipeline, which go through
the weights in the same order; two stages may also be on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.layout import as_bytes

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext
    from trainer_kit.parameters import ParameterRow


def tied_parameters(module: nn.Module) -> Mapping[str, str]:
    """What a stage says of its ties: its names of parameters -> the names that an earlier stage has for them."""
    declared = getattr(module, "tied_parameters", None)
    if not callable(declared):
        return {}
    found = declared()
    names = dict(module.named_parameters(remove_duplicate=False))
    if not isinstance(found, Mapping) or any(name not in names for name in found):
        raise ModelError(
            f"tied_parameters() of {type(module).__name__} returned {found!r}, expected a mapping from names of parameters of this "
            "stage to their names in an earlier stage"
        )
    return found


class TiedWeights:
    """The rows of this rank whose weights other stages hold too."""

    def __init__(self, rows: Sequence[ParameterRow], context: DistributedContext) -> None:
        self._context = context
        self._rows: dict[str, dict[int, ParameterRow]] = {}  # by name, in one order on all ranks, and stage
        for row in sorted(rows, key=lambda row: row.name):
            if len(row.stages) > 1:
                self._rows.setdefault(row.name, {})[row.stage] = row
        self._group = context.pipeline_group  # asked for by every rank, as the first to ask makes it

    @torch.no_grad()
    def share_values(self, given: Mapping[str, Sequence[int]] | None = None) -> list[str]:
        """Give all copies the values of the first one, or of the first of the stages that were `given` some, by the name of the weight.

        Returns the names of those for which others of these stages have other values on this rank.
        """
        differing = []
        for name, values in self._of_all_stages(self._rows, lambda row: row.local.detach()).items():
            rows = self._rows[name].values()
            first, *others = (given or {}).get(name) or next(iter(rows)).stages[:1]
            if not all(same_bits(values[first], values[other]) for other in others):
                differing.append(name)
            for row in rows:
                row.local.copy_(values[first])
        return differing

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Make the gradient of each copy, `row.local.grad`, that of all of them."""
        trainable = [name for name, rows in self._rows.items() if next(iter(rows.values())).trainable]
        for name, gradients in self._of_all_stages(trainable, _gradient).items():
            first, *others = (gradients[stage] for stage in sorted(gradients))
            total = first.clone()
            for gradient in others:
                total += gradient
            for row in self._rows[name].values():
                _gradient(row).copy_(total)

    def _of_all_stages(self, names: Iterable[str], tensor_of: Callable[[ParameterRow], torch.Tensor]) -> dict[str, dict[int, torch.Tensor]]:
        """For each weight the tensor of every stage that holds it. Each rank sends its own to all ranks with another copy."""
        import torch.distributed as dist

        layout, here = self._context.stage_layout, self._context.pipeline_rank
        found: dict[str, dict[int, torch.Tensor]] = {}
        ops = []
        for name in names:
            rows = self._rows[name]
            mine = {stage: tensor_of(row).contiguous() for stage, row in rows.items()}
            like, stages = next(iter(mine.values())), next(iter(rows.values())).stages
            others = sorted({layout.rank_of(stage) for stage in stages} - {here})
            tensors = {stage: mine[stage] if stage in mine else torch.empty_like(like) for stage in stages}
            for stage, tensor in tensors.items():
                if not tensor.numel():
                    continue
                if stage in mine:
                    ops += [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=peer) for peer in others]
                else:
                    ops.append(dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=layout.rank_of(stage)))
            found[name] = tensors
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit by bit: a NaN equals itself."""
    return torch.equal(as_bytes(one.contiguous()), as_bytes(other.contiguous()))


def _gradient(row: ParameterRow) -> torch.Tensor:
    gradient = row.local.grad
    assert gradient is not None, "the synchroniser has looked for it"
    return gradient
