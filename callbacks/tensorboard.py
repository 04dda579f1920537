"""Writes the records as TensorBoard scalars.

Not here: images, histograms and other media; `writer` is public for those. Know before editing: a resumed run writes into the same
folder and marks everything behind its step as void (`purge_step`), so that a reader shows one value per step.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, ClassVar

from trainer_kit.callback import Callback
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.storage import Folder

if TYPE_CHECKING:
    from trainer_kit.events import CheckpointStart, FitStart, Metrics


class TensorBoard(Callback):
    """One scalar per recorded name; the step is the number of finished steps.

    folder: a path, or a URL that TensorBoard can write to.
    name: the key of this callback; give another one to a second TensorBoard.
    writer: torch's SummaryWriter during a fit on the main rank, else None.

    The settings of the run are written once, as text. Records are flushed every second, before a save and at the end, so a run that is
    killed and goes on misses none.
    """

    is_logger: ClassVar[bool] = True

    def __init__(self, folder: str | os.PathLike[str], *, name: str = "TensorBoard") -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise ConfigurationError(f"TensorBoard(folder={folder!r}): expected a path or URL")
        self._folder = Folder(folder)
        self.name = name
        self.writer: Any = None
        self._next_flush = 0.0

    @property
    def state_key(self) -> str:
        return self.name

    def describe(self) -> str:
        return f"{self.name}({self._folder.url})"

    def on_fit_start(self, event: FitStart) -> None:
        if not event.trainer.context.is_main:
            return
        from torch.utils.tensorboard import SummaryWriter  # heavy; imported by those who use it

        step = event.trainer.step
        is_new = step == 0 or not any("tfevents" in entry for entry in self._folder.names())
        self.writer = SummaryWriter(self._folder.url, purge_step=step + 1 if step else 0)
        if is_new:
            self.writer.add_text("settings", f"```json\n{json.dumps(event.settings, indent=2, default=str)}\n```", 0)

    def on_metrics(self, event: Metrics) -> None:
        if self.writer is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            # One event for the whole record; add_scalar, with one event per name, costs several times as much.
            values = [Summary.Value(tag=name, simple_value=value) for name, value in event.values.items()]
            self.writer.file_writer.add_summary(Summary(value=values), event.step)
            if time.monotonic() >= self._next_flush:
                self._flush()

    def on_checkpoint_start(self, event: CheckpointStart) -> None:
        if self.writer is not None:
            self._flush()  # a run that is killed and goes on from here misses no record

    def _flush(self) -> None:
        self.writer.flush()
        self._next_flush = time.monotonic() + 1.0

    def close(self) -> None:
        if self.writer is not None:
            writer, self.writer = self.writer, None
            writer.close()
