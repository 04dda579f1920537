"""Gradients that are DTensors: what autograd returns for them against the contracts, FSDP's, and sums that come on top. With gloo ranks."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.gradients.on_ranks import Weights, context_of, gradients_of, run_pack
from trainer_kit.exceptions import ModelError
from trainer_kit.parallel import parallelize_fsdp, parallelize_hsdp, parallelize_replicate, set_contract
from trainer_kit.testing import run_on_ranks


def sequence_parallel_norm(kind, num_microbatches=2):
    """A LayerNorm whose weights are replicated DTensors and whose activations are cut, as torch's SequenceParallel makes it."""
    with context_of(tp=2) as context:
        mesh = context.mesh_for("dense")["tp"]
        norm = parallelize_module(nn.LayerNorm(2), mesh, SequenceParallel())
        for parameter in norm.parameters():
            set_contract(parameter, mesh, kind)
        gradients = gradients_of(norm, context)
        x = torch.tensor([[[1.0, 3.0], [-1.0, 5.0]]])[:, context.rank : context.rank + 1]
        losses = [lambda: (norm(x).to_local() * (context.rank + 1)).sum()] * num_microbatches
        run_pack(gradients, losses, weight=3)
        expected = num_microbatches * (1 + 2) / 3  # every row adds -1 and 1 to the weight, and 1 to the bias, times its rank plus 1
        assert norm.bias.grad.placements == (Replicate(),)
        local = norm.bias.grad.to_local().clone()
        assert torch.allclose(local, torch.full((2,), expected)) and torch.allclose(norm.bias.grad.full_tensor(), local)
        norms = gradients.norm().item()
        gradients.zero()
        run_pack(gradients, losses[:1], weight=3)
        assert torch.allclose(norm.bias.grad.to_local(), local / num_microbatches)
        return norms


def test_partial_gradients_of_replicated_weights_are_summed_where_the_contract_says_so():
    """Contract 1: a replicated norm with sequence parallelism."""
    first, second = run_on_ranks(2, sequence_parallel_norm, "partial")
    assert first == second == pytest.approx((4 * 2.0**2) ** 0.5, rel=1e-4)


def refused(kind):
    with pytest.raises(ModelError) as caught:
        sequence_parallel_norm(kind)
    return str(caught.value)


def test_a_partial_gradient_against_the_contract_is_an_error():
    """Contract 1: checked against the placement that autograd returns, at the first step."""
    first, second = run_on_ranks(2, refused, "complete")
    assert first == second
    assert "gradient of 'weight' with the placement P(sum) on the mesh dimension 'tp'" in first.replace("Partial(sum)", "P(sum)")
    assert "its gradient contract is 'complete'" in first


class Column(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.linear = parallelize_module(nn.Linear(3, 4, bias=False), mesh, ColwiseParallel())
        self.scale = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))

    def forward(self, x):
        mesh = self.scale.device_mesh
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False) * self.scale
        return self.linear(x).sum() + whole.to_local().sum()


def complete_gradients(kind):
    """A replicated weight whose activations are replicated: the gradient is there already on each rank."""
    with context_of(tp=2) as context:
        mesh = context.mesh_for("dense")["tp"]
        torch.manual_seed(0)
        model = Column(mesh)
        set_contract(model.linear.weight, mesh, "complete")
        set_contract(model.scale, mesh, kind)
        gradients = gradients_of(model, context)
        run_pack(gradients, [lambda: model(torch.tensor([[1.0, 2.0, 3.0]]))] * 2)
        return model.scale.grad.to_local().tolist(), gradients.norm().item()


def test_a_complete_gradient_is_left_alone():
    """Contract 1: a replicated weight under tensor parallelism without sequence parallelism. B52: it counts once in the norm."""
    norm = (4 * 14 * 2**2 + 14 * 2**2) ** 0.5  # four rows of the linear layer, and the scale: [1, 2, 3] in two microbatches
    assert run_on_ranks(2, complete_gradients, "complete") == [([2.0, 4.0, 6.0], pytest.approx(norm, rel=1e-6))] * 2


def complete_gradient_summed():
    with pytest.raises(ModelError, match="gradient of 'scale' with the placement .* where 'partial' is its gradient contract"):
        complete_gradients("partial")


def test_a_complete_gradient_that_would_be_summed_is_an_error():
    run_on_ranks(2, complete_gradient_summed)


def vocabulary_gradients():
    """DTensor returns the whole gradient for an embedding that is cut over the vocabulary; 7 rows on 2 ranks."""
    with context_of(tp=2) as context:
        mesh = context.mesh_for("dense")["tp"]
        embedding = parallelize_module(nn.Embedding(7, 3), mesh, RowwiseParallel(input_layouts=Replicate()))
        set_contract(embedding.weight, mesh, "complete")
        gradients = gradients_of(embedding, context)
        run_pack(gradients, [lambda: embedding(torch.tensor([[0, 6, 6, 4]])).sum() * 1.0])
        assert embedding.weight.grad.placements == (Shard(0),)
        return embedding.weight.grad.to_local()[:, 0].tolist(), gradients.norm().item()


def test_a_whole_gradient_of_a_shard_is_cut():
    norm = pytest.approx((3 * (1 + 4 + 1)) ** 0.5)
    assert run_on_ranks(2, vocabulary_gradients) == [([1, 0, 0, 0], norm), ([1, 0, 2], norm)]


def both_dimensions(dtype, grad_dtype, mode):
    """On a 2 x 2 mesh: FSDP over data and partial along tp; buckets of both; a tp shard with replicas. Rank = 2 * data + tensor."""
    with context_of(dp_shard=2, tp=2) as context:
        mesh = context.mesh_for("dense")
        model = nn.ModuleDict({
            "fsdp": Weights(w=torch.zeros(3, dtype=dtype), v=torch.zeros(2, 2, dtype=dtype)),
            "bucket": Weights(w=torch.zeros(3, dtype=dtype)),
            "shard": nn.Module(),
        })  # fmt: skip
        model["shard"].w = nn.Parameter(distribute_tensor(torch.zeros(5, dtype=dtype), mesh["tp"], [Shard(0)]))
        for parameter in (*model["fsdp"].parameters(), *model["bucket"].parameters()):
            set_contract(parameter, mesh["tp"], "partial")
        set_contract(model["shard"].w, mesh["tp"], "complete")
        parallelize_replicate(model["bucket"], mesh["dp_cp_shard"])
        parallelize_replicate(model["shard"], mesh["dp_cp_shard"])
        parallelize_fsdp(model["fsdp"], mesh["dp_cp_shard"])
        gradients = gradients_of(model, context, mode=mode, grad_dtype=grad_dtype)
        value = torch.tensor([256.0, 0.25, 0.0, 0.25][context.rank]).to(dtype)

        def loss():
            cut = (model["shard"].w * value).to_local().sum()
            return model["fsdp"](w=value) + model["bucket"](w=value) + cut

        run_pack(gradients, [loss] * 2)
        found = {name: row.grad for name, row in model.named_parameters()}
        local = [model["fsdp"].w.grad.to_local(), model["bucket"].w.grad, model["shard"].w.grad.to_local()]
        assert all((tensor == tensor[0]).all() for tensor in local if tensor.numel())
        assert not model["fsdp"].v.grad.to_local().any()  # used nowhere
        values = [tensor[0].item() if tensor.numel() else None for tensor in local]
        return {tensor.dtype for tensor in found.values()}, values, gradients.norm().item()


@pytest.mark.parametrize("mode", ["microbatch", "pack"])
def test_gradients_are_reduced_in_fp32_along_every_dimension(mode):
    """B113, contract 5: twice the partial gradients 256, 0.25, 0, 0.25 of bf16 parameters are 513 on a 2 x 2 mesh, which bf16 has not."""
    ranks = run_on_ranks(4, both_dimensions, torch.bfloat16, torch.float32, mode)
    # The tp shards are summed over data: 256 + 0 on tensor rank 0, which has three of five elements, and 0.25 + 0.25 on the other.
    norm = (3 * 513**2 + 3 * 513**2 + 3 * 512**2 + 2 * 1**2) ** 0.5
    for rank, (dtypes, (fsdp, bucket, shard), found) in enumerate(ranks):
        assert dtypes == {torch.float32}
        assert (fsdp, bucket, shard) == (513.0, 513.0, 1.0 if rank % 2 else 512.0)
        assert found == pytest.approx(norm, rel=1e-6)


def norm_under_fsdp():
    """A weight that is a DTensor with partial gradients along tp before FSDP cuts it: FSDP itself sums those."""
    with context_of(dp_shard=2, tp=2) as context:
        mesh = context.mesh_for("dense")
        norm = parallelize_module(nn.LayerNorm(2), mesh["tp"], SequenceParallel())
        for parameter in norm.parameters():
            set_contract(parameter, mesh["tp"], "partial")
        parallelize_fsdp(norm, mesh["dp_cp_shard"])
        gradients = gradients_of(norm, context)
        x = torch.tensor([[[1.0, 3.0], [-1.0, 5.0]]])[:, context.rank % 2 : context.rank % 2 + 1]
        run_pack(gradients, [lambda: (norm(x).to_local() * 2.0**context.rank).sum()])
        return norm.bias.grad.to_local().tolist(), gradients.norm().item()


def test_fsdp_sums_along_the_dimensions_of_a_dtensor_by_itself():
    """Contract 1: once, 1 + 2 + 4 + 8."""
    assert run_on_ranks(4, norm_under_fsdp) == [([15.0], pytest.approx(30.0, rel=1e-4))] * 4


def hsdp():
    with context_of(dp_replicate=2, dp_shard=2) as context:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False))
        nn.init.ones_(model[0].weight), nn.init.ones_(model[1].weight)
        mesh = context.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
        parallelize_hsdp(model[0], mesh)
        parallelize_hsdp(model, mesh)
        gradients = gradients_of(model, context)
        x = torch.full((1, 3), context.rank + 1.0, requires_grad=True)  # the tool that counts wants inputs with a gradient
        counts = []
        for _ in range(2):
            with CommDebugMode() as comms:
                run_pack(gradients, [lambda: model(x).sum()], weight=10)
            counts.append({str(name).split(".")[1].rstrip("_"): count for name, count in comms.get_comm_counts().items()})
            first, second = (layer.weight.grad.to_local().tolist() for layer in model)
            gradients.zero()
        return counts[1], first, second


def test_hsdp_is_reduced_exactly_once():
    """Contract 1: one reduce-scatter and one all-reduce per unit, and the mean over the four ranks; nobody sums it again."""
    ranks = run_on_ranks(4, hsdp)
    for counts, first, second in ranks:
        assert {name: count for name, count in counts.items() if "gather" not in name} == {"_reduce_scatter_base": 2, "allreduce": 2}
        assert all(value == pytest.approx(1.0) for row in first for value in row)
        assert all(value == pytest.approx(3.0) for row in second for value in row)


def fsdp(mode, dtype, grad_dtype):
    with context_of(dp_shard=2) as context:
        model = Weights(a=torch.zeros(3, 2, dtype=dtype), b=torch.zeros(1, dtype=dtype))
        parallelize_fsdp(model, context.mesh_for("dense")["dp_cp_shard"])
        gradients = gradients_of(model, context, mode=mode, grad_dtype=grad_dtype)
        values = [[256.0] + [0.5] * 7 + [0.25], [0.5] * 8 + [0.25]][context.rank]
        found = []
        for used in ({"a"}, {"a", "b"}):
            run_pack(gradients, [lambda v=v, used=used: model(**dict.fromkeys(used, v)) for v in values])
            found.append([parameter.grad.to_local().flatten().tolist() for parameter in model.parameters()])
            dtypes = {parameter.grad.dtype for parameter in model.parameters()}
            gradients.zero()
            assert all(parameter.grad is None for parameter in model.parameters())
        return dtypes, found


@pytest.mark.parametrize("mode", ["microbatch", "pack"])
def test_fsdp_accumulates_and_reduces_in_the_asked_dtype(mode):
    """Contract 5, B109: 256 and 16 times 0.5 is 264. Contract 4: an unused parameter has a zero gradient. Contract 14: an empty shard."""
    for rank, (dtypes, (first, second)) in enumerate(run_on_ranks(2, fsdp, mode, torch.bfloat16, torch.float32)):
        a = [264.0] * (2 if rank else 4)
        assert dtypes == {torch.float32}
        assert first == [a, [] if rank else [0.0]] and second == [a, [] if rank else [264.0]]


def fsdp_after_a_failed_step(mode):
    with context_of(dp_shard=2) as context:
        model = nn.Sequential(Weights(a=torch.zeros(3)), Weights(b=torch.zeros(3), c=torch.zeros(())))
        for part in model:
            parallelize_fsdp(part, context.mesh_for("dense")["dp_cp_shard"])
        gradients = gradients_of(model, context, mode=mode)

        def loss(fail=False):
            if fail:
                raise ZeroDivisionError
            return model[0](a=1.0) + model[1](b=2.0, c=3.0)

        with pytest.raises(ZeroDivisionError):
            run_pack(gradients, [loss, loss, lambda: loss(fail=True)])
        gradients.zero()
        found = []
        for length in (2, 1):
            run_pack(gradients, [loss] * length)
            found.append([model[0].a.grad.to_local()[0].item(), model[1].b.grad.to_local()[0].item(), model[1].c.grad.item()])
            gradients.zero()
        return found


@pytest.mark.parametrize("mode", ["microbatch", "pack"])
def test_a_failed_step_leaves_nothing_in_fsdp(mode):
    """Contract 24, of gradients. FSDP leaves the scalar to a bucket, as it has no dim to cut."""
    assert run_on_ranks(2, fsdp_after_a_failed_step, mode) == [[[4, 8, 12], [2, 4, 6]]] * 2


def changed_shards():
    """What users do to the gradients of the parameters of the model, which are DTensors, and of the optimizer, which are local."""
    with context_of(dp_shard=2) as context:
        model = Weights(a=torch.zeros(4))
        parallelize_fsdp(model, context.mesh_for("dense")["dp_cp_shard"])
        gradients = gradients_of(model, context)
        (local,) = (row.local for row in gradients._rows)
        found = []

        def look():
            found.append([gradients.norm(math.inf).item(), local.grad[0].item(), model.a.grad.to_local()[0].item()])

        for change in ("none", "model", "optimizer", "in place", "dropped", "dropped by the optimizer"):
            run_pack(gradients, [lambda: model(a=1.0)])
            gradients.norm(math.inf)
            if change == "model":
                model.a.grad = model.a.grad * 3
            elif change == "optimizer":
                local.grad = local.grad * 5
            elif change == "in place":
                torch.nn.utils.clip_grad_value_([local], 0.5)
            elif change == "dropped":
                model.a.grad = None
            elif change == "dropped by the optimizer":
                torch.optim.SGD([local]).zero_grad()
            look()
            gradients.zero()
            assert local.grad is None and model.a.grad is None
        return found


def test_a_changed_shard_is_taken_in():
    """Contract 3: local gradients are looked up when they are needed."""
    assert run_on_ranks(2, changed_shards) == [[[2.0] * 3, [6.0] * 3, [10.0] * 3, [0.5] * 3, [0.0] * 3, [0.0] * 3]] * 2


def nobody_can_reduce():
    """A gradient that is a mean over the ranks, which no sum makes whole."""
    with context_of(tp=2) as context:
        mesh = context.mesh_for("dense")["tp"]
        model = nn.Module()
        model.w = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
        set_contract(model.w, mesh, "complete")
        gradients = gradients_of(model, context)
        gradients.begin_microbatch(True)
        model.w.grad = DTensor.from_local(torch.ones(2), mesh, [Partial("avg")], run_check=False)
        with pytest.raises(ModelError, match="gradient of 'w'.*avg"):
            gradients.finish(1)


def test_a_placement_that_nobody_can_reduce_is_an_error():
    run_on_ranks(2, nobody_can_reduce)
