"""Jobs for gloo ranks: a small state that is cut over a mesh in several ways, with sizes that no number of ranks divides."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

import torch
from torch import nn

from trainer_kit import MeshStrategy
from trainer_kit.checkpoint import CheckpointFolder, CheckpointSaver, flatten_state, load, newest_path, read_manifest
from trainer_kit.checkpoint.identity import tensors_checksum
from trainer_kit.exceptions import CheckpointError
from trainer_kit.mesh.layout import layout_of, like, local_of
from trainer_kit.storage import Folder
from trainer_kit.weights import items_of, write_model_state
from trainer_kit.weights.whole import whole_on_first

KEYS = ("exp_avg", "exp_avg_sq")


class Small(nn.Module):
    """Rows of 2, 3 and 5, of which some rank of 4 has none, and a vector that is not cut by tensor parallelism."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 3, bias=False)
        self.norm, self.pair = nn.LayerNorm(3), nn.Linear(3, 2)


def full_values():
    """Weights and gradients by name, the same everywhere."""
    generator = torch.Generator().manual_seed(3)
    model = Small()
    values = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    return values, {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def distributed(context):
    """The parameters of a model on this mesh, by name: tensor parallel inside FSDP, as far as there are such dimensions."""
    model, mesh = Small(), context.mesh_for("dense") if context.world_size > 1 else None
    sizes = context.dense_sizes()
    if sizes["tp"] > 1:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel(), "pair": ColwiseParallel()})
    if sizes["dp_cp_shard"] > 1:
        from torch.distributed.fsdp import fully_shard

        hybrid = sizes["dp_replicate"] > 1
        fully_shard(model, mesh=mesh["dp_replicate", "dp_cp_shard"] if hybrid else mesh["dp_cp_shard"])
    return dict(model.named_parameters())


def trained(context, *, step=1):
    """Weights and moments after a step of AdamW on the local parts, in the layout of their parameters."""
    values, gradients = full_values()
    tensors = {}
    for name, parameter in distributed(context).items():
        box = layout_of(parameter).box
        local = nn.Parameter(local_of(parameter))
        with torch.no_grad():
            local.copy_(values[name][box])
        local.grad = gradients[name][box].clone()
        optimizer = torch.optim.AdamW([local], lr=0.1)
        for _ in range(step):
            optimizer.step()
        state = optimizer.state[local]
        tensors[f"model/{name}"] = parameter.detach()
        tensors |= {f"optimizer/{name}/{key}": like(parameter, state[key]) for key in KEYS}
        tensors[f"optimizer/{name}/step"] = state["step"]
    return tensors


def expected(step=1):
    """The same in one process."""
    return {name: tensor.clone() for name, tensor in trained(MeshStrategy(device="cpu").build(), step=step).items()}


def empty(context):
    """What a checkpoint of `trained` is loaded into."""
    templates = trained(context)
    for tensor in templates.values():
        local_of(tensor).zero_()
    return templates


def whole(tensors, context):
    """On rank 0 the whole tensors; None elsewhere."""
    found = {name: whole_on_first(tensor, context) for name, tensor in tensors.items()}
    return found if context.is_main else None


def context_of(**degrees):
    return MeshStrategy(device="cpu", **degrees).build()


# ---- jobs


def save_and_export(folder, degrees, asynchronous):
    """Save, export, and the checksum of all weights; gives the names of the exported files and the checksum."""
    context = context_of(**degrees)
    tensors, saver = trained(context), CheckpointSaver(context)
    saver.save(f"{folder}/step-00000001", tensors, {"rank": context.rank}, step=1, asynchronous=asynchronous)
    saver.close()
    of_model = {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}
    files = write_model_state(f"{folder}/export", items_of(of_model, context), max_shard_size=60, context=context)
    return files, tensors_checksum(of_model.items(), context)


def load_on(folder, degrees):
    """What rank 0 has of each tensor after a load, and the values that every rank got."""
    context = context_of(**degrees)
    templates = empty(context)
    memory = {name: local_of(tensor).data_ptr() for name, tensor in templates.items()}
    values = load(f"{folder}/step-00000001", templates, context=context)
    assert all(local_of(tensor).data_ptr() == memory[name] for name, tensor in templates.items())
    return whole(templates, context), values


def bytes_of_a_rank(folder):
    """How many bytes of tensors this rank loads into, and how many the checkpoint has."""
    context = context_of(dp_shard=2)
    templates = {name: tensor for name, tensor in empty(context).items() if not name.endswith("step")}
    saved = read_manifest(f"{folder}/step-00000001", context=context).tensors
    local = sum(local_of(tensor).numel() * tensor.element_size() for tensor in templates.values())
    return local, sum(saved[name].dtype.itemsize * torch.Size(saved[name].shape).numel() for name in templates)


class RankFolder(Folder):
    """Behaves otherwise on one rank: `full` fails to write with a full disk, `slow` waits before it writes."""

    def __init__(self, url, rank, kind):
        super().__init__(url)
        self._kind = kind if int(os.environ["RANK"]) == rank else ""

    def open(self, name, mode="rb"):
        if mode == "wb" and self._kind == "slow":
            time.sleep(0.2)
        if mode == "wb" and self._kind == "full":
            super().open(name, mode).close()
            raise OSError(errno.ENOSPC, "No space left on device")
        if mode == "wb" and self._kind == "odd":
            raise Unsendable("refused", lambda: None)
        return super().open(name, mode)


class Unsendable(Exception):
    """An error that no other process can take in."""


def message_of(action):
    """The text of the CheckpointError that it raises, and of its cause."""
    try:
        action()
    except CheckpointError as error:
        return str(error), repr(error.__cause__)
    return None


def fail_to_save(folder, kind, rank, asynchronous):
    """A good save, one that fails on one rank, and a good one again; what the failed one said on this rank."""
    context = context_of(dp_shard=2)
    tensors, saver, told = trained(context), CheckpointSaver(context), []
    saver.save(f"{folder}/step-00000001", tensors, None, step=1)

    def failing():
        broken = RankFolder(f"{folder}/step-00000002", rank, kind)
        saver.save(broken, tensors, None, step=2, asynchronous=asynchronous, on_saved=lambda: told.append(2))
        saver.wait()

    said = message_of(failing)
    left = sorted(path.name for path in Path(folder).iterdir())
    saver.save(f"{folder}/step-00000003", tensors, None, step=3, on_saved=lambda: told.append(3))
    templates = empty(context)
    load(f"{folder}/step-00000001", templates, context=context)
    return said, left, told, all(torch.equal(local_of(templates[name]), local_of(tensors[name])) for name in tensors)


def save_in_background(folder):
    """Change everything right after the call; then meet at boundaries, as the loop does, until all ranks have written."""
    context = context_of(dp_shard=2)
    tensors, saver, told = trained(context), CheckpointSaver(context), []
    slow = RankFolder(f"{folder}/step-00000001", 1, "slow")
    saver.save(slow, tensors, None, step=1, asynchronous=True, on_saved=lambda: told.append(CheckpointFolder(folder).newest().step))
    early = (saver.ended, list(told))
    for tensor in tensors.values():
        local_of(tensor).fill_(-1.0)
    boundaries = 0
    while saver.in_flight:
        boundaries += 1
        time.sleep(0.01)
        if context.host.sum([float(saver.ended)]) == [2.0]:
            saver.settle()
    saver.settle()
    return early, boundaries, told


def share_a_folder(folder):
    """Five saves with retention, each rank at its own pace; what `retain` gave on this rank."""
    context = context_of()
    saver, shared, removed = CheckpointSaver(context), CheckpointFolder(folder).shared_by(context), []
    for step in range(1, 6):
        time.sleep(0.02 * ((step + context.rank) % 2))
        saver.save(f"{folder}/step-{step:08d}", {"w": torch.ones(3)}, None, step=step, on_saved=lambda: removed.append(shared.retain(1)))
    return removed, shared.find_newest().saved.step, newest_path([CheckpointFolder(folder)], context)


def choose_newest(folder, elsewhere):
    """Rank 1 looks at another folder, as if its file system lagged behind. The second choice has nothing that can be resumed."""
    context = context_of()
    mine = [CheckpointFolder(folder if context.is_main else elsewhere)]
    chosen = newest_path(mine, context)
    for path in Path(folder).glob("step-*/*.safetensors") if context.is_main else ():
        path.write_bytes(b"")
    return chosen, message_of(lambda: newest_path(mine, context))


def unshared_file_system(folder, elsewhere):
    """Save to, and load from, a folder that rank 1 does not see."""
    import trainer_kit.checkpoint.writer as writer

    context = context_of(dp_shard=2)
    mine = folder if context.is_main else elsewhere
    tensors, before = trained(context), writer.SECONDS_TO_SEE_FOLDER
    writer.SECONDS_TO_SEE_FOLDER = 0.1
    try:
        saving = message_of(lambda: CheckpointSaver(context).save(f"{mine}/step-00000002", tensors, None, step=2))
    finally:
        writer.SECONDS_TO_SEE_FOLDER = before
    CheckpointSaver(context).save(f"{folder}/step-00000001", tensors, None, step=1)
    templates = empty(context)
    loading = message_of(lambda: load(f"{mine}/step-00000001", templates, context=context))
    return saving, loading, all(int(local_of(tensor).count_nonzero()) == 0 for tensor in templates.values())


def load_another_model(folder):
    """On rank 1 alone a tensor has another shape, then a file is damaged; whether anything was changed on this rank."""
    context = context_of()
    CheckpointSaver(context).save(f"{folder}/step-00000001", {"a": torch.ones(2), "b": torch.ones(3)}, None, step=1)
    templates = {"a": torch.zeros(2), "b": torch.zeros(3 + context.rank)}
    other = message_of(lambda: load(f"{folder}/step-00000001", templates, context=context))
    context.host.barrier()
    if context.is_main:
        (path,) = Path(folder).glob("step-*/rank-00001.safetensors")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    context.host.barrier()
    templates = {"a": torch.zeros(2), "b": torch.zeros(3)}
    damaged = message_of(lambda: load(f"{folder}/step-00000001", templates, context=context))
    return other, damaged, all(int(tensor.count_nonzero()) == 0 for tensor in templates.values())


def refuse_tensors(folder):
    """A tensor that cannot be saved, on rank 1 alone."""
    context = context_of()
    tensors = {"a": torch.ones(2), f"of {context.rank}": torch.ones(1, dtype=torch.complex128 if context.rank else torch.float32)}
    return message_of(lambda: CheckpointSaver(context).save(f"{folder}/c", tensors, None, step=1, asynchronous=True))


def keys_of_ranks(folder):
    """Contract 28: a value per rank under its own key; each rank reads all of them."""
    context = context_of()
    tensors, values = flatten_state({"same": torch.ones(1), "whose": context.rank})
    tensors[f"ranks/{context.rank}"] = torch.full((2,), float(context.rank))
    CheckpointSaver(context).save(f"{folder}/c", tensors, values, step=1)
    templates = {name: torch.zeros(2) for name in ("ranks/0", "ranks/1")} | {"same": torch.zeros(1)}
    return load(f"{folder}/c", templates, context=context), {name: tensor.tolist() for name, tensor in templates.items()}


@contextlib.contextmanager
def seconds(limit):
    """The block takes no longer: a hang would."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < limit
