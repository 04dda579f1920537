"""Saves checkpoints, at once or in the background; one at a time.

Not here: what is saved, and when. A background save copies the state before `save` returns. Its outcome reaches the main thread at
the next `poll`, `settle`, `wait`, `save` or `close`: there `on_saved` runs after success, and there a failure is raised. Nothing that
follows from a save (retention, events) may happen earlier: until then the new checkpoint does not count.

On a mesh every method is called by all ranks alike, and saves talk over a group of their own. Their threads end at different moments, so
the loop asks for `ended`, and calls `settle` on all ranks at the same boundary once it is true everywhere.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer_kit.checkpoint.errors import first_failure, save_error
from trainer_kit.checkpoint.staging import Staging
from trainer_kit.exceptions import CheckpointError
from trainer_kit.mesh.context import DistributedContext
from trainer_kit.mesh.team import Team
from trainer_kit.storage import Folder
from trainer_kit.weights.format import DTYPE_NAMES


@dataclass
class _Save:
    """One save on its way. `team` are the ranks that save together, over the group of the saves."""

    folder: Folder
    step: int
    num_bytes: int
    write: Callable[[], None]
    abandon: Callable[[], None]
    on_saved: Callable[[], None] | None
    team: Team
    cause: BaseException | None = None
    failure: CheckpointError | None = None  # what `cause` is in words, the same on every rank

    def run(self) -> None:
        """Write; a failed or interrupted save removes what it wrote and keeps its error for `settle`."""
        from torch.distributed.checkpoint import CheckpointException

        try:
            self.write()
        except CheckpointException as error:  # raised on every rank
            rank, cause = first_failure(error.failures)
            self._abandon(cause)
            # The words tell how much is free, which two ranks would not see alike.
            words = cause if isinstance(cause, CheckpointError) else self.team.on_main(lambda: self._in_words(cause, rank))
            self.cause, self.failure = cause, words
        except BaseException as error:  # an interrupt too: it must not leave half a checkpoint
            if self.team.is_alone:
                self._abandon(error)
            # Else the other ranks may be anywhere, even behind a valid checkpoint. What is incomplete is swept by the next run.
            self.cause, self.failure = error, self._in_words(error)

    def _abandon(self, cause: BaseException) -> None:
        try:
            self.abandon()
        except Exception as second:
            cause.add_note(f"the incomplete checkpoint could not be removed from {self.folder.path()}: {second}")

    def _in_words(self, cause: BaseException, rank: int | None = None) -> CheckpointError:
        return save_error(cause, self.folder, self.step, self.num_bytes, rank)

    def settle(self, *, in_background: bool) -> None:
        """Raise the failure, or tell that it was saved."""
        if self.failure is not None:
            assert self.cause is not None
            if not in_background and not isinstance(self.cause, Exception):
                raise self.cause
            if self.failure is self.cause:
                raise self.failure
            raise self.failure from self.cause
        if self.on_saved is not None:
            self.on_saved()


class CheckpointSaver:
    """Writes checkpoint folders. With a `context` of several ranks, all of them save into one folder together."""

    def __init__(self, context: DistributedContext | None = None) -> None:
        self._context = context
        self._staging = Staging()
        self._pending: tuple[threading.Thread, _Save] | None = None

    def save(
        self,
        path: str | os.PathLike[str] | Folder,
        tensors: Mapping[str, torch.Tensor],
        values: Any = None,
        *,
        step: int,
        identity: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
        on_saved: Callable[[], None] | None = None,
    ) -> None:
        """Save `tensors` and `values` (both from `flatten_state`) into the folder `path`, such as `.../step-00000100`.

        On a mesh each rank gives its tensors: parts of distributed ones, and plain ones that are equal on the ranks that have them, or
        on one rank alone. `values`, `step` and `identity` are those of rank 0.

        Waits for the save before and raises its failure first. Raises CheckpointError; earlier checkpoints stay as they were, and
        a folder that was valid stays valid until the new content replaces the old in one act.
        """
        self.wait()
        folder, state = path if isinstance(path, Folder) else Folder(path), dict(tensors)
        copies = Team.of(self._context).everywhere(lambda: self._prepare(state, asynchronous))
        save = self._make(folder, state, copies, {"step": step, "values": values, "identity": identity}, on_saved)
        if asynchronous:
            thread = threading.Thread(target=save.run, name=f"checkpoint-save-{step}")  # no daemon: leaving the script waits for it
            thread.start()
            self._pending = (thread, save)
        else:
            save.run()
            save.settle(in_background=False)

    def _prepare(self, state: Mapping[str, torch.Tensor], asynchronous: bool) -> dict[str, torch.Tensor] | None:
        for name, tensor in state.items():
            _check(name, tensor)
        return self._staging.copy(state) if asynchronous else None

    def _make(
        self,
        folder: Folder,
        state: dict[str, torch.Tensor],
        copies: dict[str, torch.Tensor] | None,
        content: dict[str, Any],
        on_saved: Callable[[], None] | None,
    ) -> _Save:
        from trainer_kit.checkpoint.writer import CheckpointWriter, write_checkpoint

        group = None if self._context is None else self._context.host.for_background()
        team = Team.of_group(group)
        writer = CheckpointWriter(folder, **content, team=team)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())

        def write() -> None:
            write_checkpoint(writer, state, copies, group)

        return _Save(folder, content["step"], num_bytes, write, writer.abandon, on_saved, team)

    @property
    def in_flight(self) -> bool:
        """Whether a background save was not settled yet."""
        return self._pending is not None

    @property
    def ended(self) -> bool:
        """Whether no background save is being written on this rank: `settle` would not wait for it."""
        return self._pending is None or not self._pending[0].is_alive()

    def poll(self) -> None:
        """If the background save has ended, run its `on_saved` or raise its failure; never waits.

        For one process: ranks do not end at the same time.
        """
        if self._pending is not None and self.ended:
            self.wait()

    def settle(self) -> None:
        """Run the `on_saved` of a background save that has ended, or raise its failure. On a mesh: once it has `ended` on all ranks."""
        self.wait()

    def wait(self) -> None:
        """Wait for the background save, then run its `on_saved` or raise its failure."""
        if self._pending is not None:
            thread, save = self._pending
            thread.join()
            self._pending = None
            save.settle(in_background=True)

    def close(self, error: BaseException | None = None) -> None:
        """Wait, settle, and release the copies. With the `error` that ends the run, a failed save becomes a note on it instead."""
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"besides, a checkpoint was not saved: {failure}")
        finally:
            self._staging.release()


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided or tensor.is_meta:
        raise CheckpointError(
            f"{name} is {tensor.dtype}, {tensor.layout}, on {tensor.device}; a checkpoint holds dense tensors with data, of the dtypes "
            "of safetensors. Convert it in state_dict()"
        )
