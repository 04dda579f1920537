"""`FSDPSync`: the collectives of a pack counted, gradients of packs against one process, dtypes, evaluation and aborted packs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.common import CountCollectives, decoder, gradients, largest_difference, make_mesh, token_loss, tokens, whole_gradients
from trainer_kit.parallel import FSDPSync, fsdp_units, parallelize_fsdp, parallelize_hsdp
from trainer_kit.testing import run_on_ranks

MODES = ["microbatch", "pack"]
NUM_UNITS = 3  # two blocks and the root


def sharded_decoder(mesh):
    model = decoder()
    function = parallelize_fsdp if mesh.ndim == 1 else parallelize_hsdp
    for block in model.layers.values():
        function(block, mesh)
    function(model, mesh, reshard_after_forward=False)
    return model


def run_pack(sync, losses):
    for index, loss in enumerate(losses):
        sync.begin_microbatch(index == len(losses) - 1)
        loss().backward()


def clear(model):
    for parameter in model.parameters():
        parameter.grad = None


def packs_job(shape, mode, num_microbatches):
    """Two packs: the collectives of the second, and how far its gradients are from one process that runs all of them."""
    mesh = make_mesh(**shape)
    model, num_ranks = sharded_decoder(mesh), dist.get_world_size()
    batches = [tokens(rank * 10 + index) for rank in range(num_ranks) for index in range(num_microbatches)]
    expected = gradients(decoder(), [lambda model, b=batch: token_loss(model, b) for batch in batches])
    sync = FSDPSync(fsdp_units(model), mode)
    mine = [lambda i=index: token_loss(model, tokens(dist.get_rank() * 10 + i)) for index in range(num_microbatches)]
    run_pack(sync, [*mine, mine[0]])
    clear(model)
    with CountCollectives() as count:
        run_pack(sync, mine)
    return dict(count.calls), largest_difference(whole_gradients(model, mesh), expected)


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_collectives_of_a_pack(mode, num_microbatches):
    """Contract 44b: "pack" gathers and reduces once per unit. "microbatch" gathers blocks for the backward again, and the root not."""
    for calls, difference in run_on_ranks(2, packs_job, {"shard": 2}, mode, num_microbatches):
        once = {"all_gather": NUM_UNITS, "reduce_scatter": NUM_UNITS}
        each = {"all_gather": 2 * NUM_UNITS - 1, "reduce_scatter": NUM_UNITS}
        assert calls == (once if mode == "pack" else {name: number * num_microbatches for name, number in each.items()})
        assert difference < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_replicas_are_reduced_once_per_pack(mode):
    """Contract 1: HSDP reduced exactly once."""
    for calls, difference in run_on_ranks(4, packs_job, {"replicate": 2, "shard": 2}, mode, 2):
        assert calls["all_reduce"] == NUM_UNITS
        assert calls["reduce_scatter"] == (NUM_UNITS if mode == "pack" else 2 * NUM_UNITS)
        assert difference < 1e-12


class Parts(nn.Module):
    """`forward(**c)` is the sum of `w * c` over the parts that get a `c`, so the gradient of a part is the sum of its `c`."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({name: Part() for name in "abc"})

    def forward(self, **constants):
        return sum(self.parts[name](torch.full((4,), value)) for name, value in constants.items())


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, c):
        return (self.w * c).sum()


def sharded_parts(mesh, units, reduce_dtype):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model, function = Parts(), parallelize_fsdp if mesh.ndim == 1 else parallelize_hsdp
    policy = reduce_dtype and MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for name in units:
        function(model.parts[name], mesh, policy=policy)
    function(model, mesh, policy=policy)
    return model


def gradients_of_parts(model):
    return {name: p.grad.full_tensor() if p.grad is not None else None for name, p in model.named_parameters() if name.endswith("w")}


def accumulation_job(shape, mode):
    model = sharded_parts(make_mesh(**shape), "a", torch.float32)
    sync = FSDPSync(fsdp_units(model), mode)
    scale = 1.0 if dist.get_rank() == 0 else 0.0
    run_pack(sync, [lambda c=c: model(a=c * scale) for c in [256.0] + 16 * [0.5]])
    gradient = gradients_of_parts(model)["parts.a.w"]
    return gradient.dtype, gradient.tolist()


@pytest.mark.parametrize(("num_ranks", "shape"), [(2, {"shard": 2}), (4, {"replicate": 2, "shard": 2})])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_accumulate_in_the_dtype_of_the_policy(num_ranks, shape, mode):
    """Contract 5, B109: a sum in bf16 would stay at 256."""
    assert run_on_ranks(num_ranks, accumulation_job, shape, mode) == num_ranks * [(torch.float32, 4 * [264.0])]


def late_job(shape, mode, units, reduce_dtype):
    """`a` in all microbatches, `b` in the last alone, `c` in none, `unused` never."""
    model = sharded_parts(make_mesh(**shape), units, reduce_dtype)
    sync, mine = FSDPSync(fsdp_units(model), mode), 2.0 ** dist.get_rank()
    found = []
    for _ in range(2):
        run_pack(sync, [lambda: model(a=mine), lambda: model(a=4 * mine, b=16 * mine)])
        found.append({name[6]: 0.0 if grad is None else grad[0].item() for name, grad in gradients_of_parts(model).items()})
        clear(model)
    return found


@pytest.mark.parametrize("units", ["", "abc"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_a_layer_that_is_used_late_or_never(mode, units, reduce_dtype):
    """Contract 4, B110: stock FSDP fails an assertion, in a unit with others as in its own. Ranks give c = 1 and 2."""
    expected = {"a": 3 * 5.0, "b": 3 * 16.0, "c": 0.0}
    assert run_on_ranks(2, late_job, {"shard": 2}, mode, units, reduce_dtype) == 2 * [2 * [expected]]


def early_job(shape, mode):
    """`b` in the first microbatch alone; on one rank of two `c` instead of `a` in the last."""
    model = sharded_parts(make_mesh(**shape), "", torch.float32)
    sync, last = FSDPSync(fsdp_units(model), mode), "ca"[dist.get_rank() % 2]
    run_pack(sync, [lambda: model(a=1.0, b=2.0), lambda: model(**{last: 4.0})])
    return {name[6]: grad[0].item() for name, grad in gradients_of_parts(model).items()}


@pytest.mark.parametrize(("num_ranks", "shape"), [(2, {"shard": 2}), (4, {"replicate": 2, "shard": 2})])
@pytest.mark.parametrize("mode", MODES)
def test_ranks_may_use_different_parameters_of_a_unit(num_ranks, shape, mode):
    """Contract 4: what is unused on a rank counts as zero there."""
    half = num_ranks // 2
    expected = {"a": num_ranks + half * 4.0, "b": num_ranks * 2.0, "c": half * 4.0}
    assert run_on_ranks(num_ranks, early_job, shape, mode) == num_ranks * [expected]


def evaluation_job(mode):
    """The values of forwards after which the shards change: without a graph, with one that has no backward, and a step."""
    model = sharded_parts(make_mesh(shard=2), "ab", None)
    sync, found = FSDPSync(fsdp_units(model), mode), []
    shards, local = {id(p) for p in model.parameters()}, [p.to_local().detach() for p in model.parameters()]
    for value in (1.0, 2.0):
        torch._foreach_zero_(local)
        torch._foreach_add_(local, value)  # as an optimizer does
        with torch.no_grad():
            found.append(model(a=1.0, b=1.0, c=1.0).item())
        assert {id(parameter) for parameter in model.parameters()} == shards  # nothing whole is left
    model(a=1.0, b=1.0, c=1.0)
    torch._foreach_add_(local, 1.0)
    run_pack(sync, [lambda: model(a=1.0, b=1.0), lambda: noted(found, model(a=1.0, c=1.0))])
    found.append(gradients_of_parts(model)["parts.a.w"][0].item())
    return found


def noted(found, loss):
    found.append(loss.item())
    return loss


@pytest.mark.parametrize("mode", MODES)
def test_every_pass_takes_the_parameters_as_they_are(mode):
    """Evaluations between steps, with other weights each time (as for an EMA), and a forward without a backward."""
    assert run_on_ranks(2, evaluation_job, mode) == 2 * [[12.0, 24.0, 24.0, 4.0]]


def abort_job(shape, mode, where, reduce_dtype):
    """A pack that fails in its second microbatch, in the forward or the backward; then one that does not."""
    model = sharded_parts(make_mesh(**shape), "a", reduce_dtype)
    sync = FSDPSync(fsdp_units(model), mode)

    def fails():
        loss = model(a=1.0, b=float("nan"))
        if where == "backward":
            loss.register_hook(fail)
            return loss
        return fail()

    with pytest.raises(ArithmeticError):
        run_pack(sync, [lambda: model(a=100.0, b=100.0), fails, lambda: model(a=100.0)])
    sync.reset()
    assert all(parameter.grad is None for parameter in model.parameters())
    run_pack(sync, [lambda: model(a=1.0), lambda: model(a=2.0, b=4.0)])
    return [gradient[0].item() for gradient in gradients_of_parts(model).values()]


def fail(*_):
    raise ArithmeticError


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_nothing_of_an_aborted_pack_reaches_the_next(mode, where, reduce_dtype):
    """Contract 24: gradients that were accumulated or partly reduced are gone, and the first pack begins as any other."""
    assert run_on_ranks(4, abort_job, {"replicate": 2, "shard": 2}, mode, where, reduce_dtype) == 4 * [[12.0, 16.0, 0.0]]


def unused_reset_job(mode):
    model = sharded_parts(make_mesh(shard=2), "a", None)
    FSDPSync(fsdp_units(model), mode).reset()
    return model(a=1.0).item()


def test_a_reset_before_the_first_pack():
    assert run_on_ranks(2, unused_reset_job, "pack") == [4.0, 4.0]
