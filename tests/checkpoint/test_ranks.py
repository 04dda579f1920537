"""Several ranks save and load one checkpoint: any mesh reads what another one wrote, and an error of one rank is an error of all."""

from __future__ import annotations

import hashlib

import pytest
import torch

from tests.checkpoint import on_ranks
from trainer_kit.checkpoint import load, read_manifest
from trainer_kit.testing import run_on_ranks
from trainer_kit.weights import items_of, write_model_state

MESHES = {
    "fsdp 2": (2, {"dp_shard": 2}), "fsdp 3": (3, {"dp_shard": 3}), "fsdp 4": (4, {"dp_shard": 4}), "tp 2": (2, {"tp": 2}),
    "hsdp 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}), "tp 2 fsdp 2": (4, {"tp": 2, "dp_shard": 2}),
}  # fmt: skip


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Of one process: the tensors, the exported files, the checksum of the weights."""
    folder, tensors = tmp_path_factory.mktemp("one"), on_ranks.expected()
    of_model = {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}
    write_model_state(folder, items_of(of_model), max_shard_size=60)
    return tensors, digests(folder), on_ranks.tensors_checksum(of_model.items())


@pytest.mark.parametrize(
    "saved, loaded", [("fsdp 2", ["fsdp 4", "fsdp 3"]), ("tp 2 fsdp 2", ["tp 2", "hsdp 2x2"]), ("hsdp 2x2", ["fsdp 2"])]
)
def test_any_mesh_reads_what_another_one_wrote(tmp_path, reference, saved, loaded):
    """B21, contract 14: rows of 3 and 5, ranks without a row; weights and both moments, bit by bit; in one process too. B98: the exported
    files and the checksum of all weights are those of one process."""
    tensors, files, checksum = reference
    num_ranks, degrees = MESHES[saved]
    for names, text in run_on_ranks(num_ranks, on_ranks.save_and_export, str(tmp_path), degrees, saved == "fsdp 2"):
        assert sorted(names) == sorted(files) and text == checksum
    assert digests(tmp_path / "export") == files
    one = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert load(tmp_path / "step-00000001", one) == {"rank": 0}
    assert same(one, tensors)
    for mesh in loaded:
        num_ranks, degrees = MESHES[mesh]
        (found, _), *others = results = run_on_ranks(num_ranks, on_ranks.load_on, str(tmp_path), degrees)
        assert same(found, tensors) and all(other is None for other, _ in others)
        assert all(values == {"rank": 0} for _, values in results)


def test_every_rank_writes_its_part_once_and_loads_its_part(tmp_path, reference):
    """Replicated tensors are written by one rank of those that have them, parts by theirs, and nothing twice."""
    run_on_ranks(4, on_ranks.save_and_export, str(tmp_path), {"dp_replicate": 2, "dp_shard": 2}, False)
    manifest = read_manifest(tmp_path / "step-00000001")
    assert sorted(manifest.files) == [f"rank-0000{rank}.safetensors" for rank in range(4)]
    held = sum(chunk.end - chunk.start for record in manifest.tensors.values() for chunk in record.chunks)
    assert held == sum(tensor.numel() * 4 for tensor in reference[0].values())
    parts = run_on_ranks(2, on_ranks.bytes_of_a_rank, str(tmp_path))
    assert sum(part for part, _ in parts) == parts[0][1]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind, rank", [("full", 1), ("odd", 1), ("full", 0)])
def test_a_save_that_fails_on_one_rank_fails_on_all(tmp_path, kind, rank, asynchronous):
    """B43, contract 31: the same error everywhere, nothing is left of it, the checkpoint before loads, and the next save works."""
    with on_ranks.seconds(20):
        results = run_on_ranks(2, on_ranks.fail_to_save, str(tmp_path), kind, rank, asynchronous)
    assert len({said for said, *_ in results}) == 1
    (text, cause), left, told, equal = results[0]
    assert f"saving step 2 to {tmp_path}/step-00000002 failed on rank {rank}: " in text
    if kind == "full":
        assert "No space left on device; the checkpoint needs about " in text and cause == "OSError(28, 'No space left on device')"
    else:
        assert "Unsendable: ('refused'" in text
    assert left == ["step-00000001"] and told == [3] and equal
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_background_save_counts_once_all_ranks_have_written(tmp_path, reference):
    """Contracts 26, 30, B41: copied before the call returns, on every rank; `on_saved` at one boundary, when the manifest is there."""
    results = run_on_ranks(2, on_ranks.save_in_background, str(tmp_path))
    assert len({boundaries for _, boundaries, _ in results}) == 1
    assert all(early == (False, []) and told == [1] for early, _, told in results)
    one = {name: torch.zeros_like(tensor) for name, tensor in reference[0].items()}
    load(tmp_path / "step-00000001", one)
    assert same(one, reference[0])


def test_one_rank_removes_what_is_old(tmp_path):
    """B35, contract 29: five saves, one is kept; every rank knows what was removed."""
    results = run_on_ranks(2, on_ranks.share_a_folder, str(tmp_path))
    assert results[0] == results[1] == ([[], *([f"step-{step:08d}"] for step in range(1, 5))], 5, str(tmp_path / "step-00000005"))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


@pytest.mark.filterwarnings("ignore:checkpoint passed over")
def test_the_newest_is_chosen_once(tmp_path, save):
    """B44, contract 26: by rank 0, whatever another rank sees; its error too is that of all."""
    (tmp_path / "empty").mkdir()
    save(tmp_path / "run" / "step-00000004", 4)
    results = run_on_ranks(2, on_ranks.choose_newest, str(tmp_path / "run"), str(tmp_path / "empty"))
    assert results[0] == results[1] and results[0][0] == str(tmp_path / "run" / "step-00000004")
    assert "can be resumed" in results[0][1][0]


def test_a_folder_that_a_rank_does_not_see_is_named(tmp_path):
    """Contract 26: rank 1 has another file system; nothing was loaded on any rank."""
    results = run_on_ranks(2, on_ranks.unshared_file_system, str(tmp_path / "shared"), str(tmp_path / "own"))
    (saving, _), (loading, _), untouched = results[0]
    assert {(a[0], b[0], c) for a, b, c in results} == {(saving, loading, untouched)}
    assert f"rank 1 does not see the folder {tmp_path}/own/step-00000002, which rank 0 has made" in saving
    assert "is missing" in loading and "or rank 1 does not see the file system that the other ranks see" in loading and untouched


def test_what_does_not_fit_on_one_rank_is_loaded_on_none(tmp_path):
    """Contract 27: another shape, and a file whose checksum one rank verified for all; nothing was changed on any rank."""
    results = run_on_ranks(2, on_ranks.load_another_model, str(tmp_path))
    assert results[0] == results[1]
    (other, _), (damaged, _), untouched = results[0]
    assert "b is torch.float32 of shape (3,)" in other and "(4,)" in other
    assert "rank-00001.safetensors was altered or damaged" in damaged and untouched


def test_what_cannot_be_saved_on_one_rank_is_saved_on_none(tmp_path):
    """B26 on ranks: before anything is written."""
    results = run_on_ranks(2, on_ranks.refuse_tensors, str(tmp_path))
    assert results[0] == results[1] and "of 1 is torch.complex128" in results[0][0]
    assert list(tmp_path.iterdir()) == []


def test_values_are_those_of_rank_0_and_what_differs_has_a_key_per_rank(tmp_path):
    """Contract 28."""
    results = run_on_ranks(2, on_ranks.keys_of_ranks, str(tmp_path))
    tensors = {"ranks/0": [0.0, 0.0], "ranks/1": [1.0, 1.0], "same": [1.0]}
    for values, found in results:
        assert values == {"same": {"$tensor": "same"}, "whose": 0} and found == tensors
