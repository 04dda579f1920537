"""What a load will do, decided from names, shapes and dtypes alone: which groups run, and everything that does not fit.

No tensor data is read here. `loading.py` carries the plan out. With pipeline stages each has a plan of its own, and what one does not use
another one may: `check_fit` looks at the findings of all.

Before editing: a target counts as covered if the group of its canonical name, or of one of its aliases, has all its inputs in the
files. Groups whose inputs are there always run, also for a second name of a tied weight: that is how a contradiction is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from trainer_kit.exceptions import CheckpointError, ConfigurationError
from trainer_kit.weights.format import TensorEntry
from trainer_kit.weights.mapper import StateGroup, StateMapper, check_groups
from trainer_kit.weights.pieces import Piece, Shape, whole

MAX_LISTED = 100


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load left alone because it was allowed to: targets without a stored tensor, and stored tensors without a use."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """How files and targets fit, in values that go to other ranks.

    used: names of stored tensors; covered: targets that are filled; missing: the other targets, with the stored names that they lack, None
    if no group makes them; unknown: what the mapper makes and no target takes; misfits: texts about shapes and dtypes.
    """

    used: frozenset[str]
    covered: frozenset[str]
    missing: Mapping[str, list[str] | None]
    unknown: Sequence[str]
    misfits: Sequence[str]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`mosaics`: output to its pieces of stored tensors, read straight; `mapped`: groups to apply; `canonical`: output to its target."""

    mosaics: Mapping[str, Sequence[Piece]]
    mapped: Sequence[StateGroup]
    canonical: Mapping[str, str]
    findings: Findings


def plan_load(
    entries: Mapping[str, TensorEntry],
    mapper: StateMapper,
    targets: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    *,
    allow_meta: bool = False,
) -> LoadPlan:
    """Raises ConfigurationError for bad arguments; what does not fit is in the findings. allow_meta: targets need no memory (a dry run)."""
    _check_targets(targets, aliases, allow_meta)
    groups = list(mapper.groups())
    second_names = _unlisted(groups, aliases)
    groups += [StateGroup(frozenset((name,)), frozenset((name,))) for name in second_names]
    check_groups(groups)

    canonical = {name: aliases.get(name, name) for group in groups for name in group.outputs}
    ready = [group for group in groups if group.inputs <= entries.keys()]
    covered = {canonical[name] for group in ready for name in group.outputs}
    used = entries.keys() & {name for group in groups for name in group.inputs}
    missing = _lacking([name for name in targets if name not in covered], groups, canonical, entries)
    unknown = sorted(name for name, target in canonical.items() if target not in targets)
    tried = [_try(group, mapper, entries, second_names) for group in ready if group.outputs]
    mosaics = {name: pieces for attempt in tried if attempt.is_mosaic for name, pieces in sorted(attempt.pieces.items())}
    mapped = [attempt.group for attempt in tried if not attempt.is_mosaic and not attempt.fault]
    misfits = [attempt.fault for attempt in tried if attempt.fault]
    for name, (shape, dtype) in [found for attempt in tried for found in attempt.outputs.items()]:
        target = targets.get(canonical[name])
        if target is not None and (text := _misfit(shape, dtype, target)):
            misfits.append(f"{name!r} {text}")
    findings = Findings(frozenset(used), frozenset(covered & targets.keys()), missing, unknown, misfits)
    return LoadPlan(mosaics, mapped, canonical, findings)


def check_fit(
    label: str,
    stored: Iterable[str],
    found: Sequence[Findings],
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
) -> LoadReport:
    """Raises CheckpointError with every missing, unexpected, unknown and mis-shaped name. stored: names in the files; found: by stage."""
    covered = frozenset().union(*(findings.covered for findings in found))  # of a tied weight that stages share, one copy is enough
    missing: dict[str, list[str] | None] = {}
    for findings in found:
        for name, lacking in findings.missing.items():
            if name not in covered:
                missing[name] = lacking if missing.get(name) is None else [*(missing[name] or ()), *(lacking or ())]
    unexpected = sorted(set(stored).difference(*(findings.used for findings in found)))
    unknown = [name for findings in found for name in findings.unknown]
    elsewhere = {name for name in unknown if name in covered or name in missing}
    unfit = {
        "missing (in the model, not in the files)": [_explain(name, missing[name]) for name in _not_allowed(missing, allow_missing)],
        "unexpected (in the files, used by nothing)": [repr(name) for name in _not_allowed(unexpected, allow_unexpected)],
        "unknown to the model (the mapper makes them)": [repr(name) for name in unknown if name not in elsewhere],
        "of another stage than that whose mapper makes them (load_mapper(ctx) is for ctx.stage alone)": sorted(map(repr, elsewhere)),
        "of another shape or dtype": list(dict.fromkeys(text for findings in found for text in findings.misfits)),
    }
    if any(unfit.values()):
        raise CheckpointError(_message(label, unfit))
    return LoadReport(tuple(missing), tuple(unexpected))


def _check_targets(targets: Mapping[str, torch.Tensor], aliases: Mapping[str, str], allow_meta: bool) -> None:
    for alias, name in aliases.items():
        if alias in targets or name not in targets:
            raise ConfigurationError(f"aliases maps {alias!r} to {name!r}; a target was expected as value, and no target as key")
    lost = [] if allow_meta else [name for name, target in targets.items() if target.device.type == "meta"]
    if lost:
        raise ConfigurationError(f"targets without memory (on the meta device): {', '.join(lost)}; allocate them before loading")


def _unlisted(groups: Sequence[StateGroup], aliases: Mapping[str, str]) -> list[str]:
    """Either name of a tied weight may be in the files; a mapper that knows only one of them need not list the other."""
    known = {name for group in groups for name in (*group.inputs, *group.outputs)}
    return [name for name in dict.fromkeys((*aliases, *aliases.values())) if name not in known]


def _not_allowed(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def _lacking(
    missing: Sequence[str], groups: Sequence[StateGroup], canonical: Mapping[str, str], entries: Mapping[str, TensorEntry]
) -> dict[str, list[str] | None]:
    """Each missing target with the inputs that it lacks."""
    if not missing:
        return {}
    lacking: dict[str, list[str]] = {}
    for group in groups:
        for output in group.outputs:
            lacking.setdefault(canonical[output], []).extend(sorted(group.inputs - entries.keys()))
    return {name: lacking.get(name) for name in missing}


def _explain(name: str, lacking: Sequence[str] | None) -> str:
    """A missing target with what it would be made from, where that has another name."""
    if lacking is None:
        return f"{name!r} (no group of the mapper makes it)"
    others = [repr(lack) for lack in dict.fromkeys(lacking) if lack != name]
    return f"{name!r} (made from {', '.join(others)})" if others else repr(name)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What a group gives for the stored shapes: shape and dtype of its outputs, and the pieces of all of them if they are mosaics; or why
    it fails."""

    group: StateGroup
    outputs: Mapping[str, tuple[Shape, torch.dtype]]
    pieces: Mapping[str, Sequence[Piece]]
    fault: str = ""

    @property
    def is_mosaic(self) -> bool:
        return bool(self.pieces)


def _try(group: StateGroup, mapper: StateMapper, entries: Mapping[str, TensorEntry], second_names: Sequence[str]) -> _Attempt:
    shapes = {name: entries[name].shape for name in sorted(group.inputs)}
    try:
        if not group.inputs.isdisjoint(second_names):  # of a tied weight: the mapper does not know it
            pieces: Mapping[str, Sequence[Piece]] = {name: [whole(name, shape)] for name, shape in shapes.items()}
        else:
            pieces = mapper.pieces(shapes)
        dtypes = {name: {entries[piece.source].dtype for piece in parts} for name, parts in pieces.items()}
        if pieces.keys() == group.outputs and all(len(found) == 1 for found in dtypes.values()):
            return _Attempt(group, {name: (_shape_of(mapper, name, pieces[name]), min(dtypes[name], key=str)) for name in pieces}, pieces)
        # Without pieces the mapper itself must say; its first meta operation makes torch import much, so it is not asked for nothing.
        inputs = {name: torch.empty(shape, dtype=entries[name].dtype, device="meta") for name, shape in shapes.items()}
        outputs = apply_group(mapper, group, inputs)
    except (RuntimeError, ValueError, IndexError) as error:
        told = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        return _Attempt(group, {}, {}, f"{', '.join(sorted(map(repr, group.outputs)))} cannot be made from {told}: {error}")
    return _Attempt(group, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in outputs.items()}, {})


def _shape_of(mapper: StateMapper, name: str, pieces: Sequence[Piece]) -> Shape:
    """The shape that the pieces make up."""
    ends = [[offset + size for offset, size in zip(piece.offsets, piece.output_sizes, strict=True)] for piece in pieces]
    shape = tuple(max(of_dim) for of_dim in zip(*ends, strict=True))
    if sum(math.prod(piece.output_sizes) for piece in pieces) != math.prod(shape):
        raise ConfigurationError(f"{mapper!r} gave pieces of {name!r} that do not make up a tensor of shape {list(shape)}")
    return shape


def _misfit(shape: tuple[int, ...], dtype: torch.dtype, target: torch.Tensor) -> str:
    if shape != tuple(target.shape):
        return f"is {list(shape)} in the files, {list(target.shape)} in the model"
    if dtype != target.dtype and not (dtype.is_floating_point and target.dtype.is_floating_point):
        return f"is {dtype} in the files, {target.dtype} in the model (only floating point is converted)"
    return ""


def apply_group(mapper: StateMapper, group: StateGroup, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One group's outputs, held against what it declared."""
    outputs = mapper.apply(inputs)
    if outputs.keys() != group.outputs:
        raise ConfigurationError(f"{mapper!r} declared the outputs {sorted(group.outputs)} and made {sorted(outputs)}")
    return outputs


def _message(label: str, unfit: Mapping[str, Sequence[str]]) -> str:
    lines = [f"the model state at {label} does not fit the model; nothing was read"]
    for kind, names in unfit.items():
        if names:
            more = f", and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
            lines.append(f"  {len(names)} {kind}: {', '.join(names[:MAX_LISTED])}{more}")
    lines.append("  Usual cause: another layout of names (give a state mapper), or another configuration of the model.")
    lines.append("  Names that may differ go into allow_missing or allow_unexpected.")
    return "\n".join(lines)
