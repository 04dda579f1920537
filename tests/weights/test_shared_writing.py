"""Several ranks write the files of one model state: the bytes are those of one process, and a failure of one writer is that of all."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.weights import shared_jobs
from tests.weights.test_ranks import digests
from trainer_kit.testing import run_on_ranks
from trainer_kit.weights import items_of, write_model_state

from .on_ranks import mapped

MESHES = {
    "fsdp 2": (2, {"dp_shard": 2}), "tp 2": (2, {"tp": 2}), "fsdp 2 x tp 2": (4, {"dp_shard": 2, "tp": 2}), "fsdp 4": (4, {"dp_shard": 4}),
}  # fmt: skip


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    write_model_state(folder / "plain", items_of(shared_jobs.tensors()), max_shard_size=shared_jobs.LIMIT, dtype=torch.bfloat16)
    write_model_state(folder / "mapped", mapped(shared_jobs.tensors(), shared_jobs.Layers()), max_shard_size=shared_jobs.LIMIT)
    return {name: digests(folder / name) for name in ("plain", "mapped")}


@pytest.mark.parametrize("mesh", MESHES)
def test_the_files_are_those_of_one_process(tmp_path, of_one_process, mesh):
    """B98, contract 37: cast, cut along rows and columns, through pieces and through a mapper that computes; each file by one rank, and the
    data ranks share them."""
    num_ranks, degrees = MESHES[mesh]
    begun = run_on_ranks(num_ranks, shared_jobs.export_both, str(tmp_path), degrees)
    for index, name in enumerate(("plain", "mapped")):
        files = [file for of_rank in begun for file in of_rank[index]]
        assert digests(tmp_path / name) == of_one_process[name]
        assert sorted(files) == sorted(file for file in of_one_process[name] if file.endswith(".safetensors"))
        writers = [rank for rank, of_rank in enumerate(begun) if of_rank[index]]
        assert all(rank % degrees.get("tp", 1) == 0 for rank in writers)
        assert len(writers) == min(len(files), num_ranks // degrees.get("tp", 1))


def test_the_mapper_of_the_jobs_is_right(tmp_path):
    """What the other tests compare with, from the tensors by hand."""
    write_model_state(tmp_path, mapped(shared_jobs.tensors(), shared_jobs.Layers()))
    found, given = load_file(tmp_path / "model.safetensors"), shared_jobs.tensors()
    layers = [given[f"layers.{n}.w"] for n in range(4)]
    assert torch.equal(found["stacked"], torch.stack([layers[0].t(), layers[1].t()]))
    assert torch.equal(found["sum"], layers[2] + layers[3]) and torch.equal(found["one"], layers[2].double())
    assert torch.equal(found["half"], given["half"]) and found["none"].shape == (0, 3)


def test_a_failure_of_a_writer_is_one_of_all(tmp_path):
    """B43, contract 37: a full disk and a mapper on rank 1, ranks that want different files; the old export stays, nothing else is left."""
    write_model_state(tmp_path / "m", items_of({"old": torch.ones(2)}))
    before = digests(tmp_path / "m")
    results = run_on_ranks(2, shared_jobs.fail_in_turn, str(tmp_path / "m"), timeout=30.0)
    assert results[0] == results[1]
    (full, mapper), (different,), left = results[0]
    assert full.startswith("CheckpointError: the model state could not be written") and "No space left" in full
    assert mapper == "ZeroDivisionError: no such luck"
    assert different.startswith("ModelError: the ranks want to write different model states")
    assert left == ["model.safetensors"] and digests(tmp_path / "m") == before


def test_a_folder_that_ranks_do_not_share_is_told(tmp_path):
    """Contract 37: each rank wrote its files, and rank 0 sees its own alone."""
    for text, left in run_on_ranks(2, shared_jobs.to_storage_that_is_not_shared):
        assert "rank 0 does not see what other ranks wrote to memory://not-shared/m: model-00003-of" in text
        assert "storage that all of them share" in text
        assert left == []


def test_a_writer_holds_one_tensor_at_a_time(tmp_path):
    """Contract 37: besides, what is on its way, which is the half that the other rank has, and the columns that are sent by rows."""
    for peak in run_on_ranks(2, shared_jobs.memory_of_an_export, str(tmp_path)):
        assert 40_000 <= peak <= 40_000 + 2 * 20_000 + 200


def test_single_elements_that_are_turned(tmp_path):
    """B90, B98: torch takes any stride of one element for contiguous."""
    run_on_ranks(2, shared_jobs.export_single_elements, str(tmp_path), {"dp_shard": 2})
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], torch.tensor([[1.0, 2.0]]))
