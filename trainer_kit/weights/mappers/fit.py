"""The dry run of a load, `StateMapper.check`: a report in place of errors, from headers and shapes alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from trainer_kit.exceptions import CheckpointError
from trainer_kit.names import state_tensors
from trainer_kit.weights.mapper import StateMapper
from trainer_kit.weights.plan import check_fit, plan_load
from trainer_kit.weights.reader import ModelStateReader


@dataclass(frozen=True)
class FitReport:
    """Whether a stored model state fits a model. It is true if it does; its text tells what does not.

    missing: names of the model that the files lack. unused: stored names that nothing takes. unknown: names that the mapper makes and the
    model does not have. misfits: texts about shapes and dtypes. What was allowed is in `missing` and `unused` all the same.
    """

    fits: bool
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    unknown: tuple[str, ...]
    misfits: tuple[str, ...]
    text: str = field(repr=False)

    def __bool__(self) -> bool:
        return self.fits

    def __str__(self) -> str:
        return self.text


def check_fit_of(
    mapper: StateMapper,
    checkpoint: str | os.PathLike[str] | ModelStateReader,
    model: nn.Module | Mapping[str, torch.Tensor],
    *,
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
) -> FitReport:
    """See `StateMapper.check`."""
    reader = checkpoint if isinstance(checkpoint, ModelStateReader) else ModelStateReader(checkpoint)
    targets, aliases = _targets(model)
    findings = plan_load(reader.entries, mapper, targets, aliases, allow_meta=True).findings
    url = reader.url
    try:
        check_fit(url, reader.entries, [findings], allow_missing, allow_unexpected)
    except CheckpointError as error:
        fits, text = False, str(error)
    else:
        fits, text = True, f"the model state at {url} fits: {len(findings.covered)} tensors are filled from {len(findings.used)}"
    unused = tuple(sorted(reader.entries.keys() - findings.used))
    return FitReport(fits, tuple(sorted(findings.missing)), unused, tuple(findings.unknown), tuple(findings.misfits), text)


def _targets(model: nn.Module | Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors under their canonical names, and the other names of tied ones."""
    tensors, aliases = {}, {}
    first: dict[int, str] = {}
    for name, tensor in state_tensors(model) if isinstance(model, nn.Module) else model.items():
        canonical = first.setdefault(id(tensor), name)
        if canonical == name:
            tensors[name] = tensor
        else:
            aliases[name] = canonical
    return tensors, aliases
