"""Jobs for gloo ranks that write one model state together: who wrote which file, what failed where, how much memory it took."""

from __future__ import annotations

import errno
from collections.abc import Mapping

import torch

from tests.weights.memory import LiveBytes
from tests.weights.on_ranks import context_of, mapped
from trainer_kit.exceptions import CheckpointError, ModelError
from trainer_kit.weights import StateGroup, StateMapper, Transpose, items_of, publish, shard_files, write_model_state
from trainer_kit.weights.pieces import Piece

LIMIT = 200  # bytes of a file, for tensors of 16 to 120


def tensors() -> dict[str, torch.Tensor]:
    """Weights of several shapes and dtypes, some of which no number of ranks cuts evenly."""
    floats = {f"layers.{n}.w": torch.arange(30.0).view(5, 6) + n for n in range(4)}
    return {**floats, "half": torch.arange(8.0).bfloat16(), "count": torch.tensor(7), "none": torch.empty(0, 3), "scale": torch.tensor(0.5)}


def on_mesh(context):
    """As a model holds them: rows, columns or both over the ranks, and some whole on each."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    cut = tensors()
    mesh = context.mesh_for("dense")["dp_cp_shard", "tp"]
    for name, dims in {"layers.0.w": (0, 1), "layers.1.w": (1, None), "layers.2.w": (0, 0), "half": (None, 0), "none": (0, 1)}.items():
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
        cut[name] = distribute_tensor(cut[name], mesh, placements, src_data_rank=None)
    return cut


class Layers(StateMapper):
    """Stacks the first two layers, turned, out of pieces; makes three outputs of the others by computing; the rest keeps its names."""

    stacked = ("layers.0.w", "layers.1.w")
    summed = ("layers.2.w", "layers.3.w")

    def groups(self):
        others = [name for name in tensors() if name not in (*self.stacked, *self.summed)]
        first = StateGroup(frozenset(self.stacked), frozenset({"stacked"}))
        return [first, StateGroup(frozenset(self.summed), frozenset({"sum", "product", "one"})), *(group_of(name) for name in others)]

    def apply(self, tensors: Mapping[str, torch.Tensor]):
        if "layers.0.w" in tensors:
            return {"stacked": torch.stack([tensors[name].t() for name in self.stacked])}
        if "layers.2.w" in tensors:
            a, b = (tensors[name] for name in self.summed)
            return {"sum": a + b, "product": a * b, "one": a.double()}
        return dict(tensors)

    def pieces(self, shapes):
        if "stacked" in str(shapes) or "layers.0.w" not in shapes:
            return {}
        return {"stacked": [Piece(name, (0, 0), (5, 6), (n, 0, 0), (None, 1, 0)) for n, name in enumerate(self.stacked)]}

    def inverse(self, *, lossy=False):
        raise NotImplementedError


def group_of(name):
    return StateGroup(frozenset({name}), frozenset({name}))


class Fails(Layers):
    """Cannot compute on one rank."""

    def __init__(self, fails):
        self.fails = fails

    def apply(self, tensors):
        if self.fails and "layers.2.w" in tensors and tensors["layers.2.w"].device.type != "meta":
            raise ZeroDivisionError("no such luck")
        return super().apply(tensors)


def files_begun(call):
    """The names of the files that this rank writes tensors to in a call."""
    begun, inner = [], shard_files.TemporaryFile

    class Seen(inner):
        def __init__(self, folder, name):
            begun.append(name)
            super().__init__(folder, name)

    shard_files.TemporaryFile = Seen
    try:
        call()
    finally:
        shard_files.TemporaryFile = inner
    return begun


def export_both(folder, degrees):
    """Without a mapper and with one; which files this rank wrote."""
    context = context_of(**degrees)
    cut = on_mesh(context)

    def plain():
        write_model_state(f"{folder}/plain", items_of(cut, context), max_shard_size=LIMIT, dtype=torch.bfloat16, context=context)

    def through_a_mapper():
        write_model_state(f"{folder}/mapped", mapped(cut, Layers(), context), max_shard_size=LIMIT, context=context)

    return files_begun(plain), files_begun(through_a_mapper)


def fail_in_turn(folder):
    """A full disk on rank 1 in the middle, then a mapper that fails there; in the end a good export. What was said on this rank."""
    context, said = context_of(dp_shard=2), []
    cut, inner = on_mesh(context), shard_files.TemporaryFile

    class Full(inner):
        written = 0

        def write(self, part):
            Full.written += len(part)
            if context.rank == 1 and Full.written > 500:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(part)

    def tell(mapper, **options):
        try:
            write_model_state(folder, mapped(cut, mapper, context), max_shard_size=LIMIT, context=context, **options)
        except (CheckpointError, ModelError, ZeroDivisionError) as error:
            said.append(f"{type(error).__name__}: {error}")

    shard_files.TemporaryFile = Full
    try:
        tell(Layers())
    finally:
        shard_files.TemporaryFile = inner
    tell(Fails(context.rank == 1))
    before = said.copy()
    tell(Layers(), metadata={"rank": str(context.rank)})
    return before, said[len(before) :], left_in(folder, context)


def left_in(folder, context):
    from trainer_kit.storage import Folder

    context.host.barrier()
    return Folder(folder).names()


def to_storage_that_is_not_shared():
    """Into the memory of each rank; what was said, and what is left there."""
    context, url = context_of(dp_shard=2), "memory://not-shared/m"
    publish.PATIENCE = 0.2
    try:
        write_model_state(url, items_of(on_mesh(context), context), max_shard_size=LIMIT, context=context)
    except CheckpointError as error:
        return str(error), left_in(url, context)
    finally:
        publish.PATIENCE = 5.0
    return "", []


def memory_of_an_export(folder):
    """The most bytes that this rank held for an export of six weights of 40,000 bytes, each cut over both ranks."""
    from torch.distributed.tensor import Shard, distribute_tensor

    context = context_of(dp_shard=2)
    mesh = context.mesh_for("dense")["dp_cp_shard"]
    cut = {f"w{n}": distribute_tensor(torch.full((100, 100), float(n)), mesh, [Shard(n % 2)], src_data_rank=None) for n in range(6)}
    items = items_of(cut, context)
    shard_files.ROUND_BYTES = 1
    with LiveBytes() as memory:
        write_model_state(folder, items, max_shard_size=120_000, context=context)
    shard_files.ROUND_BYTES = 32 * 2**20
    return memory.peak


def export_single_elements(folder, degrees):
    """A column of which each rank has one element, as a row: what arrives has a stride that no other size of it would have."""
    from torch.distributed.tensor import Shard, distribute_tensor

    context = context_of(**degrees)
    column = distribute_tensor(torch.tensor([[1.0], [2.0]]), context.mesh_for("dense")["dp_cp_shard"], [Shard(0)], src_data_rank=None)
    write_model_state(folder, mapped({"w": column}, Transpose("w"), context), context=context)
