"""Turns what goes wrong in a save into one CheckpointError that says what happened and what became of the checkpoints.

Not here: catching. DCP reports failures of ranks in an exception that is no `Exception`, the same on every rank; its first cause is what
users need.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from typing import Any

from trainer_kit.exceptions import CheckpointError
from trainer_kit.storage import Folder


def first_failure(failures: Mapping[int, Any]) -> tuple[int, BaseException]:
    """The lowest rank that failed, and its error."""
    rank = min(failures)
    return rank, failures[rank][0]


def save_error(error: BaseException, folder: Folder, step: int, num_bytes: int, rank: int | None = None) -> CheckpointError:
    """The error to raise, from `error`, for a failed save of `num_bytes`; `rank` is the one that failed, if there are several."""
    if isinstance(error, CheckpointError):
        return error
    what = f"saving step {step} to {folder.path()} failed{'' if rank is None else f' on rank {rank}'}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what += f": {os.strerror(error.errno)}; the checkpoint needs about {num_bytes} bytes{_free(folder)}"
        advice = "Free space, lower keep_last=, or choose another folder"
    else:
        what += f": {type(error).__name__}: {error}"
        advice = "Checkpoints saved before are untouched"
    return CheckpointError(f"{what}. {advice}")


def _free(folder: Folder) -> str:
    path = folder.url
    if not folder.is_local:
        return ""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return f", {shutil.disk_usage(path).free} are free"
