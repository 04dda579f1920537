"""`DataStream`: the packs of a run one after the other, through all epochs, on the device, with an exact position.

Not here: what a pack holds, which the provider decides. No thread: `next` first tops up the queue, then hands out its head, so up to
`prefetch_packs` packs are being copied to an accelerator while the step runs. The one thing to know before editing: there are two
places, where fetching goes on (`_tail`) and where the last pack that was handed out ends (`_head`); only the second is ever saved.

On several data ranks every rank has a stream over its own part, and all of them hand out the same number of packs in each epoch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.data.overfit import RepeatedPacks
from trainer_kit.data.pack import Pack, as_pack
from trainer_kit.data.place import Place
from trainer_kit.data.provider import DataProvider
from trainer_kit.data.randomness import fork_random
from trainer_kit.data.ranks import Answer, Ranks, agreed_is_last
from trainer_kit.data.transfer import Copy, DeviceTransfer
from trainer_kit.exceptions import ConfigurationError

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fetched:
    """A pack on its way, with the place behind it; or the error that came instead, raised when the pack is due."""

    pack: Pack | None = None
    place: Place | None = None
    copy: Copy | None = None
    error: Exception | None = None


class DataStream:
    """Hands out packs. With `prefetch_packs=0` data made in this process draws random numbers from the run's own streams; otherwise
    each pack is fetched with streams keyed by (seed, epoch, number of the pack), so that fetching ahead changes no random number.

    The provider must have been set up. After an error, `next` tries the same pack again.

    context: with several data ranks, all calls are collective (see `DataProvider.knows_all_ranks`). fill_up: a rank that has no more packs
    repeats a microbatch as filler until all have ended, instead of ending the epoch for all; for passes that must see every sample.
    """

    def __init__(
        self,
        provider: DataProvider,
        device: torch.device,
        *,
        seed: int,
        prefetch_packs: int,
        overfit_packs: int = 0,
        max_epochs: int | None = None,
        context: DistributedContext | None = None,
        fill_up: bool = False,
    ) -> None:
        self.epoch = 0
        self._name = type(provider).__name__
        self._ranks = Ranks(context, provider, self._name) if context is not None and context.world_size > 1 else None
        self._key = (seed,) if self._ranks is None else self._ranks.random_key(seed)
        self._provider = RepeatedPacks(provider, overfit_packs, *self._key) if overfit_packs else provider
        assert not fill_up or max_epochs == 1
        self._fill_up, self._last_microbatch = fill_up, None
        self._depth = prefetch_packs
        self.max_epochs = max_epochs
        pins = provider.pin_memory is not False
        self._transfer = DeviceTransfer(device, pin_memory=pins, ahead=prefetch_packs > 0) if device.type != "cpu" else None
        self._before = self._head = self._tail = Place()
        self._queue: deque[_Fetched] = deque()
        self._packs: Iterator[Any] | None = None  # of the running epoch, at `_tail`
        self._said_end = False

    def next(self) -> Pack | None:
        """The next pack, on the device; None when there is no more. An error met while fetching ahead is raised when its pack is due."""
        queue = self._queue
        if self._depth == 0 and self._transfer is None and not queue:
            return self._next_now()
        while len(queue) <= self._depth and not (queue and queue[-1].error):
            fetched = self._fetch()
            if fetched is None:
                break
            queue.append(fetched)
        if not queue:
            return None
        due = queue.popleft()
        if due.error is not None:
            raise due.error
        assert due.pack is not None and due.place is not None
        if due.copy is not None and self._transfer is not None:
            due.pack.microbatches = self._transfer.finish(due.copy)
            if due.pack.filler is not None:
                due.pack.filler = due.pack.microbatches.pop()
        self._before, self._head = self._head, due.place
        self.epoch = due.pack.epoch
        return due.pack

    def _next_now(self) -> Pack | None:
        """`next` where nothing is fetched ahead and nothing is copied: the pack as it comes."""
        try:
            pack = self._read() if self._ranks is None else self._read_together(self._ranks)
        except BaseException:
            self._stop_fetching()
            raise
        if pack is not None:
            self._tail = self._tail.after(pack)
            self._before, self._head = self._head, self._tail
            self.epoch = pack.epoch
        return pack

    @property
    def reached_max_epochs(self) -> bool:
        """Whether all wanted passes were handed out."""
        return self.max_epochs is not None and self._tail.normal().epoch >= self.max_epochs

    def num_packs(self) -> int | None:
        """The packs per epoch if the provider can tell, on all data ranks those of the one that has fewest."""
        count = self._provider.num_packs()
        return count if self._ranks is None else self._ranks.fewest(count)

    def packs_left(self) -> int | None:
        """The packs from here to the end of the wanted passes; None if the provider cannot tell, or there is no limit."""
        left = self._own_packs_left(self.num_packs())
        return left if self._ranks is None else self._ranks.fewest(left)

    def _own_packs_left(self, per_epoch: int | None) -> int | None:
        place = self._head.normal()
        left = self._provider.packs_left(place.position_to_open())
        if self.max_epochs is None or per_epoch is None or left is None or place.epoch >= self.max_epochs:
            return 0 if self.max_epochs is not None and place.epoch >= self.max_epochs else None
        return left + (self.max_epochs - place.epoch - 1) * per_epoch

    def state_dict(self) -> dict[str, Any]:
        """The place of this rank behind the pack handed out last, as plain values, whatever has been fetched ahead."""
        return self._head.state_dict()

    def state_of_all_ranks(self) -> dict[str, Any]:
        """What a checkpoint holds, the same on every rank: `state_dict`, or `{"ranks": [...]}` with that of each data rank where
        they can differ."""
        state = self.state_dict()
        return state if self._ranks is None or self._provider.global_position else self._ranks.by_data_rank(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place that `state_dict` or `state_of_all_ranks` gave. Nothing is read before the next pack is asked for.

        If positions hold for one number of data ranks only and that has changed, the epoch starts anew, with a warning.
        """
        self._go_on_from(self._own_place(state))

    def _go_on_from(self, place: Place) -> None:
        self._stop_fetching()
        self._queue.clear()
        self._before = self._head = self._tail = place
        self.epoch = place.last_epoch

    def _own_place(self, state: dict[str, Any]) -> Place:
        saved = state["ranks"] if set(state) == {"ranks"} else [state]
        places = [Place.from_state(part) for part in saved]
        data_rank, num_data_ranks = (0, 1) if self._ranks is None else self._ranks.place
        if len(places) == num_data_ranks:
            return places[data_rank]
        if self._provider.global_position:
            return places[0]
        epoch = max((place.epoch for place in places), default=0)
        if any(place.num_packs for place in places if place.epoch == epoch):
            self._warn(
                "the data position was saved on %d data rank(s) and now there are %d: %s keeps a position per data rank, so epoch %d "
                "starts anew and samples come again. Set global_position = True of the provider if its positions hold for any number",
                len(places), num_data_ranks, self._name, epoch,
            )  # fmt: skip
        return Place(epoch)

    def step_back(self) -> None:
        """Give the pack that was handed out last once more, because its step failed. An iterator that is read once cannot."""
        if self._provider.num_epochs == 1 and self._before is not self._head:
            self._warn("the pack of the failed step is lost: %s can be read only once", self._name)
            return
        self._go_on_from(Place.from_state(self._before.state_dict()))  # of this rank alone

    def close(self) -> None:
        """End workers and iterators. Packs fetched already are kept, and `next` goes on where it was."""
        self._stop_fetching()
        self._provider.close()

    def _stop_fetching(self) -> None:
        if self._packs is not None and hasattr(self._packs, "close"):
            self._packs.close()
        self._packs = None

    def _fetch(self) -> _Fetched | None:
        """The pack at `_tail`, which moves behind it; None at the end of the data."""
        try:
            pack = self._read() if self._ranks is None else self._read_together(self._ranks)
            if pack is None:
                return None
            copy = self._start_copy(pack)
        except Exception as error:
            self._stop_fetching()
            return _Fetched(error=error)
        except BaseException:  # Ctrl-C: not the data's fault, and due now
            self._stop_fetching()
            raise
        self._tail = self._tail.after(pack)
        return _Fetched(pack, self._tail, copy)

    def _start_copy(self, pack: Pack) -> Copy | None:
        if self._transfer is None:
            return None
        return self._transfer.start(pack.microbatches if pack.filler is None else [*pack.microbatches, pack.filler])

    def _read_together(self, ranks: Ranks) -> Pack | None:
        """`_read` on one of several ranks."""
        pack = self._read_agreed(ranks) if ranks.asks else self._read()
        if pack is not None and not ranks.checked:
            ranks.check_first(pack, self._tail.after(pack).state_dict() if self._provider.global_position else None)
        return pack

    def _read_agreed(self, ranks: Ranks) -> Pack | None:
        """`_read` where each data rank has packs of its own. Whoever is through with an epoch waits in the next one until all are there."""
        pack: Pack | None = None
        while True:
            error: Exception | None = None
            if pack is None:
                try:
                    pack = self._read()
                except Exception as caught:
                    error = caught
            answers = ranks.ask(pack, error, self._tail.epoch)
            epoch = max(answer.epoch for answer in answers)
            if self._fill_up or all(answer.epoch == epoch for answer in answers):
                return self._joined(pack, answers, ranks)
            ranks.say_who_ended_first([a for a in answers if a.epoch == epoch], [a for a in answers if a.epoch < epoch])
            if answers[ranks.rank].epoch < epoch:
                self._stop_fetching()
                self._tail, pack = Place(epoch), None

    def _joined(self, pack: Pack | None, answers: list[Answer], ranks: Ranks) -> Pack | None:
        """The pack of this rank for a step that all ranks make; None if there is none."""
        counts = [answer.num_microbatches for answer in answers if answer.num_microbatches is not None]
        if not counts or (len(counts) < len(answers) and not self._fill_up):
            self._stop_fetching()
            return None
        if pack is None:
            pack = Pack([], self._tail.epoch - 1, {"epoch": self._tail.epoch}, filler=self._last_microbatch)
        elif self._fill_up and pack.microbatches:
            self._last_microbatch = pack.microbatches[-1]
        pack.num_on_all = max(counts)
        ends_here, pack.is_last = pack.is_last, agreed_is_last(answers)
        if pack.is_last and ends_here is False and not self._fill_up:
            ranks.say_who_ended_first([a for a in answers if a.is_last], [a for a in answers if a.is_last is False])
            self._stop_fetching()
            pack.position = {"epoch": pack.epoch + 1}
        return pack

    def _read(self) -> Pack | None:
        """The next pack of this epoch, or of the one after it."""
        if self._packs is None:
            self._tail = self._tail.normal()
        while not self._is_at_end():
            if self._packs is None:
                self._packs = self._open()
            if self._depth and self._provider.draws_random:
                with fork_random(*self._key, "pack", self._tail.epoch, self._tail.num_packs):
                    found = next(self._packs, None)
            else:
                found = next(self._packs, None)
            if found is not None:
                return self._in_epoch(as_pack(found, self._tail.epoch, self._name))
            self._stop_fetching()
            self._turn()
        return None

    def _in_epoch(self, pack: Pack) -> Pack | None:
        """The pack under the epoch of this stream; a provider may go on to the next epoch by itself, but not back."""
        if pack.epoch <= self._tail.epoch:
            pack.epoch = self._tail.epoch
            return pack
        self._tail = Place(pack.epoch)
        return None if self._is_at_end() else pack

    def _turn(self) -> None:
        if self._tail.num_packs == 0:
            raise ConfigurationError(
                f"{self._name} gave no pack in epoch {self._tail.epoch}; expected at least one. "
                "The usual cause is empty data, or an iterable that can be gone through only once"
            )
        self._tail = self._tail.next_epoch()

    def _warn(self, text: str, *arguments: object) -> None:
        if self._ranks is None or self._ranks.rank == 0:  # it is the same on all ranks
            _log.warning(text, *arguments)

    def _is_at_end(self) -> bool:
        epoch = self._tail.epoch
        if self.max_epochs is not None and epoch >= self.max_epochs:
            return True
        ended = self._provider.num_epochs is not None and epoch >= self._provider.num_epochs
        if ended and not self._said_end:
            self._said_end = True
            self._warn(
                "%s can be gone through %d time(s) and has no more packs: training ends here. Pass an iterable that can be iterated "
                "again, such as a list or a DataLoader, for more epochs",
                self._name, self._provider.num_epochs,
            )  # fmt: skip
        return ended

    def _open(self) -> Iterator[Any]:
        """The rest of the epoch at `_tail`, skipping packs of a provider that keeps no position."""
        packs = iter(self._provider.packs(self._tail.position_to_open()))
        if self._tail.is_counted and self._tail.num_packs:
            self._warn("%s gives no positions: resuming by reading and dropping %d packs", self._name, self._tail.num_packs)
            for index in range(self._tail.num_packs):
                with fork_random(*self._key, "pack", self._tail.epoch, index):
                    next(packs, None)
        return packs
