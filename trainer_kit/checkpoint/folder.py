"""A folder of checkpoints: which are there, which is the newest, which may go.

Names are `step-00000100`, by the number of finished steps; order is by that number, never by time. What is in the folder besides
is none of our business. A folder without a manifest was never valid (a killed save, or one under way): it is passed over with a
warning and not removed, unless `remove_incomplete` is called by the only writer of the folder. Removal begins by renaming the
manifest, so a kill in the middle leaves no damaged checkpoint, and the next `retain` finishes it.

A manifest names every tensor, so reading one takes time: whoever asks goes by names first, from the newest down, and reads no further
than the answer needs.

On a mesh one rank looks into the folder and changes it, and the others get the outcome: `shared_by`.
"""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from trainer_kit.checkpoint.checks import FileRecord
from trainer_kit.checkpoint.checksum import check_sizes
from trainer_kit.checkpoint.manifest import MANIFEST, read_manifest
from trainer_kit.exceptions import CheckpointError, ConfigurationError
from trainer_kit.mesh.team import Team
from trainer_kit.storage import Folder

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext

STEP_NAME = re.compile(r"step-(\d{8,18})")
OWN_FILE = re.compile(r"rank-\d{5}(-\d{1,9})?\.safetensors|manifest\.json\.tmp")
REMOVED = "manifest.removed.json"
T = TypeVar("T")


class SavedStep(NamedTuple):
    """A valid checkpoint: number of finished steps and name of its folder."""

    step: int
    name: str


class Found(NamedTuple):
    """The newest valid checkpoint, if any; what is wrong with each newer one; and whether one of these was valid once."""

    saved: SavedStep | None
    problems: list[str]
    damaged: bool

    @property
    def broken(self) -> bool:
        """There were checkpoints and none can be resumed: no fresh start. A single incomplete folder is that of a killed first save."""
        return self.saved is None and (self.damaged or len(self.problems) > 1)


class CheckpointFolder:
    """The folder of one run's checkpoints, a path or any fsspec URL."""

    def __init__(self, url: str | os.PathLike[str] | Folder) -> None:
        self._folder = url if isinstance(url, Folder) else Folder(url)
        self._seen: dict[str, tuple[int, Mapping[str, FileRecord]]] = {}  # read and found valid: size of the manifest, its files

    def shared_by(self, context: DistributedContext) -> SharedFolder:
        """The folder as all ranks of a run use it together."""
        return SharedFolder(self, context)

    def path(self) -> str:
        """The folder itself."""
        return self._folder.path()

    def path_for(self, step: int) -> str:
        """Where the checkpoint of this step belongs."""
        return self._folder.path(f"step-{step:08d}")

    def list_valid(self) -> list[SavedStep]:
        """The valid checkpoints by step: manifest in order, all files there with their sizes. Reads every manifest."""
        return [SavedStep(step, name) for step, name in self._steps() if self._problem(step, name) is None]

    def newest(self) -> SavedStep | None:
        """The valid checkpoint of the highest step; None if there are none. Warns about each that is passed over.

        Raises CheckpointError if none is valid although one was before, or several are incomplete: that is no fresh start.
        """
        return next((saved for _, saved in _choose([self])), None)

    def find_newest(self) -> Found:
        """The same without warnings and errors: whoever asks decides."""
        problems: list[str] = []
        damaged = False
        for step, name in reversed(self._steps()):
            problem = self._problem(step, name)
            if problem is None:
                return Found(SavedStep(step, name), problems, damaged)
            problems.append(problem)
            damaged |= (self._folder / name).exists(MANIFEST)
        return Found(None, problems, damaged)

    def retain(self, keep_last: int | None = None, keep_every: int | None = None, best: Iterable[str] = ()) -> list[str]:
        """Remove old checkpoints and return their names. Call it after the new one is durable, on one rank.

        Kept: the newest `keep_last` (None: all), each `keep_every`-th step, the names in `best`, always the newest one.
        """
        for option, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{option}= is {value}, expected at least 1, or None to leave it out")
        folders = self._folders()
        removed = [name for _, name in folders if self._is_removed(name)]
        for name in removed:
            self._finish_removal(self._folder / name)
        steps = [(step, name) for step, name in folders if name not in removed]
        if keep_last is None or len(steps) <= keep_last:
            return []
        gone, protected, num_kept = [], set(best), 0
        for step, name in reversed(steps):
            if num_kept < keep_last:
                # The newest is read again each time: it is the one that must not be lost.
                num_kept += (num_kept > 0 and self._is_as_seen(name)) or self._problem(step, name) is None
            elif name not in protected and not (keep_every and step % keep_every == 0) and self._problem(step, name) is None:
                gone.append(name)
        gone.reverse()
        for name in gone:
            self._remove(name)
        return gone

    def set_aside(self, after: int) -> list[str]:
        """Rename the valid checkpoints of steps beyond `after`, so that nothing resumes from them; returns their new names.

        For a run that begins anew, or goes on from an earlier step: what it would have become before is kept and does not count.
        """
        renamed = []
        for step, old in self._steps():
            if step > after and self._problem(step, old) is None:
                taken = set(self._folder.names())
                name = next(n for k in itertools.count(1) if (n := f"previous-{k}-{old}") not in taken)
                self._folder.rename(old, name)
                renamed.append(name)
        return renamed

    def remove_incomplete(self) -> list[str]:
        """Remove folders of saves that were killed, and return their names. Only for the one writer, while it does not save.

        Only those of earlier steps than the newest valid checkpoint go: one that lies ahead may be a save of another job under way.
        Folders that hold anything but files of a save stay.
        """
        newest = self.find_newest().saved
        removed = []
        for step, name in self._steps():
            folder = self._folder / name
            if newest is not None and step < newest.step and all(OWN_FILE.fullmatch(file) for file in folder.names()):
                _ignoring_absence(folder.remove)
                removed.append(name)
        return removed

    def _folders(self) -> list[tuple[int, str]]:
        found = [(int(match[1]), name) for name in self._folder.names() if (match := STEP_NAME.fullmatch(name))]
        return [(step, name) for step, name in sorted(found) if self._folder.is_folder(name)]

    def _steps(self) -> list[tuple[int, str]]:
        return [(step, name) for step, name in self._folders() if not self._is_removed(name)]

    def _is_removed(self, name: str) -> bool:
        folder = self._folder / name
        return folder.exists(REMOVED) and not folder.exists(MANIFEST)

    def _problem(self, step: int, name: str) -> str | None:
        folder = self._folder / name
        try:
            manifest = read_manifest(folder)
            check_sizes(folder, manifest.files)
            size = folder.size(MANIFEST)
        except (CheckpointError, FileNotFoundError) as error:
            return str(error)
        if manifest.step != step:
            return f"{folder.path()} holds step {manifest.step}; it was renamed"
        self._seen[name] = size, manifest.files
        return None

    def _is_as_seen(self, name: str) -> bool:
        """Whether it was found valid before and all files have the sizes of then: the same test without reading the manifest again."""
        if name not in self._seen:
            return False
        folder, (size, files) = self._folder / name, self._seen[name]
        try:
            check_sizes(folder, files)
            return folder.size(MANIFEST) == size
        except (CheckpointError, FileNotFoundError):
            return False

    def _remove(self, name: str) -> None:
        self._seen.pop(name, None)
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


class SharedFolder:
    """The folder of a run with several ranks: rank 0 does what is asked, all ranks wait for the outcome, or raise its error.

    Every method is a collective. In one process it is the folder itself.
    """

    def __init__(self, folder: CheckpointFolder, context: DistributedContext) -> None:
        self._folder, self._team = folder, Team.of(context)

    def find_newest(self) -> Found:
        """As CheckpointFolder.find_newest."""
        return self._team.on_main(self._folder.find_newest)

    def retain(self, keep_last: int | None = None, keep_every: int | None = None, best: Sequence[str] = ()) -> list[str]:
        """As CheckpointFolder.retain."""
        return self._team.on_main(lambda: self._folder.retain(keep_last, keep_every, best))


def newest_path(folders: Iterable[CheckpointFolder], context: DistributedContext | None = None) -> str | None:
    """The path of the newest valid checkpoint in several folders of one run; None if there is none. Warns as `newest` does.

    A folder in which nothing is valid is passed over, as long as another one has a checkpoint; else it raises CheckpointError.
    With the `context` of several ranks all of them call it, and rank 0 chooses.
    """
    chosen = Team.of(context).on_main(lambda: [folder.path_for(saved.step) for folder, saved in _choose(folders)])
    return chosen[0] if chosen else None


def _choose(folders: Iterable[CheckpointFolder]) -> list[tuple[CheckpointFolder, SavedStep]]:
    """The folder with the newest checkpoint, or none."""
    found = [(folder, folder.find_newest()) for folder in folders]
    valid = [(folder, look.saved) for folder, look in found if look.saved is not None]
    problems = [text for _, look in found for text in look.problems]
    if not valid and any(look.broken for _, look in found):
        where = ", ".join(folder.path() for folder, look in found if look.problems)
        raise CheckpointError(
            f"no checkpoint in {where} can be resumed: {'; '.join(problems)}. "
            'Remove them, choose another folder, or pass resume="never" to start anew'
        )
    for text in problems:
        warnings.warn(f"checkpoint passed over{'' if valid else ', there is no other'}: {text}", stacklevel=3)
    return [max(valid, key=lambda pair: pair[1].step)] if valid else []


def _ignoring_absence(action: Callable[[], T]) -> T | None:
    """Somebody else may have removed it: that is what was wanted."""
    try:
        return action()
    except FileNotFoundError:
        return None
