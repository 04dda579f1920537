"""A small sample of `any_mesh.py`, `resume_matrix.py` and `pipelines.py`: a few steps on a few meshes. Promises 1 and 2 of the design."""

import shutil

import pytest

from tests.parity import context_runs, mesh_runs
from tests.parity.any_mesh import order, peers_are_equal, relative, run, weights_difference
from tests.parity.meshes import Spec
from tests.parity.pipeline_runs import Case, Layout, Variant
from tests.parity.pipelines import GRADIENT_LIMIT, LIMIT, cell, measure, resumed

STEPS = 8  # more than an epoch of 7 packs, the last of which is short


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("one"))
    return run(Spec("one process", True, steps=STEPS), folder)[0], folder


@pytest.mark.parametrize(
    ("mesh", "fsdp_sync"),
    [("dp_replicate 2", "microbatch"), ("dp_shard 3", "pack"), ("HSDP 2x2", "microbatch"), ("tp 2 x dp_shard 2", "microbatch")],
)
def test_a_mesh_gives_the_run_of_one_process(mesh, fsdp_sync, one, tmp_path):
    """Contracts 1, 2, 11, 15, 16; B21, B98: initial weights and order equal, losses, norms and final weights to 1e-9."""
    reference, folder = one
    outcomes = run(Spec(mesh, True, steps=STEPS, fsdp_sync=fsdp_sync), str(tmp_path))
    first = outcomes[0]
    assert relative(first.losses, reference.losses) <= 1e-9 and relative(first.norms, reference.norms) <= 1e-9
    assert weights_difference(str(tmp_path), folder) <= 1e-9
    assert first.files["initial/model.safetensors"] == reference.files["initial/model.safetensors"]
    assert order(outcomes) == order([reference])
    assert all(outcome.losses == first.losses and outcome.norms == first.norms for outcome in outcomes) and peers_are_equal(outcomes)


def test_muon_on_shards_is_muon_on_one_process(tmp_path):
    """Design decision 4: an optimizer that is not elementwise sees whole matrices."""
    reference = run(Spec("one process", True, "muon", steps=5), f"{tmp_path}/one")[0]
    found = run(Spec("dp_shard 2", True, "muon", steps=5), f"{tmp_path}/two")[0]
    assert relative(found.losses, reference.losses) <= 1e-9 and weights_difference(f"{tmp_path}/two", f"{tmp_path}/one") <= 1e-9


def test_tensor_peers_draw_the_same_dropout(tmp_path):
    """Contract 9b: replicas of tensor peers stay bitwise equal."""
    assert peers_are_equal(run(Spec("tp 2", dropout=0.5, steps=5), str(tmp_path)))


@pytest.mark.parametrize(("saved", "resumed"), [("dp_shard 2", "dp_shard 2"), ("dp_shard 2", "tp 2"), ("tp 2", "one process")])
def test_a_mesh_resumes_what_another_one_saved(saved, resumed, tmp_path):
    """Contract 17 and promise 2: bitwise on the same mesh, to rounding on another; with Muon, whose state lies whole on single ranks."""
    whole = run(Spec(resumed, True, "muon", steps=STEPS), f"{tmp_path}/whole")[0]
    run(Spec(saved, True, "muon", steps=STEPS, checkpoints=f"{tmp_path}/saved", stop_at=5), f"{tmp_path}/half")
    shutil.copytree(f"{tmp_path}/saved", f"{tmp_path}/checkpoints")
    found = run(Spec(resumed, True, "muon", steps=STEPS, checkpoints=f"{tmp_path}/checkpoints"), f"{tmp_path}/resumed")[0]
    if saved == resumed:
        assert found.losses == whole.losses[5:] and found.files["final/model.safetensors"] == whole.files["final/model.safetensors"]
    else:
        assert relative(found.losses, whole.losses[5:]) <= 1e-9
        assert weights_difference(f"{tmp_path}/resumed", f"{tmp_path}/whole") <= 1e-9


@pytest.mark.parametrize(
    ("layout", "frozen_layers"),
    [(Layout("pp 2", "zbv", 2), 0), (Layout("pp 4", "1f1b", 1), 1), (Layout("pp 2 x dp_shard 2", "zb1p", 1), 0)],
)
def test_a_pipeline_gives_the_run_of_one_process(layout, frozen_layers, tmp_path):
    """Contracts 1, 7, 8, 11, 12, 13 and 22: initial weights, gradients for several numbers of microbatches, ten steps; one head tied to the
    embedding of the first stage, one stage frozen, and data ranks with unequal packs."""
    variant = Variant(layout.num_layers, is_tied=not frozen_layers, frozen_layers=frozen_layers)
    cases = [Case(layout, variant, "gradients"), Case(layout, variant, "training")]
    for by_rank in measure(cases, str(tmp_path), (1, 3, 4)):
        assert all(each.initial_is_equal for each in by_rank)
        assert max(max(each.losses, each.norms, each.weights) for each in by_rank) <= LIMIT
        assert max(each.gradients for each in by_rank) <= GRADIENT_LIMIT


def test_a_pipeline_resumes_what_another_one_saved(tmp_path):
    """Contracts 17 and 27, promise 2: bitwise on the same layout, to rounding on another."""
    layouts = [Layout(), Layout("pp 2", "zbv", 2)]
    for number, row in enumerate(resumed(layouts, str(tmp_path))):
        assert all(cell(by_rank, must_be_same=other == number)[1] for other, by_rank in enumerate(row))


@pytest.mark.parametrize("mesh", ["cp_shard 2, ring", "cp_replicate 2 x tp 2, ulysses", "cp_shard 2 x dp_shard 2 x pp 2, zbv"])
def test_sequences_in_parts_give_the_run_of_one_process(mesh):
    """Contracts 1, 2, 8, 11 and 15, B123: gradients and ten steps in fp64, with packed documents, padding, and parts without a label."""
    ((spec, by_rank),) = mesh_runs.measure([context_runs.Spec(mesh)])
    assert mesh_runs.is_good(spec, by_rank)


def test_sequences_in_parts_resume_what_one_process_saved():
    """Contract 17, promise 2: and the other way round; bitwise on the same mesh."""
    found = list(mesh_runs.resumed([context_runs.Spec("one process"), context_runs.Spec("cp_shard 2, ring")]))
    assert all(value <= (0 if at == saved else 1e-9) for at, row in enumerate(found) for saved, value in enumerate(row))
