"""A folder of checkpoints: which are there, which is the newest, which may go.

Names are `step-00000100`, by the number of finished steps; order is by that number, never by time. What is in the folder besides
is none of our business. A folder without a manifest was never valid (a killed save, or one under way): it is passed over with a
warning and not removed, unless `remove_incomplete` is called by the only writer of the folder. Removal begins by renaming the
manifest, so a kill in the middle leaves no damaged checkpoint, and the next `retain` finishes it.
"""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from trainer_kit.checkpoint.checksum import check_sizes
from trainer_kit.checkpoint.manifest import MANIFEST, read_manifest
from trainer_kit.exceptions import CheckpointError, ConfigurationError
from trainer_kit.storage import Folder

STEP_NAME = re.compile(r"step-(\d{8,18})")
OWN_FILE = re.compile(r"rank-\d{5}(-\d{1,9})?\.safetensors|manifest\.json\.tmp")
REMOVED = "manifest.removed.json"
T = TypeVar("T")


class SavedStep(NamedTuple):
    """A valid checkpoint: number of finished steps and name of its folder."""

    step: int
    name: str


class CheckpointFolder:
    """The folder of one run's checkpoints, a path or any fsspec URL."""

    def __init__(self, url: str | os.PathLike[str] | Folder) -> None:
        self._folder = url if isinstance(url, Folder) else Folder(url)

    def path_for(self, step: int) -> str:
        """Where the checkpoint of this step belongs."""
        return self._folder.path(f"step-{step:08d}")

    def list_valid(self) -> list[SavedStep]:
        """The valid checkpoints by step: manifest in order, all files there with their sizes."""
        return [SavedStep(step, name) for step, name in self._steps() if self._problem(step, name) is None]

    def newest(self) -> SavedStep | None:
        """The valid checkpoint of the highest step; None if there are none. Warns about each that is passed over.

        Raises CheckpointError if none is valid although one was before, or several are incomplete: that is no fresh start.
        """
        problems: list[str] = []
        damaged = False
        for step, name in reversed(self._steps()):
            problem = self._problem(step, name)
            if problem is None:
                for text in problems:
                    warnings.warn(f"checkpoint passed over: {text}", stacklevel=2)
                return SavedStep(step, name)
            problems.append(problem)
            damaged |= (self._folder / name).exists(MANIFEST)
        if damaged or len(problems) > 1:
            raise CheckpointError(
                f"no checkpoint in {self._folder.path()} can be resumed: {'; '.join(problems)}. "
                'Remove them, choose another folder, or pass resume="never" to start anew'
            )
        for text in problems:
            warnings.warn(f"checkpoint passed over, there is no other: {text}", stacklevel=2)
        return None

    def retain(self, keep_last: int | None = None, keep_every: int | None = None, best: Iterable[str] = ()) -> list[str]:
        """Remove old checkpoints and return their names. Call it after the new one is durable, on one rank.

        Kept: the newest `keep_last` (None: all), each `keep_every`-th step, the names in `best`, always the newest one.
        """
        for option, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{option}= is {value}, expected at least 1, or None to leave it out")
        for _, name in self._steps(removed=True):
            self._finish_removal(self._folder / name)
        if keep_last is None:
            return []
        protected, valid = set(best), self.list_valid()
        gone = [s for s in valid[:-keep_last] if s.name not in protected and not (keep_every and s.step % keep_every == 0)]
        for saved in gone:
            self._remove(saved.name)
        return [saved.name for saved in gone]

    def set_aside(self, after: int) -> list[str]:
        """Rename the valid checkpoints of steps beyond `after`, so that nothing resumes from them; returns their new names.

        For a run that begins anew, or goes on from an earlier step: what it would have become before is kept and does not count.
        """
        renamed = []
        for saved in self.list_valid():
            if saved.step > after:
                taken = set(self._folder.names())
                name = next(n for k in itertools.count(1) if (n := f"previous-{k}-{saved.name}") not in taken)
                self._folder.rename(saved.name, name)
                renamed.append(name)
        return renamed

    def remove_incomplete(self) -> list[str]:
        """Remove folders of saves that were killed, and return their names. Only for the one writer, while it does not save.

        Folders that hold anything but files of a save stay.
        """
        removed = []
        for _, name in self._steps():
            folder = self._folder / name
            if all(OWN_FILE.fullmatch(file) for file in folder.names()):
                _ignoring_absence(folder.remove)
                removed.append(name)
        return removed

    def _steps(self, *, removed: bool = False) -> list[tuple[int, str]]:
        found = [(int(match[1]), name) for name in self._folder.names() if (match := STEP_NAME.fullmatch(name))]
        folders = [(step, name) for step, name in sorted(found) if self._folder.is_folder(name)]
        return [(step, name) for step, name in folders if self._is_removed(name) == removed]

    def _is_removed(self, name: str) -> bool:
        folder = self._folder / name
        return folder.exists(REMOVED) and not folder.exists(MANIFEST)

    def _problem(self, step: int, name: str) -> str | None:
        folder = self._folder / name
        try:
            manifest = read_manifest(folder)
            check_sizes(folder, manifest.files)
        except CheckpointError as error:
            return str(error)
        return None if manifest.step == step else f"{folder.path()} holds step {manifest.step}; it was renamed"

    def _remove(self, name: str) -> None:
        folder = self._folder / name
        _ignoring_absence(lambda: folder.rename(MANIFEST, REMOVED))
        _ignoring_absence(folder.sync)
        self._finish_removal(folder)

    def _finish_removal(self, folder: Folder) -> None:
        for file in _ignoring_absence(folder.names) or []:
            if OWN_FILE.fullmatch(file):
                _ignoring_absence(lambda file=file: folder.remove(file))  # type: ignore[misc]
        _ignoring_absence(lambda: folder.remove(REMOVED))
        if not _ignoring_absence(folder.names):
            _ignoring_absence(folder.remove)


def _ignoring_absence(action: Callable[[], T]) -> T | None:
    """Somebody else may have removed it: that is what was wanted."""
    try:
        return action()
    except FileNotFoundError:
        return None
