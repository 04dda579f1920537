"""Jobs for gloo ranks: exports of distributed tensors, and buffers that the ranks changed by themselves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from trainer_kit import MeshStrategy
from trainer_kit.exceptions import CheckpointError, ModelError
from trainer_kit.mesh.team import Team
from trainer_kit.weights import StateGroup, StateItem, StateMapper, items_of, write_model_state
from trainer_kit.weights.buffers import share_buffers
from trainer_kit.weights.export import mapped_items
from trainer_kit.weights.sources import find_sources
from trainer_kit.weights.whole import whole_on_first


class Stack(StateMapper):
    """"a" and "b" become one stacked "ab" and, so that a group has two outputs, their sum."""

    def groups(self):
        return [StateGroup(frozenset({"a", "b"}), frozenset({"ab", "sum"}))]

    def apply(self, tensors: Mapping[str, torch.Tensor]):
        return {"ab": torch.stack([tensors["a"], tensors["b"]]), "sum": tensors["a"] + tensors["b"]}

    def inverse(self, *, lossy=False):
        raise NotImplementedError


def context_of(**degrees):
    return MeshStrategy(device="cpu", **degrees).build()


def full():
    return {"a": torch.arange(10.0).view(5, 2), "b": torch.arange(10.0).view(5, 2).neg()}


def sharded(context, dim=0):
    """The two tensors, one cut over the ranks, one plain."""
    from torch.distributed.tensor import Shard, distribute_tensor

    tensors = full()
    mesh = context.mesh_for("dense")["dp_cp_shard"]
    return {**tensors, "a": distribute_tensor(tensors["a"], mesh, [Shard(dim)], src_data_rank=None)}


def mapped(tensors, mapper, context=None):
    """What a mapper of all ranks makes of the tensors."""
    num_ranks = 1 if context is None else context.world_size
    return mapped_items(find_sources(tensors, Team.of(context)), mapper, ranks=range(num_ranks))


def export_through_a_mapper(folder):
    context = context_of(dp_shard=2)
    return write_model_state(folder, mapped(sharded(context), Stack(), context), context=context)


def fail_to_export(folder, foreign):
    """A tensor that rank 0 cannot make, then a folder of someone else, a name twice; then a good export. What was said on this rank."""
    context, said = context_of(dp_shard=2), []
    tensors = sharded(context)
    first, second = items_of(tensors, context)
    broken = StateItem("broken", (1,), torch.float32, break_down)
    for target, items in ((folder, [first, broken, second]), (foreign, [first, second]), (folder, [first, first])):
        try:
            write_model_state(target, items, context=context)
        except (CheckpointError, ModelError, ZeroDivisionError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said, write_model_state(folder, [first, second], context=context)


def break_down():
    raise ZeroDivisionError("no such luck")


def gather_parts():
    """A tensor cut along its columns, one whose dtype gloo cannot send, and one on a mesh that is none of this run."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    context = context_of(dp_shard=2)
    columns = whole_on_first(sharded(context, dim=1)["a"], context)
    mesh = context.mesh_for("dense")["dp_cp_shard"]
    small = torch.arange(5, dtype=torch.uint8).view(torch.float8_e4m3fn)
    float8 = whole_on_first(distribute_tensor(small, mesh, [Shard(0)], src_data_rank=None), context)
    try:
        whole_on_first(distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None), context)
    except ModelError as error:
        return columns, None if float8 is None else float8.view(torch.uint8), str(error)
    return None


def share(degrees):
    """Buffers of a normalisation that saw other samples, and a constant one; what each rank has in the end, twice."""
    context = context_of(**degrees)
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("table", torch.arange(4.0))
    norm(torch.full((3, 2), float(context.data_rank)) + torch.arange(3.0)[:, None])
    buffers = dict(norm.named_buffers())
    first = share_buffers(buffers, context)
    return first, share_buffers(buffers, context), {name: buffer.tolist() for name, buffer in buffers.items()}


def share_on_stages():
    """As `share`, where the first stage has a constant buffer alone; and how many exchanges each of two calls took."""
    context = context_of(pp=2, dp_replicate=2)
    buffers = {"table": torch.arange(4.0)}
    if context.pipeline_rank == 1:
        norm = nn.BatchNorm1d(2)
        norm(torch.full((3, 2), float(context.data_rank)) + torch.arange(3.0)[:, None])
        buffers = dict(norm.named_buffers())
    exchange, calls = context.host.exchange, []
    context.host.exchange = lambda value: calls.append(len(calls)) or exchange(value)
    names, counts = [], []
    for _ in range(2):
        calls.clear()
        names.append(share_buffers(buffers, context))
        counts.append(len(calls))
    return names, counts, {name: buffer.tolist() for name, buffer in buffers.items()}
