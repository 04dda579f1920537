"""Several ranks export one model, and share the buffers that each of them changed; the files are those of one process."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors.torch import load_file

from tests.weights import on_ranks
from trainer_kit.testing import run_on_ranks
from trainer_kit.weights import items_of, write_model_state


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_a_mapper_gets_whole_tensors(tmp_path):
    """B98: a group of a distributed and a plain tensor; the mapper runs on rank 0, which writes the file; all return its name."""
    write_model_state(tmp_path / "one", on_ranks.mapped(on_ranks.full(), on_ranks.Stack()))
    assert run_on_ranks(2, on_ranks.export_through_a_mapper, str(tmp_path / "two")) == [["model.safetensors"]] * 2
    assert digests(tmp_path / "two") == digests(tmp_path / "one")
    assert load_file(tmp_path / "two" / "model.safetensors")["sum"].count_nonzero() == 0


def test_an_export_that_fails_on_rank_0_fails_on_all(tmp_path):
    """B43, contract 37: after some tensors were brought together, in a folder of someone else, by a wrong item; nobody waits, and the
    next export works."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.safetensors").write_bytes(b"of someone else")
    results = run_on_ranks(2, on_ranks.fail_to_export, str(tmp_path / "m"), str(tmp_path / "foreign"), timeout=20.0)
    assert results[0] == results[1]
    (broken, foreign, twice), files = results[0]
    assert broken == "ZeroDivisionError: no such luck"
    assert foreign.startswith("CheckpointError") and "no export of trainer_kit" in foreign
    assert twice.startswith("ModelError") and "used twice" in twice
    assert files == ["model.safetensors"]
    write_model_state(tmp_path / "one", items_of(on_ranks.full()))
    assert digests(tmp_path / "m") == digests(tmp_path / "one")


def test_parts_come_together_on_rank_0():
    """Contract 14: cut along columns, and of a dtype that the back-end does not know; a mesh of someone else is refused by name."""
    (columns, small, refused), other = run_on_ranks(2, on_ranks.gather_parts)
    assert torch.equal(columns, on_ranks.full()["a"]) and small.tolist() == [0, 1, 2, 3, 4]
    assert other[:2] == (None, None) and "context.mesh_for" in refused


@pytest.mark.parametrize("num_ranks, degrees", [(2, {}), (4, {"dp_shard": 2, "tp": 2})])
def test_buffers_become_those_of_the_first_rank(num_ranks, degrees):
    """Running means of 0.1 x mean, as torch's DDP keeps them: rank 0 saw samples with mean 1. Equal buffers are not sent."""
    for first, second, values in run_on_ranks(num_ranks, on_ranks.share, degrees):
        assert first == ["running_mean"] and second == []
        assert values["running_mean"] == pytest.approx([0.1, 0.1]) and values["table"] == [0, 1, 2, 3]


def test_buffers_are_compared_within_a_stage():
    """As above, of a stage that is not the first; once they are equal, one exchange tells so, though the stages have other ones."""
    results = run_on_ranks(4, on_ranks.share_on_stages)
    assert [counts for _, counts, _ in results] == [[2, 1]] * 4
    assert [names for names, _, _ in results] == [[[], []]] * 2 + [[["running_mean"], []]] * 2
    assert all(values["running_mean"] == pytest.approx([0.1, 0.1]) for _, _, values in results[2:])
