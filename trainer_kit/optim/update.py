"""The update of a step: the optimizer, what it holds, and what must move between ranks around it.

Optimizers work on local tensors, which share storage with the parameters. Those that need whole parameters get proxies for sharded
ones (`whole.py`). On every rank of a pipeline an optimizer holds one parameter for each of the whole model, so that its groups are the
same everywhere: for those of other ranks' stages a stand-in without data, and of a weight that two stages on one rank hold the first
copy, which the other one follows. In one process, and wherever nothing must be moved, `Update.step` is the step of the optimizer and
nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer_kit.mesh.layout import layout_of
from trainer_kit.optim.combined import CombinedOptimizer
from trainer_kit.optim.provider import OptimizerProvider, build_optimizer
from trainer_kit.optim.whole import WholeParameters, gather_whole, needs_gathering
from trainer_kit.parameters import ParameterRow, StateEntry
from trainer_kit.torch_private import step_optimizer

if TYPE_CHECKING:
    from trainer_kit.mesh import DistributedContext


class Update:
    """The built optimizer, ready to be stepped.

    parameters: what the optimizer holds, each with its row; this is what the functions of `state.py` take. For a whole parameter the
        row is that of its proxy.
    is_spread: whether some parameters have their state on one rank alone, or on those of one pipeline stage; the same on all ranks.
    elsewhere: names of those whose update and state are on other ranks than this one.
    step: makes the update. A collective of the ranks that share the whole parameters, if there are some.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rows: Sequence[ParameterRow],
        wholes: Sequence[WholeParameters] = (),
        copies: Sequence[tuple[ParameterRow, ParameterRow]] = (),
        *,
        is_spread: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.parameters: Mapping[nn.Parameter, ParameterRow] = {row.local: row for row in rows}
        self.elsewhere = frozenset(row.name for row in rows if row.local.is_meta)
        self.is_spread = is_spread
        step: Callable[[], None] = functools.partial(_step_on_wholes if wholes else step_optimizer, optimizer, *wholes)
        self.step = functools.partial(_step_and_follow, step, copies) if copies else step


def _step_on_wholes(optimizer: torch.optim.Optimizer, *wholes: WholeParameters) -> None:
    try:
        for whole in wholes:
            whole.open()
        step_optimizer(optimizer)
        for whole in wholes:
            whole.take_back()
    finally:
        for whole in wholes:
            whole.close()


def _step_and_follow(step: Callable[[], None], copies: Sequence[tuple[ParameterRow, ParameterRow]]) -> None:
    step()
    for copy, first in copies:
        copy.local.detach().copy_(first.local.detach())


def build_update(
    provider: OptimizerProvider, rows: Sequence[ParameterRow], context: DistributedContext, entries: Iterable[StateEntry] = ()
) -> Update:
    """Build the optimizer of a provider for trainable rows. On a mesh a collective of the world, unless the provider is elementwise.

    entries: of the whole model, where other stages of a pipeline have more of them, see `ParameterTable`.
    Raises ConfigurationError as `build_optimizer` does.
    """
    here: dict[str, ParameterRow] = {}
    copies = [(row, first) for row in rows if (first := here.setdefault(row.name, row)) is not row]
    held, wholes, is_spread = _rows_of_model(here, entries), list[WholeParameters](), context.num_pipeline_ranks > 1
    if context.world_size > 1 and not provider.elementwise:
        names = provider.whole_parameters([(row.name, row.local) for row in held])
        wholes, has_wholes = gather_whole([row for name, row in here.items() if name in names and needs_gathering(row)], context)
        is_spread = is_spread or has_wholes
        replaced = {id(row): proxy for whole in wholes for row, proxy in zip(whole.rows, whole.proxy_rows(), strict=True)}
        held = [replaced.get(id(row), row) for row in held]
    optimizer = build_optimizer(provider, [(row.name, row.local) for row in held])
    for part in optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,):
        if (set_layouts := getattr(part, "set_layouts", None)) is not None:
            set_layouts({row.local: row.layout for row in held if not row.layout.is_whole})
    return Update(optimizer, held, wholes, copies, is_spread=is_spread)


def _rows_of_model(here: Mapping[str, ParameterRow], entries: Iterable[StateEntry]) -> list[ParameterRow]:
    """The trainable rows of the whole model in its order; those of other stages are tensors without data, which never get a gradient."""
    trainable = [entry for entry in entries if entry.is_trainable]
    return [here.get(entry.name) or _elsewhere(entry) for entry in trainable] or list(here.values())


def _elsewhere(entry: StateEntry) -> ParameterRow:
    parameter = nn.Parameter(torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
    return ParameterRow(entry.name, (), parameter, entry.stages[0], parameter, layout_of(parameter), {}, entry.stages)
