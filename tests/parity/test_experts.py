"""A small sample of the experts' half of `experts_and_context.py`. Promises 1 and 2 of the design."""

import pytest

from tests.parity.expert_runs import Spec, print_memory
from tests.parity.mesh_runs import is_good, measure, print_resumes


@pytest.mark.parametrize(
    ("mesh", "all_to_one"),
    [
        ("dp_replicate 4, ep 2", False),
        ("dp_shard 4, ep 4", True),
        ("tp 2 x dp_shard 2, ep 2", False),
        ("pp 2 x dp_shard 2, ep 2", True),
    ],
)
def test_shared_out_experts_give_the_run_of_one_process(mesh, all_to_one):
    """Contracts 1, 2, 4, 8, 11 and B119: initial weights, ten steps of losses, norms, all gradients and biases of routers to 1e-9; with
    ranks that have no microbatch, and experts without a token."""
    for spec, by_rank in measure([Spec(mesh, True, all_to_one)]):
        assert is_good(spec, by_rank), max(each.worst for each in by_rank)


def test_shared_out_experts_resume_on_other_meshes(capsys):
    """Contracts 17 and 27, B98: bitwise on the same mesh, to rounding on another."""
    assert print_resumes([Spec("one process"), Spec("dp_shard 4, ep 2")]), capsys.readouterr().out


def test_each_rank_holds_its_experts_alone():
    """A quarter of the parameters of experts and of their moments on each of 4 ranks."""
    assert print_memory()
