"""What was saved comes back, bit for bit, into the same memory."""

from __future__ import annotations

import json
import pickletools
from pathlib import Path

import pytest
import safetensors.torch
import torch

from trainer_kit.checkpoint import CheckpointSaver, flatten_state, load, read_manifest, unflatten_state
from trainer_kit.exceptions import CheckpointError
from trainer_kit.weights.format import DTYPES
from trainer_kit.weights.regions import PIECE_BYTES


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.shape


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and (a.numel() == 0 or torch.equal(bits(a), bits(b)))


def all_dtypes():
    generator = torch.Generator().manual_seed(0)
    raw = {name: torch.randint(0, 256, (6 * dtype.itemsize,), generator=generator, dtype=torch.uint8) for name, dtype in DTYPES.items()}
    raw["BOOL"] = raw["BOOL"] % 2
    return {name: data.view(DTYPES[name]).view(2, 3) for name, data in raw.items()}


SHAPES = {
    "scalar": torch.tensor(3.25),
    "empty": torch.empty(0, 5),
    "empty_inner": torch.empty(4, 0, 2, dtype=torch.int32),
    "transposed": torch.arange(20.0).view(4, 5).t(),
    "strided": torch.arange(40, dtype=torch.int16)[::3],
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "large_transposed": torch.arange(PIECE_BYTES // 2, dtype=torch.float32).view(-1, 64).t(),
    "long_rows": torch.arange(3 * PIECE_BYTES // 2, dtype=torch.float32).view(-1, 2).t(),
    "conjugate": torch.view_as_complex(torch.arange(6.0).view(3, 2)).conj(),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["local", "memory"])
def test_bitwise_for_every_dtype_and_layout(tmp_path, where, asynchronous):
    """Contract 27; B39: a URL of fsspec is no path."""
    path = str(tmp_path / "step-00000001") if where == "local" else f"memory://{tmp_path.name}/{asynchronous}/step-00000001"
    tensors = {f"dtype/{name}": tensor for name, tensor in all_dtypes().items()} | SHAPES
    saver = CheckpointSaver()
    saver.save(path, tensors, {"plain": [1, 2.5]}, step=1, asynchronous=asynchronous)
    saver.close()
    templates = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    memory = {name: tensor.data_ptr() for name, tensor in templates.items()}
    assert load(path, templates) == {"plain": [1, 2.5]}
    for name, tensor in tensors.items():
        assert same(templates[name], tensor.resolve_conj()), name
        assert templates[name].data_ptr() == memory[name]


def test_loading_into_views_fills_only_the_view(tmp_path, save):
    values = torch.arange(PIECE_BYTES, dtype=torch.float32).view(-1, 8)
    save(tmp_path, 1, {"w": values})
    base = torch.full((8, len(values) * 2), -1.0)
    load(tmp_path, {"w": base.t()[::2]})
    assert torch.equal(base[:, ::2], values.t())
    assert bool((base[:, 1::2] == -1).all())


def test_parameters_that_require_grad_are_filled_in_place(tmp_path, save):
    save(tmp_path, 1, {"w": torch.tensor([[1.0, 2.0]])})
    parameter = torch.nn.Parameter(torch.zeros(1, 2))
    load(tmp_path, {"w": parameter})
    assert parameter.tolist() == [[1.0, 2.0]]
    assert parameter.requires_grad


def test_dtype_of_optimizer_state_survives_and_is_never_converted(tmp_path, save):
    """B18; contract 27: fp32 parameter with bf16 moment, bf16 parameter with fp32 moment, fp32 step."""
    tensors = {
        "p": torch.tensor([1.0]), "p/exp_avg": torch.tensor([0.1], dtype=torch.bfloat16),
        "q": torch.tensor([1.0], dtype=torch.bfloat16), "q/exp_avg": torch.tensor([0.1]), "step": torch.tensor(3.0),
    }  # fmt: skip
    CheckpointSaver().save(tmp_path / "a", tensors, None, step=3)
    templates = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load(tmp_path / "a", templates)
    assert all(same(templates[name], tensor) for name, tensor in tensors.items())
    templates = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()} | {"q/exp_avg": torch.zeros(1, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match=r"q/exp_avg is torch.float32 .* but torch.bfloat16"):
        load(tmp_path / "a", templates)
    assert all(int(t.count_nonzero()) == 0 for t in templates.values())


def test_missing_unexpected_and_misshaped_keys_are_named(tmp_path, save):
    """Contract 27: nothing is left at its fresh value in silence."""
    save(tmp_path, 1, {"a": torch.ones(2), "b": torch.ones(3)})
    template = torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"not in it: c; not in this run: b"):
        load(tmp_path, {"a": template, "c": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"b is .*\(3,\).* \(4,\)"):
        load(tmp_path, {"a": template, "b": torch.zeros(4)})
    with pytest.raises(CheckpointError, match="meta"):
        load(tmp_path, {"a": template, "b": torch.zeros(3, device="meta")})
    assert template.tolist() == [0, 0]


def test_parts_are_chosen_by_prefix_and_strictness_can_be_given_up(tmp_path, state, save):
    save(tmp_path, 4)
    weight, bias = torch.zeros(3, 4), torch.zeros(3, dtype=torch.bfloat16)
    load(tmp_path, {"model/weight": weight, "model/bias": bias}, prefixes=["model/"])
    assert torch.equal(weight, state(4)["model"]["weight"])
    weight.zero_()
    other = torch.full((1,), 7.0)
    load(tmp_path, {"model/weight": weight, "other": other}, strict=False)
    assert torch.equal(weight, state(4)["model"]["weight"])
    assert other.item() == 7


def test_states_of_unknown_shape_are_allocated_from_the_manifest(tmp_path, save):
    save(tmp_path, 1, {"callbacks": {"EMA": [torch.arange(3), "x"]}, "model": torch.ones(1)})
    manifest = read_manifest(tmp_path)
    records = {name: record for name, record in manifest.tensors.items() if name.startswith("callbacks/")}
    tensors = {name: torch.empty(record.shape, dtype=record.dtype) for name, record in records.items()}
    values = load(tmp_path, tensors, prefixes=["callbacks/"], manifest=manifest)
    found = unflatten_state(tensors, values["callbacks"])
    assert found["EMA"][0].tolist() == [0, 1, 2] and found["EMA"][1] == "x"


def test_files_are_safetensors_and_json_without_a_pickle(tmp_path, save):
    """B26; promise 5: any safetensors reader and any JSON reader opens them, nothing in them is code."""
    tensors = all_dtypes()
    save(tmp_path / "c", 1, {"t": tensors})
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    json.loads((tmp_path / "c" / "manifest.json").read_text(), parse_constant=pytest.fail)
    found = safetensors.torch.load_file(tmp_path / "c" / "rank-00000.safetensors")
    assert all(same(found[f"t/{name}"], tensor) for name, tensor in tensors.items())
    for file in (tmp_path / "c").iterdir():
        with pytest.raises(ValueError):
            list(pickletools.genops(file.read_bytes()))


def test_a_state_without_tensors(tmp_path, save):
    save(tmp_path / "c", 1, {"x": (1, 2)})
    assert unflatten_state({}, load(tmp_path / "c", {})) == {"x": (1, 2)}


def test_a_moved_checkpoint_loads(tmp_path, save):
    """B27: no path of the machine that wrote it is inside."""
    save(tmp_path / "old" / "step-00000002", 2, {"w": torch.ones(1)})
    assert str(tmp_path).encode() not in (tmp_path / "old" / "step-00000002" / "manifest.json").read_bytes()
    Path(tmp_path / "old").rename(tmp_path / "new")
    weight = torch.zeros(1)
    load(tmp_path / "new" / "step-00000002", {"w": weight})
    assert weight.item() == 1


@pytest.mark.parametrize("tensor", [torch.zeros(1, dtype=torch.complex128), torch.zeros(2, 2).to_sparse(), torch.zeros(1, device="meta")])
def test_tensors_that_cannot_be_stored_are_named_before_anything_is_written(tmp_path, save, tensor):
    with pytest.raises(CheckpointError, match="model/odd"):
        save(tmp_path / "c", 1, {"model": {"odd": tensor}})
    assert not (tmp_path / "c").exists()


def test_flattened_values_are_json(state):
    json.dumps(flatten_state(state(1))[1], allow_nan=False)
