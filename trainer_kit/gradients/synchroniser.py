"""`Synchroniser`: brings the gradients of all ranks together, during backward wherever it can.

A parameter counts when the last microbatch of the pack has gone through it; a bucket whose parameters all count is summed while backward
goes on. Buckets start in one order on every rank, whatever the order of backward, as collectives that cross would wait for each other
for ever. Not here: what FSDP reduces by itself, the division, the norm.
Before editing: hooks run for each parameter and microbatch, and must cost next to nothing before the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trainer_kit.exceptions import ModelError, StateError
from trainer_kit.gradients.buckets import Bucket, Place, plan_buckets
from trainer_kit.gradients.loose import LooseGradient, start_sum
from trainer_kit.gradients.placements import check_returned, dims_to_sum, reduced_by_fsdp
from trainer_kit.mesh.layout import is_distributed
from trainer_kit.parameters import ParameterRow
from trainer_kit.ties import TiedWeights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trainer_kit.mesh.context import DistributedContext


class MicrobatchSync(Protocol):
    """What tells FSDP whether to reduce after the coming microbatch."""

    @property
    def units(self) -> Sequence[Any]:
        """The FSDP units."""
        ...

    def begin_microbatch(self, is_last: bool) -> None:
        """Before each microbatch."""
        ...

    def reset(self) -> None:
        """A step failed half-way: forget what it left behind."""
        ...


class Synchroniser:
    """The gradients of `rows` over the ranks of a mesh. All methods but `look_up` are called on every rank in the same order."""

    def __init__(self, rows: Sequence[ParameterRow], context: DistributedContext, sync: MicrobatchSync | None = None) -> None:
        self._context, self._sync = context, sync
        groups = _groups(rows, context)
        summed = {id(row): groups[dims_to_sum(row)] for row in rows if dims_to_sum(row)}
        bucketed = [row for row in rows if id(row) in summed and not reduced_by_fsdp(row)]
        self._buckets = plan_buckets(bucketed, groups)
        self._places = [place for bucket in self._buckets for place in bucket.places]
        in_buckets = {id(row) for row in bucketed}
        self._loose = [LooseGradient(row) for row in rows if id(row) not in in_buckets]
        self._to_sum = [(gradient, summed[id(gradient.row)]) for gradient in self._loose if id(gradient.row) in summed]
        self._ties = TiedWeights(rows, context)
        self._next = 0  # the first bucket that is not started
        self._pack = 0  # how many packs have come to their last microbatch
        self._counting = False  # whether the last microbatch is running
        self._open = False  # whether a step is under way
        self._abandoned: list[Any] = []  # sums that were under way when a step failed
        self._num_begun: int | None = None  # how many sums the failed step had begun; None: none failed
        self._handles = [p.row.parameter.register_post_accumulate_grad_hook(self._hook(b, p)) for b in self._buckets for p in b.places]
        self._returned: dict[int, Sequence[Any]] = {}
        self._unchecked = {i: self._observe(i, place.row) for i, place in enumerate(self._places) if is_distributed(place.row.parameter)}

    def _hook(self, bucket: Bucket, place: Place) -> Callable[[torch.Tensor], None]:
        def count(_: torch.Tensor) -> None:
            if self._counting:
                self._count(bucket, place)

        return count

    def _count(self, bucket: Bucket, place: Place) -> None:
        if place.seen == self._pack:
            if bucket.started:
                raise ModelError(
                    f"{place.row.name!r} got a second gradient in one microbatch, after the sum over the ranks had begun. Usual cause: a "
                    "backward inside of backward, as torch.utils.checkpoint makes with use_reentrant=True; use use_reentrant=False"
                )
            return
        place.seen = self._pack
        bucket.missing -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._start_next()

    def _start_next(self) -> None:
        self._buckets[self._next].start()
        self._next += 1

    def begin_microbatch(self, is_last: bool) -> None:
        """A microbatch comes; `is_last`: the last one of the pack on this rank."""
        self._open_step()
        if is_last:
            self._pack += 1
        self._counting = is_last
        if self._sync is not None:
            self._sync.begin_microbatch(is_last)

    def _open_step(self) -> None:
        if self._open:
            return
        self._settle()
        self._open, self._next = True, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.places)

    def finish(self) -> None:
        """Wait until every gradient is summed; `row.local.grad` is the local one of each row then.

        Raises ModelError where autograd returned what the contract of a parameter does not allow.
        """
        self._open_step()
        self._counting = False
        while self._next < len(self._buckets):  # parameters that nothing used, on this rank or on all
            self._start_next()
        for gradient in self._loose:
            gradient.look_up()
        waiting = [start_sum(gradients, group) for gradients, group in self._sums_of_loose()]
        for bucket in self._buckets:
            bucket.wait()
        for wait in waiting:
            wait()
        self._check_returned()
        self._ties.sum_gradients()
        self._open = False

    def _sums_of_loose(self) -> list[tuple[list[LooseGradient], ProcessGroup]]:
        """Those that FSDP has reduced and that are sums of parts along another dimension, by group and dtype."""
        sums: dict[tuple[int, torch.dtype, torch.device], tuple[list[LooseGradient], ProcessGroup]] = {}
        for gradient, group in self._to_sum:
            local = gradient.row.local.grad
            assert local is not None
            sums.setdefault((id(group), local.dtype, local.device), ([], group))[0].append(gradient)
        return list(sums.values())

    def _observe(self, index: int, row: ParameterRow) -> Any:
        """Note the placements of the first gradient that autograd returns; in a bucket they can't be seen any more."""
        return row.parameter.register_hook(lambda gradient: self._note(index, gradient))

    def _note(self, index: int, gradient: torch.Tensor) -> None:
        self._returned[index] = gradient.placements  # type: ignore[attr-defined]

    def _check_returned(self) -> None:
        for index, placements in self._returned.items():
            self._unchecked.pop(index).remove()
            check_returned(self._places[index].row, placements)
        self._returned.clear()

    def look_up(self) -> None:
        """Take in what a user did to `.grad`, of the parameters of the model or of the optimizer."""
        for place in self._places:
            place.mend()
        for gradient in self._loose:
            gradient.look_up()

    def zero(self) -> None:
        """Make the bucketed gradients zero and drop the others. In the middle of a step that failed, give up what is under way."""
        if self._open:
            self._abandon()
        for bucket in self._buckets:
            bucket.zero()
        for gradient in self._loose:
            gradient.drop()

    def _abandon(self) -> None:
        self._open = self._counting = False
        self._num_begun = self._next
        self._abandoned += [bucket.abandon() for bucket in self._buckets if bucket.started]
        self._returned.clear()
        if self._sync is not None:
            self._sync.reset()

    def _settle(self) -> None:
        """Before the step after a failed one: the ranks must have begun the same sums, else the next ones would pair with those."""
        if self._num_begun is None:
            return
        counts = self._context.host.exchange(self._num_begun)
        if len(set(counts)) > 1:
            raise StateError(
                f"the last step failed at different places on the ranks (sums of gradients begun: {', '.join(map(str, counts[:16]))}), so "
                "they are out of step; start the run again, it resumes from its last checkpoint"
            )
        works, self._abandoned, self._num_begun = self._abandoned, [], None
        for work in works:
            work.wait()

    def close(self) -> None:
        """Take the hooks and the gradients away."""
        for handle in [*self._handles, *self._unchecked.values()]:
            handle.remove()
        self._handles, self._unchecked = [], {}
        for place in self._places:
            place.row.parameter.grad = place.row.local.grad = None
        for gradient in self._loose:
            gradient.drop()


def _groups(rows: Sequence[ParameterRow], context: DistributedContext) -> dict[tuple[str, ...], ProcessGroup]:
    """The groups over which gradients are summed, by mesh dimensions.

    Making a group takes every rank, and a stage of a pipeline may need one that another does not, so they agree on all of them first.
    """
    own = {dims_to_sum(row) for row in rows} - {()}
    wanted = sorted({dims for those in context.host.exchange(sorted(own)) for dims in map(tuple, those)})
    groups = {dims: context.group(_domain(dims, context), *dims) for dims in wanted}
    return {dims: group for dims, group in groups.items() if group is not None}


def _domain(dims: tuple[str, ...], context: DistributedContext) -> str:
    """The domain that has all of these dimensions."""
    if (domain := context.domain_with(dims)) is None:
        raise ModelError(
            f"a gradient is partial along the mesh dimensions {', '.join(dims)}, which no domain of the mesh has together. "
            "Give parallelize_replicate and set_contract a mesh of context.mesh_for('dense')"
        )
    return domain
