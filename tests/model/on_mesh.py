"""Models that torch itself distributes, so that the tests of the build rest on nothing else of ours; for functions that run on ranks."""

import contextlib

import torch

from trainer_kit.mesh import DistributedContext, MeshStrategy
from trainer_kit.mesh.layout import layout_of, local_of
from trainer_kit.model import ModelProvider
from trainer_kit.names import alias_table, all_tensors

MESHES = {
    "replicate 2": {"dp_replicate": 2},
    "fsdp 2": {"dp_shard": 2},
    "fsdp 3": {"dp_shard": 3},
    "fsdp 4": {"dp_shard": 4},
    "hsdp 2x2": {"dp_replicate": 2, "dp_shard": 2},
    "tp 2": {"tp": 2},
    "tp 2 x fsdp 2": {"tp": 2, "dp_shard": 2},
}


@contextlib.contextmanager
def mesh(name):
    """The context of this rank on one of MESHES."""
    context = MeshStrategy(**{"dp_replicate": 1} | MESHES[name], device="cpu").build()
    try:
        yield context
    finally:
        context.close()


def alone():
    """The context of one process, for the values that a mesh must give too."""
    return DistributedContext(MeshStrategy(), torch.device("cpu"))


class Laid(ModelProvider):
    """Builds a module, and distributes it by torch's own functions as the mesh says. `plan`: torch's styles by name, for tp."""

    def __init__(self, build, plan=None, parallelize=None):
        self.build, self.plan, self.parallelize = build, plan, parallelize

    def initialize_model_stage(self, ctx):
        return self.build()

    def parallelize_model_stage(self, ctx):
        if self.parallelize is not None:
            self.parallelize(ctx.module, ctx.context)
        else:
            lay_out(ctx.module, ctx.context, self.plan)


def lay_out(module, context, plan=None):
    """Tensor parallel by `plan`, then FSDP: each child that holds parameters a unit, those with tied ones and the rest in the root."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    dense, ties = context.mesh_for("dense"), alias_table(module)
    if context.num_tensor_ranks > 1:
        parallelize_module(module, dense["tp"], plan() if plan else {})
        for alias, name in ties.items():
            setattr(*owner_of(module, alias), module.get_parameter(name))
    sizes = context.dense_sizes()
    if sizes["dp_cp_shard"] > 1:
        dims = "dp_cp_shard" if sizes["dp_replicate"] == 1 else ("dp_replicate", "dp_cp_shard")
        tied = {name.split(".")[0] for pair in ties.items() for name in pair}
        for name, child in module.named_children():
            if name not in tied and any(True for _ in child.parameters()) and callable(getattr(child, "forward", None)):
                fully_shard(child, mesh=dense[dims])
        fully_shard(module, mesh=dense[dims])


def owner_of(module, name):
    prefix, _, attribute = name.rpartition(".")
    return module.get_submodule(prefix), attribute


def differences(module, reference):
    """The names of tensors that are not, bit for bit, this rank's part of those of `reference`."""
    whole = dict(all_tensors(reference))
    assert whole.keys() == dict(all_tensors(module)).keys()
    assert alias_table(module) == alias_table(reference)
    found = []
    for name, tensor in all_tensors(module):
        expected, local = whole[name][layout_of(tensor).box], local_of(tensor)
        if tensor.dtype != whole[name].dtype or local.dtype != tensor.dtype or not torch.equal(local, expected):
            found.append(name)
        if tensor.requires_grad != whole[name].requires_grad:
            found.append(f"requires_grad of {name}")
    return found


def boxes(module):
    """The place of this rank's part of each tensor: name -> (shape, offsets, sizes)."""
    return {name: (layout.shape, layout.offsets, layout.sizes) for name, t in all_tensors(module) for layout in [layout_of(t)]}


def covers(shape, parts):
    """Whether the boxes (offsets, sizes) together are the whole, and different ones do not overlap."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in set(parts):
        counts[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    return bool((counts == 1).all())
