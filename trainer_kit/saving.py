"""Saving and loading training checkpoints: when it is allowed, what must be settled first, and which events tell of it.

What is saved is in `training_state.py`; how it becomes valid is in `checkpoint/saver.py`. On a mesh all ranks call every method; rank 0
alone looks into the folders and changes them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from trainer_kit import events
from trainer_kit.callback import Dispatcher
from trainer_kit.checkpoint import CheckpointFolder, CheckpointSaver, newest_path
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.team import Team
from trainer_kit.records import Records
from trainer_kit.training_state import PARTS, TrainingState

logger = logging.getLogger("trainer_kit")


@dataclass
class Saving:
    """Saves and restores one run. `folders` are those of its Checkpoint callbacks."""

    saver: CheckpointSaver
    state: TrainingState
    records: Records
    dispatcher: Dispatcher
    folders: Sequence[CheckpointFolder]

    def save(self, path: str | None, *, asynchronous: bool) -> None:
        """Save now; with `asynchronous` the writing goes on in the background."""
        run, guard = self.state.loop.run, self.state.loop.guard
        if path is None:
            if not self.folders:
                raise ConfigurationError("there is no Checkpoint callback, so save_checkpoint(path=...) needs a path")
            path = self.folders[0].path_for(run.step)
        guard.resolve()  # a step whose gradients were not finite must never be saved
        self.records.flush()
        self.dispatcher.emit(events.CheckpointStart, path=path, step=run.step)
        dispatcher, told = self.dispatcher, {"path": path, "step": run.step}
        with self.state.context.long_timeout():
            tensors, values = self.state.collect_together()
            self.saver.save(
                path,
                tensors,
                values,
                step=run.step,
                identity=self.state.identity,
                asynchronous=asynchronous,
                on_saved=lambda: dispatcher.emit(events.CheckpointSaved, **told),
            )

    def load(self, path: str, parts: Sequence[str] | None, *, verify: bool = True) -> None:
        """Bring the run to the state in a folder, or to some parts of it."""
        self.saver.wait()
        with self.state.context.long_timeout():
            step = self.state.restore(path, parts, verify=verify)
        self.dispatcher.emit(events.CheckpointLoaded, path=path, step=step, parts=PARTS if parts is None else tuple(parts))

    def prepare(self) -> None:
        """Before the first step: refuse folders of another run, and set aside what lies ahead of the step from which this run goes on."""
        Team.of(self.state.context).on_main(self._prepare_folders)

    def _prepare_folders(self) -> None:
        for folder in self.folders:
            newest = folder.find_newest().saved
            if newest is not None:
                self.state.check_identity(folder.path_for(newest.step))
            removed = folder.remove_incomplete()
            if removed:
                logger.warning("removed what killed saves left in %s: %s", folder.path(), ", ".join(removed))
            aside = folder.set_aside(self.state.loop.run.step)
            if aside:
                logger.warning("checkpoints of later steps were renamed, so that none is resumed by mistake: %s", ", ".join(aside))

    def check_state(self) -> None:
        """Raise CheckpointError now if some state cannot be saved, rather than at the first save, hours later.

        Copies nothing, and asks no other rank.
        """
        if self.folders:
            self.state.collect()

    def newest(self) -> str | None:
        """The newest valid checkpoint in the folders of the run; None if there is none."""
        return newest_path(self.folders, self.state.context)
