"""Loading a stored model state into tensors that already exist, file by file.

The whole load is planned and checked first (`plan.py`). Then each needed tensor is read once, in the order in which it lies on disk. Where
a target is a mosaic of boxes of stored tensors, each rank reads the boxes of its own part straight into the target's memory, a few
megabytes at a time if dtypes differ; where a mapper needs whole tensors, one rank of a stage reads them (`mapped.py`).

Before editing: memory is one slab of a conversion plus the inputs of unfinished groups. Keep no other reference to a tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from trainer_kit.exceptions import CheckpointError
from trainer_kit.mesh.layout import box_index, layout_of, local_of
from trainer_kit.mesh.team import Team
from trainer_kit.ties import same_bits
from trainer_kit.weights.format import num_bytes
from trainer_kit.weights.loading_bar import LoadingBar
from trainer_kit.weights.mapped import in_order_of_files, made_here, received
from trainer_kit.weights.mapper import StateMapper
from trainer_kit.weights.pieces import Piece
from trainer_kit.weights.plan import LoadPlan, LoadReport, check_fit, plan_load
from trainer_kit.weights.reader import ModelStateReader
from trainer_kit.weights.regions import box_slabs

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext
    from trainer_kit.weights.stages import StageState


def load_model_state(
    path: str | os.PathLike[str],
    mapper: StateMapper,
    targets: Mapping[str, torch.Tensor],
    *,
    aliases: Mapping[str, str] | None = None,
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
) -> LoadReport:
    """Fill `targets`, in place, from the model state at `path` (a folder, a file, or an fsspec URL of one).

    `aliases` maps further names of tied weights to their canonical one, which is the one in `targets`; the files may hold either name,
    or both if they are equal. `allow_missing` and `allow_unexpected` are name patterns (`*`, `?`, `[...]`); what they let pass is
    returned. Floating point is converted to the target's dtype, nothing else is. A target may be a DTensor: nothing is communicated.

    Raises CheckpointError naming everything that does not fit, before any data is read.
    """
    reader = ModelStateReader(path)
    plan = plan_load(reader.entries, mapper, targets, aliases or {})
    report = check_fit(reader.url, reader.entries, [plan.findings], allow_missing, allow_unexpected)
    stream = _Stream(reader, mapper, plan, targets)
    with torch.no_grad(), LoadingBar(reader.url, stream.num_bytes()) as tell:
        stream.read_mosaics(tell)
        stream.take_mapped(None, tell)
        stream.compare_second_names()
    return report


class StageLoad(NamedTuple):
    """What a stage loads: its mapper, its tensors, and patterns of names that may be missing in the files or unused by the model."""

    mapper: StateMapper
    state: StageState
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()


@torch.no_grad()
def load_stages(
    path: str | os.PathLike[str], parts: Callable[[], Sequence[StageLoad]], context: DistributedContext
) -> tuple[LoadReport, dict[str, list[int]]]:
    """`load_model_state` of the whole model: `parts` are the stages of this rank. A collective.

    Returns, with the report, which stages the files gave each tensor to: a tied weight that stages share may be stored for one of them
    alone. Raises what `load_model_state` does, on every rank.
    """
    team = Team.of(context)

    def plan_all() -> tuple[ModelStateReader, list[tuple[StageLoad, LoadPlan]]]:
        reader = ModelStateReader(path)
        return reader, [(part, plan_load(reader.entries, part.mapper, part.state.tensors, part.state.aliases)) for part in parts()]

    reader, plans = team.everywhere(plan_all)
    is_first = context.rank == context.first_rank_of_stage
    known = {part.state.stage: (plan.findings, part.allow_missing, part.allow_unexpected) for part, plan in plans}
    of_model = {stage: told for of_rank in team.exchange(known if is_first else {}) for stage, told in of_rank.items()}
    found = {stage: of_model[stage][0] for stage in sorted(of_model)}
    missing, unexpected = ([name for told in of_model.values() for name in told[index]] for index in (1, 2))
    report = team.everywhere(lambda: check_fit(reader.url, reader.entries, list(found.values()), missing, unexpected))

    streams = [_Stream(reader, part.mapper, plan, part.state.tensors) for part, plan in plans]
    size = sum(stream.num_bytes(reads_mapped=is_first) for stream in streams)
    _ = context.stage_group  # making it takes all ranks, and not every stage may need it
    with LoadingBar(reader.url, size, is_shown=context.local_rank == 0) as tell:
        for act in (
            lambda stream: stream.read_mosaics(tell),
            lambda stream: stream.take_mapped(context, tell),
            lambda stream: stream.compare_second_names(),
        ):
            team.everywhere(partial(_each, streams, act))
    given: dict[str, list[int]] = {}
    for stage, findings in found.items():
        for name in findings.covered:
            given.setdefault(name, []).append(stage)
    return report, given


def _each(streams: Sequence[_Stream], act: Callable[[_Stream], None]) -> None:
    for stream in streams:
        act(stream)


class _Stream:
    """One pass over the files: mosaics first, read by each rank for itself; then what the mapper makes; then second names of ties."""

    def __init__(self, reader: ModelStateReader, mapper: StateMapper, plan: LoadPlan, targets: Mapping[str, torch.Tensor]) -> None:
        self._reader, self._mapper, self._plan = reader, mapper, plan
        self._layouts = {name: layout_of(target) for name, target in targets.items()}
        self._locals = {name: local_of(target) for name, target in targets.items()}
        self._filled: dict[str, str] = {}  # target name: the output that fills it
        for output in plan.mosaics:
            self._filled.setdefault(plan.canonical[output], output)

    def num_bytes(self, *, reads_mapped: bool = True) -> int:
        """What the passes will tell of."""
        entries = [self._reader.entries[name] for group in self._plan.mapped for name in group.inputs] if reads_mapped else []
        return sum(self._locals[name].nbytes for name in self._filled) + sum(num_bytes(entry.dtype, entry.shape) for entry in entries)

    def read_mosaics(self, tell: Callable[[int], object]) -> None:
        """Fill the targets that are put together of boxes of stored tensors."""
        for handle, piece, box, _ in self._boxes(self._filled.values()):
            self._reader.read_into(handle, piece.source, box, piece.source_offsets)
            tell(box.nbytes)

    def take_mapped(self, context: DistributedContext | None, tell: Callable[[int], object]) -> None:
        """Fill what the mapper makes of whole tensors. With a context a collective of the stage."""
        groups = in_order_of_files(self._plan.mapped, self._reader)
        make = partial(made_here, self._reader, self._mapper, groups, tell)
        failure: CheckpointError | None = None
        for outputs in make() if context is None else received(groups, make, context):
            try:
                self._put_all(outputs)
            except CheckpointError as error:  # raised when the other ranks of the stage have got theirs
                failure = failure or error
        if failure is not None:
            raise failure

    def compare_second_names(self) -> None:
        """Read what is stored again under another name of a tied weight, and hold it against the first."""
        rest = [output for output in self._plan.mosaics if self._filled[self._plan.canonical[output]] != output]
        for handle, piece, box, output in self._boxes(rest):
            for part, offsets in box_slabs(box, piece.source_offsets):
                staging = torch.empty(part.shape, dtype=part.dtype, device="cpu")
                self._reader.read_into(handle, piece.source, staging, offsets)
                self._compare(output, part, staging)

    def _boxes(self, outputs: Iterable[str]) -> Iterator[tuple[IO[Any], Piece, torch.Tensor, str]]:
        """This rank's parts of the pieces of these outputs, in the order of the files: file, piece, memory, output."""
        by_source: dict[str, list[tuple[str, Piece]]] = {}
        for output in outputs:
            layout = self._layouts[self._plan.canonical[output]]
            for piece in self._plan.mosaics[output]:
                if (part := piece.clip(layout.offsets, layout.sizes)) is not None:
                    by_source.setdefault(part.source, []).append((output, part))
        for handle, name in self._reader.walk(by_source):
            for output, piece in by_source[name]:
                target = self._plan.canonical[output]
                starts = (place - first for place, first in zip(piece.offsets, self._layouts[target].offsets, strict=True))
                box = self._locals[target][box_index(starts, piece.output_sizes)]
                yield handle, piece, piece.in_source_dims(box), output

    def _put_all(self, outputs: dict[str, torch.Tensor]) -> None:
        """Take over this rank's parts, and let go of the whole tensors before the next group is read."""
        while outputs:
            output, tensor = outputs.popitem()
            name = self._plan.canonical[output]
            part = tensor[self._layouts[name].box]
            if name not in self._filled:
                self._locals[name].copy_(part)
                self._filled[name] = output
            else:
                self._compare(output, self._locals[name], part)

    def _compare(self, output: str, target: torch.Tensor, part: torch.Tensor) -> None:
        if not same_bits(target, part.to(device=target.device, dtype=target.dtype)):
            name = self._plan.canonical[output]
            raise CheckpointError(
                f"{self._reader.url} holds different values for {self._filled[name]!r} and {output!r}, which are one tied weight of "
                f"the model ({name!r}); untie the model, or remove one of the two from the files"
            )
