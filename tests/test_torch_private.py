"""The calls into torch that are not public, each against its public counterpart, so that a new torch cannot change them unseen."""

import gc
import os
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from trainer_kit.mesh.layout import like, local_of
from trainer_kit.testing import run_on_ranks
from trainer_kit.torch_private import (
    abort_process_groups,
    call_node,
    collect_gradients,
    default_store,
    fingerprint,
    forget_meshes,
    fsdp_modules,
    fsdp_unit_name,
    group_timeout,
    keep_reduced_dtype,
    multiply_and_flag_non_finite,
    put_back,
    read_cpu_scalar,
    reduce_gradients,
    run_backward,
    set_group_timeout,
    settle_fsdp_memory,
    step_optimizer,
    takes_found_inf,
    whole_tensor,
    without_views,
    written_class,
)

KINDS = [
    lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    lambda p: torch.optim.Adam(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
]


def model() -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    for parameter in layer.parameters():
        parameter.grad = torch.randn_like(parameter)
    return layer


@pytest.mark.parametrize("make", KINDS)
def test_a_step_without_the_profiler_range_is_the_step(make):
    one, other = model(), model()
    first, second = make(one.parameters()), make(other.parameters())
    for _ in range(3):
        step_optimizer(first)
        second.step()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_hooks_schedulers_and_profilers_see_the_step():
    calls = []
    layer = model()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    step_optimizer(optimizer)
    handle.remove()
    step_optimizer(optimizer)
    assert calls == ["hook"]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step_optimizer(optimizer)
    scheduler.step()  # warns if it did not see the step
    with torch.profiler.profile() as profiler:
        step_optimizer(optimizer)
    assert any("Optimizer.step" in event.key for event in profiler.key_averages())


def test_backward_from_given_starts():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    run_backward(((x * x).sum(), x.sum()), (torch.tensor(3.0), torch.tensor(5.0)))
    assert torch.equal(x.grad, torch.tensor([11.0, 17.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_scaling_and_flag(dtype, bad):
    values = torch.tensor([1.0, -2.0, 4.0 if bad is None else bad], dtype=dtype)
    tensors, flag = [values.clone(), torch.ones(2, dtype=dtype)], torch.zeros(())
    multiply_and_flag_non_finite(tensors, torch.tensor(0.5), flag)
    assert flag.item() == (bad is not None)
    torch.testing.assert_close(tensors[0], values * 0.5, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_a_scalar_is_read_from_memory(dtype):
    assert read_cpu_scalar(torch.tensor(1, dtype=dtype)) == 1.0


def test_a_fingerprint_changes_with_the_content_and_the_object():
    tensor = torch.ones(2)
    before = fingerprint([tensor])
    assert fingerprint([tensor]) == before
    tensor.mul_(2)
    assert fingerprint([tensor]) != before
    assert fingerprint([tensor]) != fingerprint([tensor.clone()])


def test_which_optimizers_can_be_told_to_leave_a_step_out():
    parameters = list(nn.Linear(1, 1).parameters())
    assert takes_found_inf(torch.optim.AdamW(parameters, fused=True))
    assert not takes_found_inf(torch.optim.AdamW(parameters, foreach=True))


def train_through_kept_memory(settle):
    """Steps of FSDP after its shards were replaced; per step, whether memory that was kept before is what FSDP gathers from."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3), nn.Linear(3, 251))
    fully_shard(net[1], mesh=mesh)
    fully_shard(net, mesh=mesh)
    for owner in net:
        for name, parameter in list(owner.named_parameters()):
            setattr(owner, name, nn.Parameter(like(parameter, torch.empty_like(local_of(parameter), device="cpu"))))
    if settle:
        settle_fsdp_memory(net)
    parameters = dict(net.named_parameters())
    kept = {name: local_of(parameter) for name, parameter in parameters.items()}
    found = []
    for step in range(1, 4):
        with torch.no_grad():
            for local in kept.values():
                local.fill_(step / 8)
        out = net(torch.ones(2, 3))
        w = step / 8
        found.append(torch.allclose(out, torch.tensor(3 * w * ((3 * w + w) * w + w) + w)))
        out.sum().backward()
        same = all(parameters[name] is parameter for name, parameter in net.named_parameters())
        found.append(same and all(local_of(p).data_ptr() == kept[name].data_ptr() for name, p in parameters.items()))
    return found, written_class(net).__name__, [type(unit).__name__ for unit in fsdp_modules(net)]


def test_fsdp_goes_on_with_the_memory_that_was_settled():
    """Contracts 11, 14: uneven and empty shards too. Without it FSDP moves them at the first forward, which is why it is there."""
    for found, name, units in run_on_ranks(2, train_through_kept_memory, True):
        assert all(found) and name == "Sequential" and units == ["FSDPSequential", "FSDPLinear"]
    assert not all(all(found) for found, *_ in run_on_ranks(2, train_through_kept_memory, False))


def reduced_gradients(wide):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer = nn.Linear(4, 2, bias=False, dtype=torch.bfloat16)
    expected = 0.0
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    fully_shard(layer, mesh=mesh)
    layer.set_gradient_divide_factor(1.0), layer.set_force_sum_reduction_for_comms(True)
    if wide:
        keep_reduced_dtype(layer, torch.float32)
        layer.weight.grad_dtype = torch.float32
    for value in (256.0, 0.5):
        layer(torch.full((1, 4), value / 2 ** dist.get_rank(), dtype=torch.bfloat16)).sum().backward()
        expected += 1.5 * value
    return layer.weight.grad.dtype, layer.weight.grad.to_local().unique().tolist(), expected


def test_fsdp_keeps_gradients_in_the_dtype_in_which_they_are_reduced():
    """Contract 5: 384 and 0.75 is more digits than bfloat16 has. Without it FSDP rounds, which is why it is there."""
    for dtype, values, expected in run_on_ranks(2, reduced_gradients, True):
        assert dtype == torch.float32 and values == [expected]
    for dtype, values, expected in run_on_ranks(2, reduced_gradients, False):
        assert dtype == torch.bfloat16 and values != [expected]


def collected_and_reduced() -> tuple[list[float], list[float], bool]:
    """The second of two microbatches goes to the parameters alone, past the hooks of FSDP; 256 and 0.5 are 256 in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layer = nn.Linear(4, 2, bias=False)
    fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    layer.set_gradient_divide_factor(1.0), layer.set_force_sum_reduction_for_comms(True)
    layer.set_requires_gradient_sync(False), layer.set_reshard_after_backward(False), layer.set_reshard_after_forward(False)
    for value in (256.0, 0.5):
        output = layer(torch.full((1, 4), value)).sum()
        if value == 256:
            output.backward()
        else:
            (gradient,) = torch.autograd.grad(output, layer.weight)
            run_backward((torch.autograd.graph.get_gradient_edge(layer.weight),), (gradient,))
            collect_gradients(layer)
    assert layer._get_fsdp_state()._fsdp_param_group.fsdp_params[0].unsharded_accumulated_grad.unique().tolist() == [256.5]
    layer.set_requires_gradient_sync(True)
    reduce_gradients([layer])
    first = layer.weight.grad.full_tensor().unique().tolist() if layer.reshard() is None else []
    layer.set_requires_gradient_sync(False)
    layer(torch.ones(1, 4)).sum().backward()  # FSDP goes on as usual
    layer.set_requires_gradient_sync(True)
    reduce_gradients([layer])
    layer.reshard()
    return first, layer.weight.grad.full_tensor().unique().tolist(), layer.weight.grad.dtype == torch.float32


def test_fsdp_reduces_when_it_is_told_to_what_its_hooks_did_not_see():
    """Contracts 5 and 23: 256.5 on two ranks, then 1 more on each."""
    assert run_on_ranks(2, collected_and_reduced) == [([513.0], [515.0], True)] * 2


def test_modules_without_fsdp_are_what_they_are():
    layer = nn.Linear(1, 1)
    settle_fsdp_memory(layer)
    assert fsdp_modules(layer) == [] and written_class(layer) is nn.Linear


def cut_in_new_worlds() -> list[bool]:
    rank = dist.get_rank()
    dist.destroy_process_group()
    server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    whole, right = torch.arange(12.0).view(6, 2), []
    for num_other_groups in (3, 0):
        dist.init_process_group("gloo", store=dist.PrefixStore(str(num_other_groups), server), rank=rank, world_size=2)
        groups = [dist.new_group([0, 1]) for _ in range(num_other_groups + 1)]
        cut = distribute_tensor(whole, DeviceMesh.from_group(groups[-1], "cpu"), [Shard(0)]) * 2
        right.append(torch.equal(cut.redistribute(placements=[Shard(1)]).to_local(), 2 * whole[:, rank : rank + 1]))
        dist.destroy_process_group()
        forget_meshes()
    return right


def test_forgotten_meshes_do_not_lead_to_groups_that_are_gone():
    """Without forgetting, the second world asks for a group by a name that only the first one had."""
    assert run_on_ranks(2, cut_in_new_worlds) == [[True, True], [True, True]]


@pytest.fixture
def one_rank_world():
    """A gloo group of this process alone, and its store."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_the_timeout_of_a_process_group(one_rank_world):
    """`timeout` of a new group is the public way; a changed one holds for new collectives, which the tests of meshes show."""
    group = torch.distributed.new_group([0], timeout=timedelta(seconds=11))
    assert group_timeout(group) == timedelta(seconds=11)
    set_group_timeout(group, timedelta(seconds=12))
    assert group_timeout(group) == timedelta(seconds=12)


def test_the_store_of_the_default_group(one_rank_world):
    default_store().set("key", "value")
    (key,) = [key for key in one_rank_world.list_keys() if key.endswith("key")]
    assert one_rank_world.get(key) == b"value"


def test_groups_are_aborted_like_destroyed(one_rank_world):
    torch.distributed.new_group([0])
    abort_process_groups()
    assert not torch.distributed.is_initialized()


def test_the_name_of_an_fsdp_unit(one_rank_world):
    """It is known after the first forward of the root."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for module in (*model, model):
        torch.distributed.fsdp.fully_shard(module, mesh=mesh)
    model(torch.ones(1, 2))
    groups = [value for value in gc.get_objects() if type(value).__name__ == "FSDPParamGroup"]
    assert {"0", "1"} <= {fsdp_unit_name(group) for group in groups}
    assert fsdp_unit_name(model) is None


@dataclass
class Output:
    logits: torch.Tensor


def test_views_with_a_graph_are_copied():
    """In the containers that FSDP looks into; what is no view stays the same object."""
    x = torch.ones(2, 2, requires_grad=True)
    plain, view = x * 2, (x * 3).view(4)
    for found in (without_views([plain, {"a": view}])[1]["a"], without_views(Output(view)).logits):
        assert torch.equal(found, view) and found.requires_grad and found.data_ptr() != view.data_ptr()
    assert without_views((plain, view))[0] is plain
    assert without_views((plain, torch.ones(4).view(2, 2))) is None


def test_a_plain_tensor_is_whole():
    x = torch.ones(2)
    assert whole_tensor(x) is x


class Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, function):
        ctx.function = function
        return anchor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.function()
        return gradient, None


def test_a_node_computes_what_the_running_backward_needs():
    """What splitting a backward rests on, see `pipeline/split_backward.py`."""
    edge = torch.autograd.graph.GradientEdge
    layer, x, gradient = nn.Linear(2, 3), torch.randn(1, 2, requires_grad=True), torch.randn(1, 3)
    node = layer(x).grad_fn
    bias, inputs, weight = ((child, result) for child, result in node.next_functions)
    for needed, expected in (([bias, weight], (gradient[0], None, x.T @ gradient)), ([inputs], (None, gradient @ layer.weight, None))):
        found, anchor = [], torch.zeros((), requires_grad=True)
        end = Inside.apply(anchor, lambda found=found: found.extend(call_node(node, {0: gradient})))
        torch.autograd.grad([end], [anchor, *(edge(*each) for each in needed)], allow_unused=True)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None) and (one is None or torch.allclose(one.reshape(other.shape), other))
    first, _ = torch.ones(2, requires_grad=True).split(1)
    assert [each.tolist() for each in call_node(first.grad_fn, {1: torch.ones(1)})] == [[0, 1]], "a result without a gradient counts as 0"
    assert layer.weight.grad is layer.bias.grad is None


def test_backward_starts_at_an_edge_of_the_graph():
    x = torch.ones(2, requires_grad=True)
    run_backward((torch.autograd.graph.get_gradient_edge(x * 3),), (torch.tensor([1.0, 2.0]),))
    assert x.grad.tolist() == [3, 6]


def test_buffers_are_put_back_behind_the_back_of_autograd():
    norm, x = nn.BatchNorm1d(2), torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    before = norm.running_mean.clone()
    output = norm(x)
    put_back(norm.running_mean, before)
    output[0].sum().backward()
    assert torch.equal(norm.running_mean, before) and x.grad is not None
