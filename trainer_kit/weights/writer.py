"""Writing a model state: safetensors files that other tools read, one tensor on the host at a time.

It writes what it is given, in that order, and knows nothing of modules or ties. The ranks of a run share the files (`shard_files.py`);
rank 0 looks after the folder, and makes the files valid (`publish.py`).

Before editing: the files are a function of names, shapes, dtypes and values alone, whichever ranks hold and write them. A live tensor is
never changed, not even made contiguous.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from trainer_kit.exceptions import CheckpointError, ConfigurationError, ModelError
from trainer_kit.mesh.team import Team
from trainer_kit.storage import Folder
from trainer_kit.weights.companions import Companions, StrPath
from trainer_kit.weights.format import num_bytes
from trainer_kit.weights.items import StateItem, checked_items
from trainer_kit.weights.publish import MARK, check_arrived, check_folder, publish, sweep
from trainer_kit.weights.reader import INDEX
from trainer_kit.weights.shard_files import ShardFiles, explained, header_of
from trainer_kit.weights.shards import Shard, cut, index_bytes, parse_size

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext


def write_model_state(
    folder: str | os.PathLike[str],
    items: Iterable[StateItem],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
    companions: StrPath | Sequence[StrPath] | None = None,
    context: DistributedContext | None = None,
) -> list[str]:
    """Write `items` as the model state of `folder` and return the names of its files, the index last.

    An earlier export in the folder stays whole until the new one is, and then goes. `dtype` casts floating-point tensors, except those of
    one byte, which are quantised; `max_shard_size` is in bytes or a text such as "500MB"; `metadata` is kept in each file's header.
    companions: a folder whose configuration and tokenizer files are copied beside the weights, or a list of files; with `dtype`, that is
    set in `config.json`, too.
    With the `context` of several ranks all of them call it with the same items, and write files; they return or raise the same. The
    folder must be on storage that they share.

    Raises CheckpointError, with nothing touched, for a folder that holds something else, and, with the old export intact, if writing fails.
    """
    team, place = Team.of(context), Folder(folder)
    with nullcontext() if context is None else context.long_timeout():
        shards, headers = team.everywhere(lambda: _plan(items, parse_size(max_shard_size), dtype, metadata))
        if len(set(team.exchange(zlib.crc32(b"".join(headers))))) > 1:
            raise ModelError("the ranks want to write different model states; every rank must give the same items, mapper and options")
        export = _Export(place, shards, headers)
        team.on_main(lambda: export.begin(companions, dtype))
        files = ShardFiles(place, shards, headers, context)
        files.write()
        try:
            team.on_main(export.finish)
        except BaseException as error:
            files.abandon(error)  # rank 0 removed what it sees
            raise
        team.on_main(export.remove_stale)
    return export.names


def _plan(
    items: Iterable[StateItem], limit: int, dtype: torch.dtype | None, metadata: Mapping[str, str] | None
) -> tuple[list[Shard[StateItem]], list[bytes]]:
    final = checked_items(list(items), dtype)
    shards = cut([(item, num_bytes(item.dtype, item.shape), item.dtype.itemsize) for item in final], limit)
    known = _header_metadata(metadata)
    return shards, [header_of(shard, known) for shard in shards]


def _header_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    ours = {"format": "pt", MARK[0]: MARK[1]}
    metadata = dict(metadata or {})
    if bad := [key for key, value in metadata.items() if not isinstance(key, str) or not isinstance(value, str) or key in ours]:
        raise ConfigurationError(f"metadata has the keys {bad}: texts were expected, as keys and values, and none of {list(ours)}")
    return {**ours, **metadata}


class _Export:
    """The part of rank 0: it looks after the folder."""

    def __init__(self, folder: Folder, shards: Sequence[Shard[StateItem]], headers: Sequence[bytes]) -> None:
        self._folder, self._shards = folder, shards
        self._bytes = {shard.file: len(header) + shard.size for shard, header in zip(shards, headers, strict=True)}
        self.size = sum(shard.size for shard in shards)
        self.names = [shard.file for shard in shards] + ([INDEX] if len(shards) > 1 else [])
        self._companions = Companions(None, None)

    def begin(self, companions: StrPath | Sequence[StrPath] | None, dtype: torch.dtype | None) -> None:
        """Find out all that can be known before anything is written."""
        check_folder(self._folder)
        self._companions = Companions(companions, dtype)
        with explained(self._folder, self.size):
            self._folder.make()

    def finish(self) -> None:
        """Make what all ranks wrote the model state; what cannot be made so goes."""
        try:
            with explained(self._folder, self.size):
                check_arrived(self._folder, self._bytes)
                publish(self._folder, [shard.file for shard in self._shards], self._index(), self._companions.write(self._folder))
        except BaseException as error:
            try:
                sweep(self._folder)
            except (OSError, CheckpointError) as second:
                error.add_note(f"the unfinished export in {self._folder.url} could not be removed either: {second}")
            raise

    def remove_stale(self) -> None:
        """Remove what the earlier export leaves behind."""
        try:
            sweep(self._folder)
        except OSError as error:
            raise CheckpointError(
                f"the model state in {self._folder.url} is complete, but an earlier one could not be removed: {error}"
            ) from error

    def _index(self) -> bytes | None:
        if len(self._shards) == 1:
            return None
        weight_map = {item.name: shard.file for shard in self._shards for item in shard.tensors}
        return index_bytes(weight_map, {"total_size": self.size, MARK[0]: MARK[1]})
