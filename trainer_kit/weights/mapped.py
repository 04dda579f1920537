"""Groups of a state mapper that need whole inputs: read in the order of the files, applied when complete, freed when done.

On a mesh the first rank of a stage reads and applies, and the other ranks of the stage receive what it makes; each keeps its part. Before
editing: the order of the groups follows from the headers alone, so all ranks walk through them together; an error of the reading rank is
sent in place of the outputs, and every rank raises it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.mesh.layout import as_bytes
from trainer_kit.mesh.team import portable
from trainer_kit.weights.mapper import StateGroup, StateMapper
from trainer_kit.weights.plan import apply_group
from trainer_kit.weights.reader import ModelStateReader

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trainer_kit.mesh.context import DistributedContext

Outputs = dict[str, torch.Tensor]


def in_order_of_files(groups: Sequence[StateGroup], reader: ModelStateReader) -> list[StateGroup]:
    """The groups as they get complete; those without inputs first."""
    places = {name: (reader.files.index(reader.file_of[name]), reader.entries[name].start) for group in groups for name in group.inputs}
    return sorted(groups, key=lambda group: max((places[name] for name in group.inputs), default=(-1, 0)))


def made_here(
    reader: ModelStateReader, mapper: StateMapper, groups: Sequence[StateGroup], tell: Callable[[int], object]
) -> Iterator[Outputs]:
    """What each group gives, in order. Memory: the inputs of unfinished groups. tell: is told how many bytes were read."""
    group_of = {name: group for group in groups for name in group.inputs}
    waiting: dict[StateGroup, Outputs] = {}
    for group in groups:
        if not group.inputs:
            yield apply_group(mapper, group, {})
    for handle, name in reader.walk(group_of):
        group, entry = group_of[name], reader.entries[name]
        inputs = waiting.setdefault(group, {})
        inputs[name] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        reader.read(handle, name, inputs[name])
        tell(inputs[name].nbytes)
        is_complete = len(inputs) == len(group.inputs)
        del inputs
        if is_complete:
            yield apply_group(mapper, group, waiting.pop(group))


def received(groups: Sequence[StateGroup], make: Callable[[], Iterator[Outputs]], context: DistributedContext) -> Iterator[Outputs]:
    """`make()`, which runs on the first rank of a stage, on all ranks of the stage."""
    group = context.stage_group
    if group is None or not groups:
        yield from make()
    elif context.rank == context.first_rank_of_stage:
        yield from _sending(make(), group, context)
    else:
        for _ in groups:
            yield _receive(group, context)


def _sending(made: Iterator[Outputs], group: ProcessGroup, context: DistributedContext) -> Iterator[Outputs]:
    import torch.distributed as dist

    device = context.transfer_device(group)
    while True:
        try:
            outputs = next(made, None)
        except Exception as error:
            error.add_note(f"on rank {context.rank}:\n{traceback.format_exc()}")
            _tell([portable(error)], group, device)
            raise
        if outputs is None:
            return
        names = sorted(outputs)
        _tell([None, *((name, tuple(outputs[name].shape), outputs[name].dtype) for name in names)], group, device)
        for name in names:
            if outputs[name].numel():
                dist.broadcast(as_bytes(outputs[name].to(device).contiguous()), group=group, group_src=0)
        yield outputs


def _receive(group: ProcessGroup, context: DistributedContext) -> Outputs:
    import torch.distributed as dist

    device = context.transfer_device(group)
    error, *heads = _tell(None, group, device)
    if error is not None:
        raise error
    outputs = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape, dtype in heads}
    for tensor in outputs.values():
        if tensor.numel():
            dist.broadcast(as_bytes(tensor), group=group, group_src=0)
    return outputs


def _tell(value: list[Any] | None, group: ProcessGroup, device: torch.device) -> list[Any]:
    import torch.distributed as dist

    box: list[Any] = [value]
    dist.broadcast_object_list(box, group=group, group_src=0, device=device)
    told: list[Any] = box[0]
    return told

