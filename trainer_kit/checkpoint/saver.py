"""Saves checkpoints, at once or in the background; one at a time.

Not here: what is saved, and when. A background save copies the state before `save` returns. Its outcome reaches the main thread at
the next `poll`, `wait`, `save` or `close`: there `on_saved` runs after success, and there a failure is raised. Nothing that follows
from a save (retention, events) may happen earlier: until then the new checkpoint does not count.
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
from trainer_kit.storage import Folder
from trainer_kit.weights.format import DTYPE_NAMES


@dataclass
class _Save:
    """One save on its way."""

    folder: Folder
    step: int
    num_bytes: int
    write: Callable[[], None]
    abandon: Callable[[], None]
    on_saved: Callable[[], None] | None
    error: BaseException | None = None

    def run(self) -> None:
        """Write; a failed or interrupted save removes what it wrote and keeps its error for `settle`."""
        from torch.distributed.checkpoint import CheckpointException

        try:
            self.write()
        except BaseException as error:  # an interrupt too: it must not leave half a checkpoint
            self.error = first_failure(error.failures) if isinstance(error, CheckpointException) else error
            try:
                self.abandon()
            except Exception as second:
                self.error.add_note(f"the incomplete checkpoint could not be removed from {self.folder.path()}: {second}")

    def settle(self, *, in_background: bool) -> None:
        """Raise the failure, or tell that it was saved."""
        if self.error is not None:
            if not in_background and not isinstance(self.error, Exception):
                raise self.error
            wrapped = save_error(self.error, self.folder, self.step, self.num_bytes)
            if wrapped is self.error:
                raise wrapped
            raise wrapped from self.error
        if self.on_saved is not None:
            self.on_saved()


class CheckpointSaver:
    """Writes checkpoint folders. `process_group` is one of its own, never that of the training, where several ranks save together."""

    def __init__(self, *, process_group: Any = None) -> None:
        self._process_group = process_group
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

        Waits for the save before and raises its failure first. Raises CheckpointError; earlier checkpoints stay as they were, and
        a folder that was valid stays valid until the new content replaces the old in one act.
        """
        from trainer_kit.checkpoint.writer import CheckpointWriter, write_checkpoint

        self.wait()
        folder = path if isinstance(path, Folder) else Folder(path)
        state = dict(tensors)
        for name, tensor in state.items():
            _check(name, tensor)
        writer = CheckpointWriter(folder, step=step, values=values, identity=identity)
        copies = self._staging.copy(state) if asynchronous else None

        def write() -> None:
            write_checkpoint(writer, state, copies, self._process_group)

        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        save = _Save(folder, step, num_bytes, write, writer.abandon, on_saved)
        if asynchronous:
            thread = threading.Thread(target=save.run, name=f"checkpoint-save-{step}")  # no daemon: leaving the script waits for it
            thread.start()
            self._pending = (thread, save)
        else:
            save.run()
            save.settle(in_background=False)

    @property
    def in_flight(self) -> bool:
        """Whether a background save was not settled yet."""
        return self._pending is not None

    def poll(self) -> None:
        """If the background save has ended, run its `on_saved` or raise its failure; never waits."""
        if self._pending is not None and not self._pending[0].is_alive():
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
