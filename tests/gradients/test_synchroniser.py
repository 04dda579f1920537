"""Gradients over several ranks: flat buckets, the order of their sums, what users do to `.grad`, failed steps. With gloo ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gradients.on_ranks import Weights, bucket_sizes, context_of, counted, gradients_of, run_pack
from trainer_kit.exceptions import ModelError, StateError
from trainer_kit.gradients import Gradients
from trainer_kit.parallel import parallelize_replicate
from trainer_kit.parameters import ParameterTable
from trainer_kit.testing import run_on_ranks


def replicated(context, **tensors):
    model = Weights(**tensors)
    parallelize_replicate(model, context.mesh_for("dense")["dp_replicate"])
    return model


def weighted_means():
    """Contract 1 and 2: rank 0 has the samples [4], rank 1 has [0, 0, 0]; cut in three ways."""
    found = []
    with context_of(dp_replicate=2) as context:
        model = replicated(context, w=torch.zeros(()))
        gradients = gradients_of(model, context)
        own = [[[4.0]], [[0.0, 0.0, 0.0]]]
        cuts = [own, [[[4.0], [0.0]], [[0.0, 0.0]]], [[[4.0]], [[0.0], [0.0], [0.0]]]]
        for cut in cuts:
            run_pack(gradients, [lambda c=c: model(w=torch.tensor(c).mean()) * len(c) for c in cut[context.rank]], weight=4)
            found.append(model.w.grad.item())
            gradients.zero()
    return found


def test_the_division_is_by_the_weight_of_all_ranks():
    """B01, B02: the mean of all samples on both ranks, however they are cut. The mean of means would be 2."""
    assert run_on_ranks(2, weighted_means) == [[1.0, 1.0, 1.0]] * 2


def one_rank_without_weight():
    with context_of(dp_replicate=2) as context:
        model = replicated(context, w=torch.zeros(3))
        gradients = gradients_of(model, context)
        # Nothing counts on rank 0, so that it runs nothing at all.
        run_pack(gradients, [lambda: model(w=3.0)] if context.rank else [], weight=2)
        return model.w.grad.tolist()


def test_a_rank_without_any_microbatch_takes_part():
    """B07: the result is that of the rank that has some."""
    assert run_on_ranks(2, one_rank_without_weight) == [[1.5] * 3] * 2


def views_over_steps():
    with context_of(dp_replicate=2) as context:
        model = replicated(context, a=torch.zeros(3), b=torch.zeros(2, 2), c=torch.zeros(()))
        gradients = gradients_of(model, context)
        views = {name: parameter.grad for name, parameter in model.named_parameters()}
        storages = {view.untyped_storage().data_ptr() for view in views.values()}
        found = []
        for length in (1, 3, 2):
            run_pack(gradients, [lambda: model(a=1.0, b=2.0, c=context.rank)] * length, weight=1)
            found.append([parameter.grad.flatten()[0].item() for parameter in model.parameters()])
            gradients.scale(0.5)
            found.append([parameter.grad.flatten()[0].item() for parameter in model.parameters()])
            gradients.zero()
            assert all(parameter.grad is views[name] for name, parameter in model.named_parameters())
            assert not any(view.any() for view in views.values())
        gradients.close()
        assert all(parameter.grad is None for parameter in model.parameters())
        (model.a.sum() * 2).backward()  # nothing is hooked to it any more
        return len(storages), found


def test_gradients_stay_views_of_one_buffer_while_packs_differ_in_length():
    """Contracts 3 and 4."""
    for num_buffers, found in run_on_ranks(2, views_over_steps):
        assert num_buffers == 1
        assert found == [[2, 4, 1], [1, 2, 0.5], [6, 12, 3], [3, 6, 1.5], [4, 8, 2], [2, 4, 1]]


class Chain(nn.Module):
    """Four scalars; the order in which backward reaches them is given."""

    def __init__(self):
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.ones(600)) for _ in range(4)])

    def forward(self, order):
        total = torch.zeros(())
        for index in order:
            total = (total + 1) * self.w[index].sum() / 600
        return total


def sums_in_order(first_bytes, max_bytes):
    with bucket_sizes(first_bytes, max_bytes), context_of(dp_replicate=2) as context:
        model = Chain()
        parallelize_replicate(model, context.mesh_for("dense")["dp_replicate"])
        gradients = gradients_of(model, context)
        orders = [[0, 1, 2, 3], [3, 2, 1, 0]]
        found = []
        with counted() as sizes:
            gradients.begin_microbatch(False)
            model(orders[context.rank]).backward()
            assert sizes == []
            gradients.begin_microbatch(True)
            model(orders[context.rank]).backward()
            found.append(len(sizes))
            gradients.finish(1)
            found.append(list(sizes))
        # Backward reaches w[3] with factor 1, w[2] with the product of those outside of it, ...: all weights are 1.
        found.append([round(parameter.grad.sum().item(), 4) for parameter in model.w])
        return found


def test_buckets_start_in_one_order_whatever_the_order_of_backward():
    """Contract 4: nothing is started before the last microbatch; then all buckets, the last parameters first, in backward already.

    With buckets of one parameter each both ranks must begin with that of w[3], which rank 1 reaches last.
    """
    forward, reverse = run_on_ranks(2, sums_in_order, 1, 1)
    assert forward == reverse and forward[:2] == [4, [608] * 4]
    # d/dw[k] at order 0123 is k + 1, at the reversed one 4 - k; two microbatches.
    assert forward[2] == [10.0] * 4


def test_the_first_bucket_is_small_and_the_others_are_not():
    (first, second) = run_on_ranks(2, sums_in_order, 2500, 6000)
    assert first == second and first[1] == [608, 1216, 608] and first[2] == [10.0] * 4


def unused_parameters():
    with bucket_sizes(1, 1), context_of(dp_replicate=2) as context:
        model = replicated(context, a=torch.zeros(2), b=torch.zeros(2), c=torch.zeros(2), d=torch.zeros(2))
        gradients = gradients_of(model, context)
        found = []
        for _ in range(2):
            # b: in the first microbatch only; c: on rank 1 only; d: nowhere.
            last = {"a": 1.0} if context.rank == 0 else {"a": 1.0, "c": 5.0}
            run_pack(gradients, [lambda: model(a=1.0, b=1.0), lambda last=last: model(**last)])
            found.append([parameter.grad[0].item() for parameter in model.parameters()])
            gradients.zero()
        return found


def test_a_parameter_that_is_not_used_counts_as_zero():
    """Contract 4: in some microbatch, on some rank, or everywhere."""
    assert run_on_ranks(2, unused_parameters) == [[[4, 2, 5, 0]] * 2] * 2


def replaced_gradients():
    found = []
    with context_of(dp_replicate=2) as context:
        model = replicated(context, a=torch.zeros(2), b=torch.zeros(2))
        gradients = gradients_of(model, context)
        view = model.a.grad
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def values():
            assert model.a.grad is view
            return [model.a.grad[0].item(), model.b.grad[0].item()]

        optimizer.zero_grad(set_to_none=True)
        run_pack(gradients, [lambda: model(a=1.0, b=1.0)] * 2)
        found.append(values())
        gradients.zero()

        # In the middle of a pack: what was there is gone, as it is for every optimizer.
        gradients.begin_microbatch(False)
        model(a=100.0, b=100.0).backward()
        model.a.grad = None
        model.b.grad = torch.full((2,), 7.0)
        gradients.begin_microbatch(True)
        model(a=1.0).backward()
        gradients.finish(1)
        found.append(values())

        # When they are ready; None is a gradient of zero.
        gradients.norm()
        model.a.grad, model.b.grad = torch.full((2,), 3.0), None
        found.append([gradients.norm().item(), *values()])
        gradients.zero()

        # A hook of the user that makes a new tensor of each gradient.
        handle = model.a.register_hook(lambda gradient: gradient * 10)
        run_pack(gradients, [lambda: model(a=1.0, b=1.0)])
        found.append(values())
        handle.remove()
    return found


def test_a_gradient_that_is_replaced_is_taken_in():
    """Contract 3: never lost in silence."""
    expected = [[4, 4], [2, 14], [pytest.approx(18**0.5), 3, 0], [20, 2]]
    assert run_on_ranks(2, replaced_gradients) == [expected] * 2


def replaced_too_late(replacement):
    with context_of(dp_replicate=2) as context:
        model = replicated(context, a=torch.zeros(2), b=torch.zeros(2))
        gradients = gradients_of(model, context)

        def replace(parameter):
            parameter.grad = replacement

        handle = model.a.register_post_accumulate_grad_hook(replace)  # after ours, which has started the sum
        with pytest.raises(ModelError, match="gradient of 'a' was replaced after its sum") if replacement is not None else counted():
            run_pack(gradients, [lambda: model(a=1.0, b=1.0)])
        handle.remove()
        return None if model.a.grad is replacement else model.a.grad[0].item()


@pytest.mark.parametrize(("replacement", "result"), [(None, 2.0), (torch.ones(2), None)])
def test_a_gradient_that_is_replaced_while_it_is_summed(replacement, result):
    """A dropped one, as some do to save memory, is the sum all the same; another tensor would be lost, so it is an error."""
    assert run_on_ranks(2, replaced_too_late, replacement) == [result] * 2


class Fails(RuntimeError):
    pass


def failed_steps(where):
    with bucket_sizes(1, 1), context_of(dp_replicate=2) as context:
        model = replicated(context, a=torch.zeros(2), b=torch.zeros(2))
        gradients = gradients_of(model, context)

        def fail(gradient):
            raise Fails

        with pytest.raises(Fails):
            gradients.begin_microbatch(False)
            model(a=1.0, b=1.0).backward()
            gradients.begin_microbatch(True)
            if where == "forward" or (where == "differently" and context.rank == 0):
                raise Fails
            handle = model.a.register_hook(fail)
            (model.a.sum() * 1.0 + 0 * model.b.sum() + model.b.sum()).backward()  # b, and its bucket, before a
        if where != "forward" and not (where == "differently" and context.rank == 0):
            handle.remove()
        gradients.zero()
        assert not model.a.grad.any() and not model.b.grad.any()
        if where == "differently":
            with pytest.raises(StateError, match=r"failed at different places on the ranks \(sums of gradients begun: 0, 1\)"):
                gradients.begin_microbatch(True)
            if context.rank == 0:  # a partner for the sum that the other rank has begun, which the next job would meet
                dist.all_reduce(torch.zeros(16))
            return None
        found = []
        for _ in range(2):
            run_pack(gradients, [lambda: model(a=1.0, b=2.0)])
            found.append([model.a.grad[0].item(), model.b.grad[0].item()])
            gradients.zero()
        return found


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_a_failed_step_everything_is_clean(where):
    """Contract 24, of gradients: no sum that was begun and no half-counted bucket is left."""
    assert run_on_ranks(2, failed_steps, where) == [[[2, 4], [2, 4]]] * 2


def test_ranks_that_failed_at_different_places_do_not_go_on():
    """Contract 24: the run ends, as the sums that were begun would pair with those of the next step."""
    run_on_ranks(2, failed_steps, "differently")


def second_gradient():
    with bucket_sizes(1, 1), context_of(dp_replicate=2) as context:
        model = replicated(context, a=torch.zeros(2), b=torch.zeros(2))
        gradients = gradients_of(model, context)
        gradients.begin_microbatch(True)
        model(b=1.0).backward()
        with pytest.raises(ModelError, match="'b' got a second gradient in one microbatch.*use_reentrant=False"):
            model(b=1.0).backward()


def test_a_gradient_that_comes_after_its_sum_is_an_error():
    run_on_ranks(2, second_gradient)


def wide_sums(grad_dtype):
    with context_of(dp_replicate=2) as context:
        model = replicated(context, a=torch.zeros(2, dtype=torch.bfloat16), b=torch.zeros(2))
        gradients = gradients_of(model, context, grad_dtype=grad_dtype, cast_for_update=True)
        values = [[256.0] + [0.5] * 8, [0.5] * 8]
        run_pack(gradients, [lambda v=v: model(a=v, b=v) for v in values[context.rank]])
        found = [model.a.grad.dtype, model.a.grad[0].item(), model.b.grad[0].item()]
        view = model.a.grad
        gradients.cast_for_update()
        found.append(model.a.grad.dtype)
        gradients.zero()
        assert model.a.grad is view and not view.any()
        return found


def test_buckets_accumulate_and_reduce_in_the_asked_dtype():
    """Contract 5, B109: 256 and 16 times 0.5 is 264, while a bf16 sum stays at 256."""
    assert run_on_ranks(2, wide_sums, torch.float32) == [[torch.float32, 264.0, 264.0, torch.bfloat16]] * 2
    for found in run_on_ranks(2, wide_sums, None):
        assert found[:2] == [torch.bfloat16, 260.0] and found[2] == 264.0  # 256 + 8 * 0.5 in bf16 is 256, plus 4 from rank 1


def strided_parameters():
    with context_of(dp_replicate=2) as context:
        model = replicated(context, a=torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), b=torch.zeros(6, 2)[::2])
        gradients = gradients_of(model, context)
        run_pack(gradients, [lambda: model(a=torch.arange(120.0).view(2, 3, 4, 5), b=1.0)])
        assert torch.equal(model.a.grad, 2 * torch.arange(120.0).view(2, 3, 4, 5)) and torch.equal(model.b.grad, torch.full((3, 2), 2.0))
        return model.a.grad.stride() == model.a.stride(), model.b.grad.is_contiguous()


def test_the_memory_of_a_gradient_is_laid_out_as_that_of_its_parameter():
    assert run_on_ranks(2, strided_parameters) == [(True, True)] * 2


def tied_parameters():
    with context_of(dp_replicate=2) as context:
        model = Weights(a=torch.zeros(3), b=torch.zeros(3))
        model.b = model.a
        parallelize_replicate(model, context.mesh_for("dense")["dp_replicate"])
        gradients = gradients_of(model, context)
        run_pack(gradients, [lambda: model(a=1.0, b=1.0)] * 2)
        return model.a.grad.tolist(), gradients.norm().item()


def test_a_tied_parameter_is_summed_once():
    """Contract 8 and 12."""
    assert run_on_ranks(2, tied_parameters) == [([8.0] * 3, pytest.approx(192**0.5))] * 2


def reduced_dims_of_a_mesh():
    """Parameters that are partial along one dimension or both of a 2 x 2 mesh; what every rank adds is its number, from 1."""
    with context_of(dp_replicate=2, tp=2) as context:
        mesh = context.mesh_for("dense")
        model = nn.ModuleDict({name: Weights(w=torch.zeros(2)) for name in ("both", "data", "tensor")})
        parallelize_replicate(model["both"], mesh["dp_replicate", "tp"])
        parallelize_replicate(model["data"], mesh["dp_replicate"])
        parallelize_replicate(model["tensor"], mesh["tp"])
        gradients = gradients_of(model, context)
        run_pack(gradients, [lambda: torch.stack([part(w=context.rank + 1.0) for part in model.values()]).sum()])
        return [part.w.grad[0].item() for part in model.values()]


def test_every_gradient_is_summed_over_its_own_dimensions():
    """Contract 1. Rank = 2 * data + tensor."""
    found = run_on_ranks(4, reduced_dims_of_a_mesh)
    assert found == [[10, 4, 3], [10, 6, 3], [10, 4, 7], [10, 6, 7]]


def test_one_process_has_no_buckets():
    """Contract 10."""
    model = Weights(a=torch.zeros(2))
    gradients = Gradients(ParameterTable([model]).rows)
    gradients.begin_microbatch(True)
    assert model.a.grad is None and not dist.is_initialized()
