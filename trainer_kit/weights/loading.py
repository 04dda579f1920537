"""Loading a stored model state into tensors that already exist, file by file.

The whole load is planned and checked first (`plan.py`). Then each needed tensor is read once, in the order in which it lies on disk:
straight into the target's memory where bytes and memory agree, otherwise through one staging tensor. Of a target that is cut over ranks
each rank reads its own part; tensors that go through a group of the mapper are read whole, and each rank keeps its part.

Before editing: memory is the staging of one tensor plus the inputs of unfinished groups. Keep no other reference to a tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import torch

from trainer_kit.exceptions import CheckpointError
from trainer_kit.mesh.layout import Layout, layout_of, local_of
from trainer_kit.mesh.team import Team
from trainer_kit.ties import same_bits
from trainer_kit.weights.mapper import StateGroup, StateMapper
from trainer_kit.weights.plan import LoadPlan, LoadReport, apply_group, check_fit, plan_load
from trainer_kit.weights.reader import ModelStateReader
from trainer_kit.weights.regions import is_plain

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
    report = check_fit(reader.folder.url, reader.entries, [plan.findings], allow_missing, allow_unexpected)
    with torch.no_grad():
        _Stream(reader, mapper, plan, targets).run()
    return report


@torch.no_grad()
def load_stages(
    path: str | os.PathLike[str], parts: Callable[[], Sequence[tuple[StateMapper, StageState]]], context: DistributedContext
) -> dict[str, list[int]]:
    """`load_model_state` of the whole model: `parts` gives the mapper and the state of each stage of this rank. A collective.

    Returns which stages the files gave each tensor to: a tied weight that stages share may be stored for one of them alone.
    Raises what `load_model_state` does, on every rank.
    """
    team = Team.of(context)

    def plan_all() -> tuple[ModelStateReader, list[tuple[StateMapper, StageState, LoadPlan]]]:
        reader = ModelStateReader(path)
        return reader, [(mapper, state, plan_load(reader.entries, mapper, state.tensors, state.aliases)) for mapper, state in parts()]

    reader, plans = team.everywhere(plan_all)
    is_first = context.rank == context.first_rank_of_stage
    told = team.exchange({state.stage: plan.findings for _, state, plan in plans} if is_first else {})
    by_stage = {stage: findings for of_rank in told for stage, findings in of_rank.items()}
    found = {stage: by_stage[stage] for stage in sorted(by_stage)}
    team.everywhere(lambda: check_fit(reader.folder.url, reader.entries, list(found.values())))

    def run_all() -> None:
        for mapper, state, plan in plans:
            _Stream(reader, mapper, plan, state.tensors).run()

    team.everywhere(run_all)
    given: dict[str, list[int]] = {}
    for stage, findings in found.items():
        for name in findings.covered:
            given.setdefault(name, []).append(stage)
    return given


class _Stream:
    """One pass over the files."""

    def __init__(self, reader: ModelStateReader, mapper: StateMapper, plan: LoadPlan, targets: Mapping[str, torch.Tensor]) -> None:
        self._reader = reader
        self._mapper = mapper
        self._plan = plan
        self._layouts = {name: layout_of(target) for name, target in targets.items()}
        self._locals = {name: local_of(target) for name, target in targets.items()}
        self._filled: dict[str, str] = {}  # target name: the output that filled it
        self._group_of: dict[str, StateGroup] = {name: group for group in plan.mapped for name in group.inputs}
        self._waiting: dict[StateGroup, dict[str, torch.Tensor]] = {}

    def run(self) -> None:
        for group in self._plan.mapped:
            if not group.inputs:
                self._finish(group, {})
        for file in self._reader.files:
            needed = [
                entry for name, entry in self._reader.entries.items()
                if self._reader.file_of[name] == file and (name in self._plan.copied or name in self._group_of)
            ]  # fmt: skip
            if not needed:
                continue
            with self._reader.open(file) as handle:
                for entry in sorted(needed, key=lambda entry: entry.start):
                    self._take(handle, entry.name)

    def _take(self, handle: IO[Any], name: str) -> None:
        if name in self._plan.copied:
            self._copy(handle, name)
            return
        group = self._group_of[name]
        inputs = self._waiting.setdefault(group, {})
        inputs[name] = self._read(handle, name, self._reader.entries[name].shape)
        if len(inputs) == len(group.inputs):
            self._finish(group, self._waiting.pop(group))

    def _copy(self, handle: IO[Any], name: str) -> None:
        by_part: dict[Layout, list[str]] = {}
        for output in self._plan.copied[name]:
            by_part.setdefault(self._layouts[self._plan.canonical[output]], []).append(output)
        for layout, outputs in by_part.items():
            first = self._plan.canonical[outputs[0]]
            target = self._locals[first]
            if first not in self._filled and _takes_bytes(target, self._reader.entries[name].dtype):
                self._reader.read(handle, name, target, layout.offsets)
                self._filled[first] = outputs[0]
                part, outputs = target, outputs[1:]
            else:
                part = self._read(handle, name, layout.sizes, layout.offsets)
            for output in outputs:
                self._put(output, part)

    def _read(self, handle: IO[Any], name: str, sizes: Sequence[int], offsets: Sequence[int] | None = None) -> torch.Tensor:
        staging = torch.empty(tuple(sizes), dtype=self._reader.entries[name].dtype, device="cpu")
        self._reader.read(handle, name, staging, offsets)
        return staging

    def _finish(self, group: StateGroup, inputs: dict[str, torch.Tensor]) -> None:
        for output, tensor in apply_group(self._mapper, group, inputs).items():
            self._put(output, tensor[self._layouts[self._plan.canonical[output]].box])

    def _put(self, output: str, part: torch.Tensor) -> None:
        """Take over this rank's part of an output."""
        name = self._plan.canonical[output]
        target = self._locals[name]
        if name not in self._filled:
            target.copy_(part)
            self._filled[name] = output
        elif not same_bits(target, part.to(device=target.device, dtype=target.dtype)):
            raise CheckpointError(
                f"{self._reader.folder.url} holds different values for {self._filled[name]!r} and {output!r}, which are one tied weight of "
                f"the model ({name!r}); untie the model, or remove one of the two from the files"
            )


def _takes_bytes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return type(target) is torch.Tensor and target.dtype == dtype and is_plain(target)
