"""`default_plan`: what it makes of a model on each mesh, and what it refuses."""

import pytest
import torch
from torch import nn

from tests.parallel.common import SIZES, decoder, make_mesh
from trainer_kit.exceptions import UnsupportedError
from trainer_kit.mesh import MeshStrategy
from trainer_kit.mesh.contracts import contracts_of
from trainer_kit.mesh.layout import layout_of
from trainer_kit.model import StageContext, StageInfo, build_stage
from trainer_kit.models import Decoder, DecoderConfig
from trainer_kit.parallel import default_plan, fsdp_units
from trainer_kit.parameters import ParameterTable
from trainer_kit.testing import run_on_ranks


def built_job(degrees):
    """What a decoder is cut over, and its units, after the build by a callable."""
    context = MeshStrategy(device="cpu", **degrees).build()
    try:
        module = build_stage(lambda: Decoder(DecoderConfig(**SIZES)), context, seed=0)
        ParameterTable([module]).check_contracts(context.dense_sizes())
        cut = {name: layout_of(parameter).sharded_over for name, parameter in module.named_parameters()}
        names = {part: name for name, part in module.named_modules()}
        kinds = {dim: contract.kind for dim, contract in contracts_of(module.norm.weight).items() if contract.size > 1}
        return cut["norm.weight"], cut["layers.0.attention.o_proj.weight"], [names[unit] for unit in fsdp_units(module)], kinds
    finally:
        context.close()


UNITS = ["", "layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("num_ranks", "degrees", "norm", "projection", "units", "kinds"),
    [
        (2, {}, (), (), [], {"dp_replicate": "partial"}),
        (2, {"dp_shard": 2}, ("dp_cp_shard",), ("dp_cp_shard",), UNITS, {"dp_cp_shard": "fsdp"}),
        (2, {"tp": 2}, (), ("tp",), [], {"tp": "partial"}),
        (4, {"tp": 2}, (), ("tp",), [], {"tp": "partial", "dp_replicate": "partial"}),
        (4, {"dp_replicate": 2, "dp_shard": 2}, ("dp_cp_shard",), ("dp_cp_shard",), UNITS, {"dp_replicate": "fsdp", "dp_cp_shard": "fsdp"}),
        (4, {"tp": 2, "dp_shard": 2}, ("dp_cp_shard",), ("dp_cp_shard", "tp"), UNITS, {"tp": "partial", "dp_cp_shard": "fsdp"}),
    ],
)
def test_the_plan_of_each_mesh(num_ranks, degrees, norm, projection, units, kinds):
    """Contract 1: every parameter has a contract along every dimension."""
    for found in run_on_ranks(num_ranks, built_job, degrees):
        assert found == (norm, projection, units, kinds)


class Meshed:
    """A context of which the plan needs the dense mesh, and no other groups."""

    strategy = MeshStrategy()

    def __init__(self, mesh):
        self.mesh_for = lambda domain: {"dense": mesh}[domain]

    def group(self, *_):
        return None


def plan(module, **sizes):
    mesh = make_mesh(**{"pp": 1, "dp_replicate": 1, "dp_cp_shard": 1, "cp_replicate": 1, "tp": 1} | sizes)
    default_plan(StageContext(Meshed(mesh), StageInfo(), module))
    return module


def structure_job():
    tied = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))
    tied[2][0].weight = tied[0][0].weight
    plan(tied, dp_cp_shard=2)
    assert fsdp_units(tied) == [tied, tied[1]] and tied[2][0].weight is tied[0][0].weight
    shared = nn.Module()
    shared.there = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    shared.back = nn.ModuleList([shared.there[1], shared.there[0]])
    assert fsdp_units(plan(shared, dp_cp_shard=2)) == [shared, *shared.there]
    flat = plan(nn.Linear(2, 2), dp_cp_shard=2)
    assert fsdp_units(flat) == [flat]
    copies = plan(nn.Linear(2, 2), cp_replicate=2)
    assert {dim: c.kind for dim, c in contracts_of(copies.weight).items()} == {"cp_replicate": "partial"}
    with pytest.raises(UnsupportedError, match=r"MeshStrategy\(tp=2\) needs to know .* of Linear are cut.*tensor_plan\(self, num_ranks\)"):
        plan(nn.Linear(2, 2), tp=2)
    with pytest.raises(UnsupportedError, match=r"num_kv_heads=1\) is cut over tp=2"):
        plan(decoder(num_kv_heads=1), tp=2)


def test_structures_that_the_plan_meets():
    """Contract 12: blocks that share a parameter are left to the root, a block in two lists is one unit.

    Tensor parallelism needs a plan, and heads that it divides.
    """
    run_on_ranks(2, structure_job)


def test_tables_of_positions_stay_plain():
    model = run_on_ranks(2, buffers_job)
    assert model == [(True, torch.float32)] * 2


def buffers_job():
    context = MeshStrategy(device="cpu", tp=2).build()
    try:
        module = build_stage(lambda: Decoder(DecoderConfig(**SIZES)), context, seed=0)
        return type(module.rotary.cos_TE) is torch.Tensor, module.rotary.cos_TE.dtype
    finally:
        context.close()
