"""`Transport`: sends and receives of tensors between the stages of a pipeline, over one process group, in the order of the program.

Receives are posted before they are needed and waited for where they are used; sends go on beside the computation and are let go as soon
as they are known to be done. Not here: what is sent when (the program), and its shapes (`transfer_spec.py`).
Before editing: nothing but their order says which message is which, so both ranks of a pair must go through the same transfers in the
same order, as in a checked program. gloo tells that a send is done only to those who wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainer_kit.exceptions import StateError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

MAX_UNANSWERED = 4  # sends of one rank that nothing comes back for and whose end cannot be seen

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


class Message(NamedTuple):
    """What a transfer brings: the inputs of `stage`, or with `is_gradient` the gradient of its outputs."""

    stage: int
    microbatch: int
    is_gradient: bool


class Transfer(NamedTuple):
    """One side of a transfer that was begun. peer: the place of the other side in the group."""

    message: Message
    sends: bool
    peer: int
    shapes: Shapes


@dataclass
class Record:
    """What a rank began, in order. pack: the number of the pack. is_open: it did not come to its end."""

    pack: int = 0
    is_open: bool = False
    transfers: list[Transfer] = field(default_factory=list)

    def is_missing(self, transfer: Transfer, pack: int) -> bool:
        """Whether this rank did not begin the other side of a transfer that a peer began in a pack."""
        if pack != self.pack:
            return pack > self.pack  # of an older one it did all
        return not any(mine.message == transfer.message and mine.sends != transfer.sends for mine in self.transfers)


class _Running(NamedTuple):
    tensors: Sequence[torch.Tensor]
    works: Sequence[Work]

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> Sequence[torch.Tensor]:
        for work in self.works:
            work.wait()
        return self.tensors


class Transport:
    """The transfers of this rank. Peers are places in `group`."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        import torch.distributed as dist

        self._dist, self._group, self._device = dist, group, device
        self._place, self.ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        self._receives: dict[Message, _Running] = {}
        self._answered: dict[Message, _Running] = {}  # sends for which something comes back
        self._unanswered: deque[_Running] = deque()
        self.record = Record()

    def begin(self) -> None:
        """A pack begins, and all ranks know that the last one left nothing behind."""
        self.record = Record(self.record.pack + 1, is_open=True)

    def receive(self, message: Message, shapes: Shapes, peer: int) -> None:
        """Post the receive of a message."""
        tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]
        self._receives[message] = self._start(Transfer(message, False, peer, shapes), tensors)

    def take(self, message: Message) -> Sequence[torch.Tensor]:
        """Wait for a message whose receive was posted."""
        return self._receives.pop(message).wait()

    def send(self, message: Message, tensors: Sequence[torch.Tensor], peer: int, *, answered: bool) -> None:
        """Start to send. The tensors must not change until they are let go. answered: `answer` is called for this message later."""
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        running = self._start(Transfer(message, True, peer, shapes), tensors)
        if answered:
            self._answered[message] = running
        else:
            self._unanswered.append(running)
        self._let_go()

    def answer(self, message: Message) -> None:
        """Something came back for a message that was sent, so the other side has it."""
        if (running := self._answered.pop(message, None)) is not None:
            running.wait()

    def _let_go(self) -> None:
        """Forget the sends that are done. The oldest may be waited for: its receive does not depend on what this rank does next."""
        for message in [message for message, running in self._answered.items() if running.is_done()]:
            del self._answered[message]
        while self._unanswered and (len(self._unanswered) > MAX_UNANSWERED or self._unanswered[0].is_done()):
            self._unanswered.popleft().wait()

    def finish(self) -> None:
        """The pack is over: wait for all sends."""
        for running in [*self._answered.values(), *self._unanswered]:
            running.wait()
        self._answered.clear()
        self._unanswered.clear()
        self.record.is_open = False

    def _start(self, transfer: Transfer, tensors: Sequence[torch.Tensor]) -> _Running:
        self.record.transfers.append(transfer)
        kind = self._dist.isend if transfer.sends else self._dist.irecv
        tag = 2 * transfer.message.stage + transfer.message.is_gradient  # where the transport has tags, a wrong order hangs, not mixes
        ops = [self._dist.P2POp(kind, tensor, group=self._group, group_peer=transfer.peer, tag=tag) for tensor in tensors if tensor.numel()]
        return _Running(tensors, self._dist.batch_isend_irecv(ops) if ops else ())

    def settle(self, records: Mapping[int, Record]) -> None:
        """After a failed pack: begin the other side of what peers began and this rank did not, wait for everything, and drop it.

        records: of all places in the group. Raises StateError where the connections are gone.
        """
        running = [*self._receives.values(), *self._answered.values(), *self._unanswered]
        for peer, record in sorted(records.items()):
            for transfer in record.transfers:
                if peer != self._place and transfer.peer == self._place and self.record.is_missing(transfer, record.pack):
                    tensors = [torch.zeros(shape, dtype=dtype, device=self._device) for shape, dtype in transfer.shapes]
                    running.append(self._start(transfer._replace(sends=not transfer.sends, peer=peer), tensors))
        try:
            for each in running:
                each.wait()
        except RuntimeError as error:
            raise StateError(
                "the last step failed in the middle of a transfer between pipeline stages, which can't be brought to an end, so the ranks "
                "are out of step; start the run again, it resumes from its last checkpoint"
            ) from error
        self._receives.clear()
        self._answered.clear()
        self._unanswered.clear()
        self.record = Record(max(record.pack for record in records.values()))
