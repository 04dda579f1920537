"""A small sample of `huggingface.py`: two models on four meshes. Contracts 36 to 38; B89, B93, B98."""

import pytest

pytest.importorskip("transformers")

from tests.parity.huggingface import complaints_of, differences
from tests.parity.huggingface_models import MODELS, be_quiet, faults, prepare
from tests.parity.huggingface_runs import MESHES

SAMPLE = [model for model in MODELS if model.name in ("llama, llama3 rope", "qwen3_moe, list -> fused, tied")]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    be_quiet()
    return [prepare(model, tmp_path_factory.mktemp("model")) for model in SAMPLE]


@pytest.mark.parametrize("mesh", MESHES)
def test_transformers_and_we_agree(mesh, jobs):
    """Logits to 1e-5, gradients to 1e-4, and exports that transformers reads to bitwise the same weights."""
    for model, job, found in zip(SAMPLE, jobs, differences(jobs, mesh), strict=True):
        assert complaints_of(found, job.folder) + faults(model, job.folder, mesh) == []
