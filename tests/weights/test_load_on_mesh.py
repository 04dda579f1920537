"""Loading into tensors that are cut over ranks: each rank reads its part, and gets the values that one process would."""

import pytest
import torch
from safetensors.torch import save_file

from trainer_kit import MeshStrategy
from trainer_kit.exceptions import CheckpointError
from trainer_kit.mesh.layout import layout_of, local_of
from trainer_kit.testing import run_on_ranks
from trainer_kit.weights import (
    Cast,
    Concatenate,
    IdentityMapper,
    ModelStateReader,
    Parallel,
    Stack,
    StateGroup,
    StateMapper,
    Transpose,
    load_model_state,
    regions,
)
from trainer_kit.weights.loading import StageLoad, load_stages
from trainer_kit.weights.pieces import whole
from trainer_kit.weights.stages import StageState

SHAPES = {"rows": (5, 3), "columns": (4, 6000), "block": (7, 6000), "vector": (3,), "one": (1, 4), "whole": (2, 2), "scalar": ()}


class TwoGroups(StateMapper):
    """Two stored tensors in one of the model, and one stored tensor under two names."""

    def groups(self):
        return [StateGroup(frozenset(("x", "y")), frozenset(("rows",))), StateGroup(frozenset("z"), frozenset(("columns", "block")))]

    def apply(self, tensors):
        return {"rows": torch.cat([tensors["x"], tensors["y"]])} if "x" in tensors else {"columns": tensors["z"], "block": tensors["z"]}

    def pieces(self, shapes):
        return {name: [whole("z", shapes["z"])] for name in ("columns", "block")} if "z" in shapes else {}

    def inverse(self, *, lossy=False):
        raise NotImplementedError


def stored():
    return {name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1 for name, shape in SHAPES.items()}


def cut(shape, dtype=torch.float32, **placed):
    """A DTensor of zeros; placed: mesh dimension -> dim of the tensor. A strided one where two mesh dimensions cut the same dim."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    sizes = {"dp": 1, "tp": 2} if torch.distributed.get_world_size() == 2 else {"dp": 2, "tp": 2}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    placements = [Shard(placed[dim]) if dim in placed else Replicate() for dim in sizes]
    return distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, placements)


def targets(dtype=torch.float32):
    cuts = {"rows": {"tp": 0}, "columns": {"tp": 1}, "block": {"dp": 0, "tp": 1}, "vector": {"dp": 0, "tp": 0}, "one": {"tp": 0}}
    found = {name: cut(SHAPES[name], dtype, **cuts[name]) for name in cuts}
    return found | {name: torch.zeros(SHAPES[name], dtype=dtype) for name in ("whole", "scalar")}


def wrong(targets, expected):
    """The targets that are not this rank's part of what is stored, in the memory and dtype that they had."""
    parts = {name: expected[name][layout_of(target).box].to(target.dtype) for name, target in targets.items()}
    return [name for name, target in targets.items() if not torch.equal(local_of(target), parts[name])]


class Counted:
    """Bytes of tensors that are read inside the block."""

    def __enter__(self):
        self.num_bytes, self._original = 0, regions.read_into
        regions.read_into = self._read_into
        return self

    def _read_into(self, file, buffer):
        self.num_bytes += len(buffer)
        return self._original(file, buffer)

    def __exit__(self, *_):
        regions.read_into = self._original


def load_slices(folder):
    found = targets()
    memory = {name: local_of(target).data_ptr() for name, target in found.items()}
    with Counted() as counted:
        load_model_state(folder, IdentityMapper(found), found)
    assert memory == {name: local_of(target).data_ptr() for name, target in found.items()}
    converted = targets(torch.float64)
    load_model_state(folder, IdentityMapper(converted), converted)
    return wrong(found, stored()), wrong(converted, stored()), counted.num_bytes, sum(local_of(t).nbytes for t in found.values())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_rank_reads_its_part(tmp_path, num_ranks):
    """Contract 34: no other bytes than those of its boxes; uneven and empty parts, cuts of rows, of columns, and of both."""
    save_file(stored(), tmp_path / "model.safetensors")
    for faults, converted, num_read, num_held in run_on_ranks(num_ranks, load_slices, str(tmp_path)):
        assert faults == converted == []
        assert num_read == num_held
    total = sum(tensor.nbytes for tensor in stored().values())
    assert num_held < total * 0.6


def load_mapped(folder):
    found = {"rows": cut((5, 3), tp=0), "columns": cut((4, 6000), tp=1), "block": cut((4, 6000), tp=0)}
    with Counted() as counted:
        load_model_state(folder, TwoGroups(), found)
    expected = {"rows": stored()["rows"], "columns": stored()["columns"], "block": stored()["columns"]}
    return wrong(found, expected), counted.num_bytes


def test_what_a_mapper_makes_is_cut_afterwards(tmp_path):
    """Contract 34: inputs of a group are read whole; a tensor that is copied to two targets is read as each of them is cut."""
    values = stored()
    rows, matrix = values["rows"], values["columns"]
    save_file({"x": rows[:1].clone(), "y": rows[1:].clone(), "z": matrix}, tmp_path / "model.safetensors")
    for faults, num_read in run_on_ranks(2, load_mapped, str(tmp_path)):
        assert faults == []
        assert num_read == rows.nbytes + matrix.nbytes // 2 * 2


def load_tied(folder):
    found = {"rows": cut((5, 3), tp=0)}
    load_model_state(folder, IdentityMapper(["rows", "head"]), found, aliases={"head": "rows"})
    texts = []
    for shape, names in (((5, 3), ["rows"]), ((6, 3), ["rows"]), ((5, 3), ["rows", "other"])):
        try:
            load_model_state(folder, IdentityMapper(names), {name: cut(shape, tp=0) for name in names})
        except CheckpointError as error:
            texts.append(str(error))
    return wrong(found, stored()), texts


def test_ties_shapes_and_names_are_those_of_the_whole(tmp_path):
    """Contracts 12, 35: a tied weight from either name; missing, unexpected and mis-shaped ones, though a rank holds only a part."""
    rows = stored()["rows"]
    save_file({"rows": rows, "head": rows.clone()}, tmp_path / "model.safetensors")
    for faults, (unexpected, shape, missing) in run_on_ranks(2, load_tied, str(tmp_path)):
        assert faults == []
        assert "1 unexpected (in the files, used by nothing): 'head'" in unexpected
        assert "'rows' is [5, 3] in the files, [6, 3] in the model" in shape
        assert "1 missing (in the model, not in the files): 'other'" in missing


def load_contradiction(folder):
    found = {"rows": cut((5, 3), tp=0)}
    try:
        load_model_state(folder, IdentityMapper(["rows", "head"]), found, aliases={"head": "rows"})
    except CheckpointError as error:
        return str(error)
    return None


def test_a_contradiction_of_tied_weights_is_seen_where_it_lies(tmp_path):
    """Contract 12: on the rank that holds the differing element."""
    rows = stored()["rows"]
    save_file({"rows": rows, "head": rows + torch.tensor([[0.0]] * 4 + [[1.0]])}, tmp_path / "model.safetensors")
    first, second = run_on_ranks(2, load_contradiction, str(tmp_path))
    assert first is None and "different values for" in second and "'rows'" in second


def test_the_reader_reads_a_part(tmp_path):
    values = stored()
    save_file(values, tmp_path / "model.safetensors")
    reader = ModelStateReader(tmp_path)
    part = torch.zeros(2, 3)
    with reader.open("model.safetensors") as handle:
        reader.read(handle, "rows", part, (3, 0))
    assert torch.equal(part, values["rows"][3:])


# ---- through mappers


def fused_mapper():
    return Parallel(
        [
            Concatenate(["q", "k", "v"], "qkv", sizes=[4, 2, 1]),
            Transpose("t", "turned"),
            Stack(["e0", "e1", "e2"], "experts"),
            Cast("wide", "narrow", dtype=torch.bfloat16),
        ]
    )


def fused_source():
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (4, 3000), "k": (2, 3000), "v": (1, 3000), "t": (3000, 5), **{f"e{i}": (2, 3000) for i in range(3)}, "wide": (4, 3000)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def load_fused(folder):
    """What is wrong, bytes read for mosaics and for what the mapper makes of whole tensors, and bytes held; with a stage that reads."""
    context = MeshStrategy(device="cpu", dp_shard=torch.distributed.get_world_size()).build()
    mesh = context.mesh_for("dense")["dp_cp_shard"]

    def cut_over(shape):
        from torch.distributed.tensor import Shard, distribute_tensor

        return distribute_tensor(torch.zeros(shape), mesh, [Shard(0)], src_data_rank=None)

    shapes = {"qkv": (7, 3000), "turned": (5, 3000), "experts": (3, 2, 3000), "narrow": (4, 3000)}
    found = {name: cut_over(shape) for name, shape in shapes.items()}
    with Counted() as counted:
        load_stages(folder, lambda: [StageLoad(fused_mapper(), StageState(0, found, {}, frozenset()))], context)
    expected = fused_mapper().apply_all(fused_source())
    held = sum(local_of(found[name]).nbytes for name in ("qkv", "turned", "experts"))
    return wrong(found, {name: tensor.float() for name, tensor in expected.items()}), counted.num_bytes, held


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_rank_reads_its_part_of_fused_parameters(tmp_path, num_ranks):
    """Contract 34: concatenated, stacked and transposed parameters are filled from the bytes of each rank's own part. What needs whole
    tensors, as a cast, is read by the first rank of the stage alone. The transposed one is read by rows, a few bytes more."""
    source = fused_source()
    save_file(source, tmp_path / "model.safetensors")
    ranks = run_on_ranks(num_ranks, load_fused, str(tmp_path))
    assert [faults for faults, _, _ in ranks] == [[]] * num_ranks
    for index, (_, num_read, held) in enumerate(ranks):
        assert held <= num_read - (source["wide"].nbytes if index == 0 else 0) <= held + source["t"].nbytes
