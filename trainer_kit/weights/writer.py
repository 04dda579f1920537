"""Writing a model state: safetensors files that other tools read, one tensor on the host at a time.

It writes what it is given, in that order, and knows nothing of modules or ties. How the files become valid is `publish.py`; how ranks
work together is `serve.py`, where rank 0 runs the writer and the others give it their parts.

Before editing: `get` is called once per tensor, in the order of the bytes, and its result is dropped before the next call. A live
tensor is never changed, not even made contiguous.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainer_kit.exceptions import CheckpointError, ConfigurationError, ModelError
from trainer_kit.mesh.team import Team
from trainer_kit.storage import Folder
from trainer_kit.weights.format import DTYPE_NAMES, build_header, num_bytes, tensor_bytes
from trainer_kit.weights.publish import MARK, check_folder, publish, sweep, write_temporary
from trainer_kit.weights.reader import INDEX
from trainer_kit.weights.regions import is_plain
from trainer_kit.weights.serve import write_together
from trainer_kit.weights.shards import Shard, cut, index_bytes, parse_size
from trainer_kit.weights.whole import is_cut, whole_on_first

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext


class StateItem(NamedTuple):
    """One tensor to write: what it will be, known before any tensor exists, and `get`, which makes or finds it.

    collective: whether `get` takes part of all ranks; it gives the tensor on rank 0 and None elsewhere.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    get: Callable[[], torch.Tensor | None]
    collective: bool = False


def items_of(tensors: Mapping[str, torch.Tensor], context: DistributedContext | None = None) -> list[StateItem]:
    """Items for tensors that are at hand, or distributed over the ranks of `context`; of a pipeline stage its first rank gets them."""
    return [
        StateItem(name, tuple(tensor.shape), tensor.dtype, partial(whole_on_first, tensor, context), is_cut(tensor))
        for name, tensor in tensors.items()
    ]


def write_model_state(
    folder: str | os.PathLike[str],
    items: Iterable[StateItem],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
    context: DistributedContext | None = None,
) -> list[str]:
    """Write `items` as the model state of `folder` and return the names of its files, the index last.

    An earlier export in the folder stays whole until the new one is, and then goes. `dtype` casts floating-point tensors, except those of
    one byte, which are quantised; `max_shard_size` is in bytes or a text such as "500MB"; `metadata` is kept in each file's header.
    With the `context` of several ranks all of them call it with the same items; rank 0 writes, and they return or raise the same.

    Raises CheckpointError, with nothing touched, for a folder that holds something else, and, with the old export intact, if writing fails.
    """
    write = partial(_write, folder, max_shard_size=max_shard_size, dtype=dtype, metadata=metadata)
    with nullcontext() if context is None else context.long_timeout():
        return write_together(Team.of(context), items, write)


def _write(
    folder: str | os.PathLike[str],
    items: Iterable[StateItem],
    *,
    max_shard_size: int | str,
    dtype: torch.dtype | None,
    metadata: Mapping[str, str] | None,
) -> list[str]:
    items = _final(items, dtype)
    shards = cut([(item, num_bytes(item.dtype, item.shape), item.dtype.itemsize) for item in items], parse_size(max_shard_size))
    header = _header_metadata(metadata)
    place = Folder(folder)
    check_folder(place)
    size = sum(shard.size for shard in shards)
    try:
        place.make()
        for shard in shards:
            write_temporary(place, shard.file, _parts(shard, header))
        publish(place, [shard.file for shard in shards], _index(shards, size))
    except BaseException as error:
        _clean_up(place, error)
        if isinstance(error, OSError):
            raise CheckpointError(_failure(place, size, error)) from error
        raise
    _remove_stale(place)
    return [shard.file for shard in shards] + ([INDEX] if len(shards) > 1 else [])


def _final(items: Iterable[StateItem], dtype: torch.dtype | None) -> list[StateItem]:
    """The items with the dtypes that they are written in, checked."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(f"dtype={dtype!r}: a floating-point dtype was expected; other tensors are written as they are")
    final: dict[str, StateItem] = {}
    for item in items:
        item = StateItem(*item)
        if item.name in final or item.name == "__metadata__":
            raise ModelError(f"tensor name {item.name!r} is used twice, or reserved; unique names were expected")
        if item.dtype not in DTYPE_NAMES:
            raise ModelError(f"tensor {item.name!r} has dtype {item.dtype}, which safetensors cannot hold; leave it out or convert it")
        if dtype is not None and item.dtype.is_floating_point and item.dtype.itemsize > 1:
            item = item._replace(dtype=dtype)
        final[item.name] = item
    if not final:
        raise ModelError("there are no tensors to write; a model with parameters or persistent buffers was expected")
    return list(final.values())


def _header_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    ours = {"format": "pt", MARK[0]: MARK[1]}
    metadata = dict(metadata or {})
    if bad := [key for key, value in metadata.items() if not isinstance(key, str) or not isinstance(value, str) or key in ours]:
        raise ConfigurationError(f"metadata has the keys {bad}: texts were expected, as keys and values, and none of {list(ours)}")
    return {**ours, **metadata}


def _parts(shard: Shard[StateItem], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    yield build_header(((item.name, item.dtype, item.shape) for item in shard.tensors), metadata)[0]
    for item in shard.tensors:
        host = _on_host(item)
        yield tensor_bytes(host)
        del host  # before the next one is made


def _on_host(item: StateItem) -> torch.Tensor:
    """A contiguous CPU tensor of the final dtype: the tensor itself if it is one, else one copy."""
    tensor = item.get()
    assert tensor is not None, "rank 0 gets every tensor"
    tensor = tensor.detach()
    if tuple(tensor.shape) != tuple(item.shape):
        raise ModelError(f"tensor {item.name!r} was announced as {list(item.shape)} and came as {list(tensor.shape)}")
    if tensor.dtype != item.dtype and not (tensor.dtype.is_floating_point and item.dtype.is_floating_point):
        raise ModelError(f"tensor {item.name!r} was announced as {item.dtype} and came as {tensor.dtype}")
    if tensor.dtype == item.dtype and is_plain(tensor):
        return tensor
    return torch.empty(item.shape, dtype=item.dtype, device="cpu").copy_(tensor)


def _index(shards: list[Shard[StateItem]], size: int) -> bytes | None:
    if len(shards) == 1:
        return None
    weight_map = {item.name: shard.file for shard in shards for item in shard.tensors}
    return index_bytes(weight_map, {"total_size": size, MARK[0]: MARK[1]})


def _clean_up(folder: Folder, error: BaseException) -> None:
    """Leave the old export alone in the folder; a failure to do so is told, and does not hide the first error."""
    try:
        sweep(folder)
    except (OSError, CheckpointError) as second:
        error.add_note(f"the unfinished export in {folder.url} could not be removed either: {second}")


def _remove_stale(folder: Folder) -> None:
    try:
        sweep(folder)
    except OSError as error:
        raise CheckpointError(f"the model state in {folder.url} is complete, but an earlier one could not be removed: {error}") from error


def _failure(folder: Folder, size: int, error: OSError) -> str:
    free = f" ({shutil.disk_usage(folder.url).free:,} are free)" if folder.is_local and folder.exists() else ""
    return (
        f"the model state could not be written to {folder.url}: {error}. It needs {size:,} bytes there{free}, beside an earlier export, "
        "which is kept until the new one is complete"
    )
