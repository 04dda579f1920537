"""`Carrier`: brings the items of a model state to the ranks that want them, a few at a time; all ranks walk through the same orders.

What a mapper must compute is made on the rank that wants it, or, where that lacks the mapper (a provider has one for each stage), on one
that has it. Each step that may fail is one that all ranks agree on before anybody sends, so an error on one rank is raised on all.
Before editing: memory is what was ordered, the inputs of its groups, and what is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainer_kit.mesh.team import Team
from trainer_kit.weights.items import GroupCall, StateItem, check_announced
from trainer_kit.weights.pieces import whole
from trainer_kit.weights.sources import Mosaic, Part, nearest
from trainer_kit.weights.transfer import Road, Transfer, Want, plain

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext


class Order(NamedTuple):
    """An item that a rank wants. makes: the outputs of its group that are made for this rank now, for this and for later orders."""

    rank: int
    item: StateItem
    makes: frozenset[str]


def orders_of(items: Sequence[StateItem], rank: int) -> list[Order]:
    """The orders of one rank for items that it will take in this order; a group of several of them is applied once."""
    outputs: dict[GroupCall, set[str]] = {}
    for item in items:
        if isinstance(item.source, GroupCall):
            outputs.setdefault(item.source, set()).add(item.name)
    return [
        Order(rank, item, frozenset(outputs.pop(item.source, ()) if isinstance(item.source, GroupCall) else ())) for item in items
    ]


class Carrier:
    """device: where the tensors go. fresh: they never share memory with the model."""

    def __init__(self, context: DistributedContext | None, device: torch.device, *, fresh: bool = False) -> None:
        self.team = Team.of(context)
        self._road, self._fresh = _road(context, device), fresh
        self._made: dict[tuple[GroupCall, int], dict[str, torch.Tensor]] = {}  # for each rank that waits for outputs
        self._cut: tuple[Mosaic, list[Part]] | None = None

    def bring(self, orders: Sequence[Order], before: Callable[[], None]) -> list[torch.Tensor]:
        """What this rank ordered. A collective; `before` is done first by every rank, and may fail on some.

        The tensors may be memory of the model, unless `fresh`.
        """
        if calls := self._calls(orders):
            inputs = self._together(before, lambda: self._inputs(calls))
            before = partial(self._apply, calls, inputs)
        found = self._together(before, lambda: map(self._want, orders))
        return [tensor for tensor in found if tensor is not None]

    def _together(self, before: Callable[[], None], wants: Callable[[], Iterator[Want]]) -> list[torch.Tensor | None]:
        def prepare() -> Transfer:
            before()
            return Transfer(wants(), self._road)

        transfer = self.team.everywhere(prepare)
        transfer.run()
        return transfer.results

    def _calls(self, orders: Sequence[Order]) -> dict[tuple[GroupCall, int], list[Order]]:
        """The groups to apply, and where; each of them for the orders that it begins."""
        calls: dict[tuple[GroupCall, int], list[Order]] = {}
        for order in orders:
            if order.makes:
                call = order.item.source
                assert isinstance(call, GroupCall)
                calls.setdefault((call, nearest(call.ranks, order.rank)), []).append(order)
        return calls

    def _inputs(self, calls: Mapping[tuple[GroupCall, int], list[Order]]) -> Iterator[Want]:
        for call, maker in calls:
            at_hand = all(mosaic.is_whole_on(maker) for mosaic in call.inputs.values())
            for mosaic in call.inputs.values():
                yield Want(maker, mosaic.first.shape, mosaic.first.dtype, mosaic.parts(), mosaic.memory if at_hand else None)

    def _apply(self, calls: Mapping[tuple[GroupCall, int], list[Order]], inputs: list[torch.Tensor | None]) -> None:
        inputs.reverse()
        for (call, maker), orders in calls.items():
            given = {name: inputs.pop() for name in call.inputs}
            if maker != self._road.rank:
                continue
            assert call.apply is not None, "this rank has the mapper"
            with torch.no_grad():
                outputs = call.apply({name: tensor for name, tensor in given.items() if tensor is not None})
            for order in orders:
                waiting = self._made.setdefault((call, order.rank), {})  # may hold some for an earlier file
                waiting.update({name: outputs[name] for name in order.makes})

    def _want(self, order: Order) -> Want:
        rank, item, source = order.rank, order.item, order.item.source
        want = Want(rank, item.shape, item.dtype)
        if isinstance(source, Mosaic):
            if source.is_whole_on(rank):
                return want._replace(at_hand=lambda: self._final(item, source.memory()))
            return want._replace(parts=self._parts(source))
        if not isinstance(source, GroupCall):
            return want._replace(at_hand=lambda: self._given(item, source()))
        maker = nearest(source.ranks, rank)
        made = self._take_made(source, order) if maker == self._road.rank else None
        if maker == rank:
            return want._replace(at_hand=lambda: self._given(item, made))
        return want._replace(parts=[Part(whole(item.name, item.shape), (maker,), made)])

    def _parts(self, mosaic: Mosaic) -> list[Part]:
        if self._cut is None or self._cut[0] is not mosaic:  # orders of all ranks for one item follow one another
            self._cut = mosaic, list(mosaic.parts())
        return self._cut[1]

    def _take_made(self, call: GroupCall, order: Order) -> torch.Tensor:
        outputs = self._made[call, order.rank]
        tensor = outputs.pop(order.item.name)
        if not outputs:
            del self._made[call, order.rank]
        return tensor

    def _given(self, item: StateItem, tensor: torch.Tensor | None) -> torch.Tensor:
        assert tensor is not None, "it was made on this rank"
        check_announced(item.name, item.shape, item.dtype, tensor)
        return self._final(item, tensor)

    def _final(self, item: StateItem, tensor: torch.Tensor) -> torch.Tensor:
        return plain(tensor, item.dtype, self._road.device, copy=self._fresh)


def _road(context: DistributedContext | None, device: torch.device) -> Road:
    if context is None or context.world_size == 1:
        return Road(0, device, device, None)
    import torch.distributed as dist

    group = context.group("flat", "world")
    wire = device if device.type in dist.get_backend_config(group) else context.device
    if wire.type != "cpu":
        dist.all_reduce(torch.zeros(1, device=wire), group=group)  # the first use of such a group takes all of its ranks
    return Road(context.rank, device, wire, group)
