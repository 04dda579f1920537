"""The norm, the finite check and clipping over several ranks and meshes. With gloo ranks."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.gradients.on_ranks import NaNBackward, Weights, context_of, counted, gradients_of, run_pack
from trainer_kit.callbacks import GradientClipping
from trainer_kit.exceptions import NonFiniteError
from trainer_kit.gradients import NonFiniteGuard
from trainer_kit.mesh.contracts import set_contract
from trainer_kit.parallel import parallelize_fsdp, parallelize_replicate
from trainer_kit.testing import run_on_ranks

ORDERS = (1.0, 2.0, 3.0, math.inf)


def expected_norm(tensors, p):
    return torch.linalg.vector_norm(torch.cat([tensor.double().flatten() for tensor in tensors]), p).item()


def three_meshes():
    """B49: A over four ranks, B on a 2 x 2 mesh, C on every rank; and D, replicated on the first of its two dimensions."""
    with context_of(dp_shard=2, tp=2) as context:
        flat, square = context.mesh_for("flat"), context.mesh_for("dense")["dp_cp_shard", "tp"]
        torch.manual_seed(0)
        wholes = {"a": torch.randn(7, 2), "b": torch.randn(3, 5), "c": torch.randn(4), "d": torch.randn(5, 2)}
        wholes = {name: tensor.double() for name, tensor in wholes.items()}
        lie = {"a": (flat, [Shard(0)]), "b": (square, [Shard(0), Shard(1)]), "c": None, "d": (square, [Replicate(), Shard(0)])}
        model = nn.ParameterDict()
        for name, whole in wholes.items():
            cut = whole if lie[name] is None else distribute_tensor(whole, *lie[name], src_data_rank=None)
            model[name] = nn.Parameter(torch.zeros_like(cut))
            set_contract(model[name], square, "complete")
        gradients = gradients_of(model, context)
        gradients.begin_microbatch(True)
        for name, whole in wholes.items():
            model[name].grad = whole.clone() if lie[name] is None else distribute_tensor(whole, *lie[name], src_data_rank=None)
        gradients.finish(2.0)
        with counted() as sizes:
            norms = [gradients.norm(p).item() for p in ORDERS for _ in range(2)]
        assert len(sizes) == len(ORDERS)
        gradients.scale(0.5)
        scaled = [bool((model[n].grad.full_tensor() if lie[n] else model[n].grad).allclose(w / 4)) for n, w in wholes.items()]
        return norms[::2], [gradients.norm(p).item() for p in ORDERS], [expected_norm(wholes.values(), p) / 2 for p in ORDERS], scaled


def test_the_norm_of_parameters_on_different_meshes_is_that_of_one_process():
    """B49, contract 8: to 1e-9 in fp64, one collective per p, the same number on every rank; scaling follows."""
    ranks = run_on_ranks(4, three_meshes)
    assert all(rank == ranks[0] for rank in ranks)
    norms, halves, expected, scaled = ranks[0]
    assert norms == pytest.approx(expected, rel=1e-12) and halves == pytest.approx([n / 2 for n in expected], rel=1e-12)
    assert all(scaled)


def sharded(context, grads, **settings):
    """FSDP over all ranks, with these gradients of the sum over ranks."""
    model = Weights(**{name: torch.zeros_like(grad) for name, grad in grads.items()})
    parallelize_fsdp(model, context.mesh_for("dense")["dp_cp_shard"])
    gradients = gradients_of(model, context, **settings)
    loss = [lambda: model(**{name: grad / context.world_size for name, grad in grads.items()})]
    return model, gradients, loss


def norms_of_fsdp(grads):
    with context_of(dp_shard=2) as context:
        _, gradients, loss = sharded(context, grads)
        found = []
        for _ in range(2):
            run_pack(gradients, loss)
            found.append([gradients.norm(p).item() for p in ORDERS])
            gradients.zero()
        assert found[0] == found[1]
        return found[0]


def test_the_norm_of_shards_is_the_same_on_every_rank():
    """B51: [3, 4] on two ranks is 5. B60: two runs are bitwise equal. Contract 14: uneven and empty shards."""
    assert run_on_ranks(2, norms_of_fsdp, {"w": torch.tensor([3.0, 4.0])}) == [pytest.approx([7, 5, 91 ** (1 / 3), 4])] * 2
    grads = {"a": torch.randn(5, 3), "b": torch.randn(1)}
    first, second = run_on_ranks(2, norms_of_fsdp, grads)
    assert first == second == pytest.approx([expected_norm(grads.values(), p) for p in ORDERS], rel=1e-6)


def test_a_rank_may_hold_nothing_at_all():
    """Contract 14."""
    assert run_on_ranks(2, norms_of_fsdp, {"w": torch.tensor([-2.0])}) == [[2.0] * 4] * 2


def test_large_finite_gradients_do_not_overflow():
    """B57: on all ranks alike, as some would wait for the others in a second collective."""
    grads = {"a": torch.tensor([1e20, 1.0]), "b": torch.tensor([1.0, 1e20])}
    assert run_on_ranks(2, norms_of_fsdp, grads) == [pytest.approx([2e20, 2**0.5 * 1e20, 2 ** (1 / 3) * 1e20, 1e20])] * 2


def norm_of_nan():
    with context_of(dp_shard=2) as context:
        model, gradients, loss = sharded(context, {"w": torch.tensor([1.0, 2.0])})
        found = []
        for value in (math.nan, math.inf):
            run_pack(gradients, loss)
            if context.rank:
                model.w.grad.to_local().fill_(value)
            found.append([gradients.norm(p).item() for p in ORDERS])
            gradients.zero()
        return found


def test_nan_and_inf_of_one_rank_are_seen_by_all():
    """Contract 8; MAX over gloo ranks would lose a nan."""
    for nans, infs in run_on_ranks(2, norm_of_nan):
        assert all(map(math.isnan, nans)) and infs == [math.inf] * 4


def tensor_parallel_norm():
    with context_of(tp=2) as context:
        mesh = context.mesh_for("dense")["tp"]
        model = nn.ParameterDict({"plain": nn.Parameter(torch.zeros(1))})
        model["cut"] = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
        for parameter in model.values():
            set_contract(parameter, mesh, "complete")
        gradients = gradients_of(model, context)
        run_pack(gradients, [lambda: (model["plain"] * 3.0).sum() + (model["cut"] * 8**0.5).to_local().sum()])
        return gradients.norm().item()


def test_replicated_gradients_count_once():
    """B52: 3 on both ranks and 4 in two shards is 5; counted twice it would be 5.831."""
    assert run_on_ranks(2, tensor_parallel_norm) == [pytest.approx(5.0)] * 2


def replicated_norm():
    with context_of(dp_replicate=2) as context:
        model = Weights(a=torch.zeros(2), b=torch.zeros(2, dtype=torch.float64), c=torch.zeros(2, dtype=torch.bfloat16))
        parallelize_replicate(model, context.mesh_for("dense")["dp_replicate"])
        gradients = gradients_of(model, context)
        run_pack(gradients, [lambda: model(a=1.0) + model(b=2.0) + model(c=3.0)])
        with counted() as sizes:
            norms = [gradients.norm(p).item() for p in ORDERS]
        return norms, sizes


def test_where_everything_is_replicated_the_norm_takes_no_collective():
    """Contract 8: mixed dtypes."""
    elements = torch.tensor([2.0, 2, 4, 4, 6, 6])
    assert run_on_ranks(2, replicated_norm) == [(pytest.approx([expected_norm([elements], p) for p in ORDERS], rel=1e-6), [])] * 2


def clipped(max_norm):
    with context_of(dp_shard=2) as context:
        model, gradients, loss = sharded(context, {"w": torch.tensor([3.0, 4.0, 12.0])})
        run_pack(gradients, loss)
        event = SimpleNamespace(grad_norm=gradients.norm, scale=gradients.scale)
        GradientClipping(max_norm, log=False).on_gradients_ready(event) if max_norm != math.inf else event.grad_norm()
        return model.w.grad.to_local().tolist(), gradients.norm().item()


@pytest.mark.parametrize(("max_norm", "factor"), [(6.5, 0.5), (math.inf, 1.0)])
def test_clipping_works_unchanged_on_a_mesh(max_norm, factor):
    """Contract 8 and B53: by the norm of everything; without a limit nothing changes."""
    first, second = run_on_ranks(2, clipped, max_norm)
    assert first[0] + second[0] == pytest.approx([3 * factor, 4 * factor, 12 * factor], rel=1e-6)
    assert first[1] == second[1] == pytest.approx(13 * factor, rel=1e-6)


def steps(how, policy, deferred=False, late=False):
    """Three steps, of which the second has a nan on rank 1; `late`: a callback puts it into its local gradient."""
    degrees = {"dp_shard": 2} if how == "fsdp" else {"dp_replicate": 2}
    logging.getLogger("trainer_kit").setLevel(logging.ERROR)
    with context_of(**degrees) as context:
        model = Weights(a=torch.ones(4), z=torch.ones(3))
        mesh = context.mesh_for("dense")
        parallelize_fsdp(model, mesh["dp_cp_shard"]) if how == "fsdp" else parallelize_replicate(model, mesh["dp_replicate"])
        gradients = gradients_of(model, context)
        locals_ = [p.to_local() if how == "fsdp" else p.detach() for p in model.parameters()]
        rows = [row.local for row in gradients._rows]
        optimizer = torch.optim.AdamW(rows, lr=0.1, fused=True, weight_decay=0.0)
        guard = NonFiniteGuard(gradients, optimizer, policy, device=torch.device("cpu"), deferred=deferred, delay=1)
        found, error = [], ""
        for step in range(3):
            bad = step == 1 and context.rank == 1
            spoil = NaNBackward.apply if bad and not late else torch.clone
            run_pack(gradients, [lambda spoil=spoil: spoil(model(a=1.0)) + model(z=1.0)], 2.0, guard.flag())
            guard.watch(late)
            if bad and late:
                rows[0].grad[0] = math.nan
            try:
                if guard.permits(step, 2.0):
                    optimizer.step()
            except NonFiniteError as raised:
                error = str(raised)
                break
            gradients.zero()
            found.append([round(tensor[0].item(), 3) for tensor in locals_])
        gradients.zero()
        logging.getLogger("trainer_kit").setLevel(logging.NOTSET)
        return found, guard.num_skipped, error


@pytest.mark.parametrize("how", ["replicate", "fsdp"])
def test_a_nan_on_one_rank_skips_the_step_on_all(how):
    """B55, B56: the parameters stay, one step is counted, and the next one is made."""
    assert run_on_ranks(2, steps, how, "skip") == [([[0.9, 0.9], [0.9, 0.9], [0.8, 0.8]], 1, "")] * 2


def test_a_nan_that_a_callback_writes_on_one_rank_skips_the_step_on_all():
    """B55."""
    assert run_on_ranks(2, steps, "fsdp", "skip", False, True) == [([[0.9, 0.9], [0.9, 0.9], [0.8, 0.8]], 1, "")] * 2


@pytest.mark.parametrize(("how", "late"), [("replicate", False), ("fsdp", False), ("fsdp", True)])
def test_a_nan_on_one_rank_is_the_same_error_on_all(how, late):
    """B55: all raise, with the name that only one of them may know."""
    first, second = run_on_ranks(2, steps, how, "error", False, late)
    assert first == second
    assert "step 1: a gradient is inf or nan; the first parameter with one is 'a' (1 of 2 have one)" in first[2]


def test_the_late_error_of_accelerators_is_the_same_on_all():
    """B55: the flag is reduced before it is given to the optimizer, which changes nothing, and read one step later."""
    first, second = run_on_ranks(2, steps, "fsdp", "error", True, True)
    assert first == second
    assert first[0] == [[0.9, 0.9], [0.9, 0.9]] and "step 1" in first[2] and "'a' (1 of 2 have one); no parameter was changed" in first[2]


def weightless(how):
    with context_of(dp_shard=2) as context:
        model, gradients, loss = sharded(context, {"w": torch.tensor([1.0, 2.0])})
        guard = NonFiniteGuard(gradients, torch.optim.SGD([torch.zeros(1)]), how, device=torch.device("cpu"), deferred=False, delay=0)
        logging.getLogger("trainer_kit").setLevel(logging.ERROR)
        run_pack(gradients, loss, 0, guard.flag())
        permitted = guard.permits(0, 0)
        logging.getLogger("trainer_kit").setLevel(logging.NOTSET)
        return permitted, model.w.grad.to_local().isfinite().all().item()


def test_a_pack_of_weight_zero_updates_nothing_on_all_ranks():
    """B07: without a collective that one of them would miss."""
    assert run_on_ranks(2, weightless, "error") == [(False, True)] * 2
