"""`parallelize_fsdp` and `parallelize_hsdp`: units, contracts, ties, dtypes, views, recomputation and mixed precision."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.parallel.common import decoder, gradients, largest_difference, make_mesh, token_loss, tokens, whole_gradients
from trainer_kit.exceptions import ConfigurationError, ModelError
from trainer_kit.mesh.contracts import Contract, contracts_of
from trainer_kit.model.transforms import checkpoint_activations
from trainer_kit.parallel import fsdp_units, parallelize_fsdp, parallelize_hsdp, parallelize_replicate
from trainer_kit.testing import run_on_ranks


class Scaled(nn.Module):
    """Blocks whose outputs are views (a Linear with a bias), and a parameter without dims."""

    def __init__(self, width=4):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, width)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            y += x  # in place, into what the block returned
            x = y
        return self.scale * x


def scaled():
    torch.manual_seed(0)
    return Scaled().double()


def squares(model, rank):
    x = torch.randn(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    return model(x).square().sum()


def layout_job():
    """What is left on the parameters of nested units, and the sum of gradients."""
    mesh, model = make_mesh(dp_replicate=2, dp_shard=2), scaled()
    expected = gradients(model, [lambda model, r=r: squares(model, r) for r in range(4)])
    for parameter in model.parameters():
        parameter.mark = "mine"
    before = {id(p) for p in model.parameters()}
    for block in model.blocks:
        parallelize_hsdp(block, mesh)
    inner = [id(p) for p in model.blocks.parameters()]
    parallelize_hsdp(model, mesh)
    assert [id(p) for p in model.blocks.parameters()] == inner, "units inside are left alone"
    assert fsdp_units(model) == [model, *model.blocks]
    assert before & {id(p) for p in model.parameters()} == {id(model.scale)}
    assert all(p.mark == "mine" for p in model.parameters())
    squares(model, dist.get_rank()).backward()
    contracts = {name: dict(contracts_of(p)) for name, p in model.named_parameters()}
    return contracts, largest_difference(whole_gradients(model, mesh), expected)


def test_contracts_and_attributes_are_carried_over():
    """Contract 1; a parameter without dims stays whole and is summed by the synchroniser; in-place changes of outputs work."""
    for contracts, difference in run_on_ranks(4, layout_job):
        assert contracts.pop("scale") == dict.fromkeys(("dp_replicate", "dp_shard"), Contract("partial", 2))
        assert list(contracts.values()) == 8 * [dict.fromkeys(("dp_replicate", "dp_shard"), Contract("fsdp", 2))]
        assert difference < 1e-12


def uneven_job():
    model = decoder(vocab_size=11, hidden_size=8, intermediate_size=5)
    mesh = make_mesh(dp_shard=3)
    expected = gradients(model, [lambda model, r=r: token_loss(model, tokens(r)) for r in range(3)])
    for layer in model.layers.values():
        parallelize_fsdp(layer, mesh)
    parallelize_fsdp(model, mesh)
    token_loss(model, tokens(dist.get_rank())).backward()
    return largest_difference(whole_gradients(model, mesh), expected), model.layers["0"].feed_forward.gate_proj.weight.to_local().shape[0]


def test_uneven_shards():
    """Contract 14: 5 rows on three ranks are 2, 2 and 1."""
    found = run_on_ranks(3, uneven_job)
    assert max(difference for difference, _ in found) < 1e-12 and [rows for _, rows in found] == [2, 2, 1]


def refusals_job():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = make_mesh(dp_shard=2)
    with pytest.raises(ConfigurationError, match="a mesh of 1 named dimension;"):
        parallelize_fsdp(nn.Linear(2, 2), init_device_mesh("cpu", (2,)))
    with pytest.raises(ConfigurationError, match=r"dimensions \('dp_shard',\), expected a mesh of 2 named dimensions"):
        parallelize_hsdp(nn.Linear(2, 2), mesh)
    with pytest.raises(ConfigurationError, match="parallelize_replicate"):
        parallelize_replicate(nn.Linear(2, 2), init_device_mesh("cpu", (2,)))
    unit = nn.Linear(2, 2)
    parallelize_fsdp(unit, mesh)
    with pytest.raises(ModelError, match="FSDP unit already"):
        parallelize_fsdp(unit, mesh)
    transposed = nn.Linear(2, 3)
    transposed.weight = nn.Parameter(torch.ones(2, 3).T)
    with pytest.raises(ModelError, match="'weight' is not contiguous"):
        parallelize_fsdp(transposed, mesh)
    replicated = nn.Linear(2, 2)
    parallelize_replicate(replicated, mesh)
    with pytest.raises(ModelError, match="distributed twice"):
        parallelize_fsdp(replicated, mesh)


def test_what_cannot_be_sharded_is_an_error():
    run_on_ranks(2, refusals_job)


def tie_job():
    mesh = make_mesh(dp_shard=2)
    tied = decoder(tie_embeddings=True)
    for block in tied.layers.values():
        parallelize_fsdp(block, mesh)
    parallelize_fsdp(tied, mesh)
    assert tied.head.weight is tied.embedding.weight
    token_loss(tied, tokens(0)).backward()
    assert tied.head.weight is tied.embedding.weight
    apart = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    apart[1].weight = apart[0].weight
    parallelize_fsdp(apart[0], mesh)
    assert apart[1].weight is not apart[0].weight  # what only the one who knows both can see
    narrow = nn.Sequential(nn.Linear(4, 4), nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).bfloat16())
    narrow[2].weight = narrow[1].weight
    with pytest.raises(ModelError, match=r"'2.weight' and '1.weight' are one tied parameter"):
        parallelize_fsdp(narrow, mesh)


def test_tied_parameters_stay_one_object():
    """Contract 12."""
    run_on_ranks(2, tie_job)


class Adapted(nn.Module):
    """A bf16 projection with fp32 adapters."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4, bias=False).bfloat16()
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


def adapters_job(is_frozen):
    """The change of each parameter in a step, and its dtype."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), Adapted())
    if is_frozen:
        for block in model:
            block.base.requires_grad_(False)
    expected = copy.deepcopy(model)
    expected(torch.ones(2, 4)).sum().backward()
    mesh = make_mesh(dp_shard=2)
    parallelize_fsdp(model[0], mesh)
    parallelize_fsdp(model, mesh)
    model(torch.ones(1, 4)).sum().backward()
    found = {}
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        if p.grad is None:
            found[name] = (p.dtype, None if q.grad is None else "differs")
        else:
            found[name] = (p.grad.dtype, torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-2 if q.dtype.itemsize == 2 else 1e-6))
    return found


@pytest.mark.parametrize("is_frozen", [True, False])
def test_adapters_of_another_dtype(is_frozen):
    """B112: a frozen base in bf16 with fp32 adapters; and one that is trained too, for which adapters become units of their own."""
    base = (torch.bfloat16, None) if is_frozen else (torch.bfloat16, True)
    for found in run_on_ranks(2, adapters_job, is_frozen):
        names = ["base.weight", "down.weight", "up.weight"]
        assert found == {f"{i}.{name}": base if "base" in name else (torch.float32, True) for i in (0, 1) for name in names}


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))


def two_dtypes_job():
    with pytest.raises(ModelError, match=r"TwoDtypes '1' holds trainable parameters .* torch.float32 of its FSDP unit: 1.narrow"):
        parallelize_fsdp(nn.Sequential(nn.Linear(2, 2), TwoDtypes()), make_mesh(dp_shard=2))


def test_a_module_of_two_dtypes_is_named():
    """B112."""
    run_on_ranks(2, two_dtypes_job)


def recomputing_job(shape):
    mesh, model = make_mesh(**shape), decoder()
    tp = shape.get("tp", 1)
    num_data_ranks, data_rank = dist.get_world_size() // tp, dist.get_rank() // tp
    expected = gradients(model, [lambda model, r=r: token_loss(model, tokens(r)) for r in range(num_data_ranks)])
    if tp > 1:
        from trainer_kit.parallel import parallelize_tensor

        parallelize_tensor(model, mesh["tp"], model.tensor_plan(tp))
    if "dp_shard" in shape:
        for block in model.layers.values():
            parallelize_fsdp(block, mesh["dp_shard"])
        parallelize_fsdp(model, mesh["dp_shard"])
    assert checkpoint_activations(model, True) == ["layers.0", "layers.1"]
    token_loss(model, tokens(data_rank)).backward()
    return largest_difference(whole_gradients(model, mesh), expected)


@pytest.mark.parametrize("shape", [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_recomputed_activations(shape):
    """Blocks are recomputed inside of the hooks of FSDP, around those of tensor parallelism."""
    num_ranks = 4 if len(shape) == 2 else 2
    assert max(run_on_ranks(num_ranks, recomputing_job, shape)) < 1e-12


def mixed_job(kind):
    """Loss and gradients of one step under autocast, against one process and against fp32."""
    mesh, model, rank = make_mesh(dp=2), decoder().float(), dist.get_rank()
    exact = gradients(model, [lambda model, r=r: mixed_loss(model, r, False) for r in range(2)])
    expected = gradients(model, [lambda model, r=r: mixed_loss(model, r) for r in range(2)])
    expected_loss = mixed_loss(model, rank).item()
    if kind == "fsdp":
        for block in model.layers.values():
            parallelize_fsdp(block, mesh)
        parallelize_fsdp(model, mesh)
    else:
        parallelize_replicate(model, mesh)
    loss = mixed_loss(model, rank)
    loss.backward()
    found = whole_gradients(model, mesh)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    return abs(loss.item() - expected_loss), largest_difference(found, expected), largest_difference(found, exact)


def mixed_loss(model, rank, enabled=True):
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        logits = model(tokens(rank))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens(rank).roll(-1, 1).flatten(), reduction="sum")


@pytest.mark.parametrize("kind", ["replicate", "fsdp"])
def test_mixed_precision_means_the_same_everywhere(kind):
    """Design decision 10: the same casts as on one process, so the same rounding; gradients and their sums are fp32."""
    for loss, to_one_process, to_fp32 in run_on_ranks(2, mixed_job, kind):
        assert loss == 0.0 and to_one_process < 1e-5 < to_fp32 < 0.1
