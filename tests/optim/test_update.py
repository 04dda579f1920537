"""Updates on shards and through whole parameters, against one process; and their state from one number of ranks to another."""

import functools
import math

import pytest
import torch
from torch import nn

from tests.optim.on_ranks import MESHES, SHAPES, Model, context_of, parts_of, put, rows_of, train, trained
from trainer_kit.checkpoint import CheckpointSaver, load, read_manifest
from trainer_kit.exceptions import CheckpointError, ConfigurationError
from trainer_kit.optim import (
    SGD,
    AdamW,
    Muon,
    OptimizerProvider,
    StochasticAdamW,
    StochasticRoundingAdamW,
    as_optimizer_provider,
    build_update,
    check_optimizer_state,
    exchange,
    load_optimizer_state,
    materialize_state,
    merge_optimizer_values,
    optimizer_templates,
    optimizer_tensors,
    optimizer_values,
)
from trainer_kit.optim.exchange import Box, Exchange
from trainer_kit.optim.whole import balanced_owners
from trainer_kit.parameters import ParameterTable
from trainer_kit.testing import run_on_ranks
from trainer_kit.torch_private import step_optimizer

ONE = {}  # no degrees: one process
ELEMENTWISE = {"adamw": AdamW(lr=0.1, weight_decay=0.1, no_decay=("embed*",)), "sgd": SGD(lr=0.1, momentum=0.9, weight_decay=0.1)}
WHOLE = {
    "muon": Muon(lr=0.1, rest=AdamW(lr=0.1)),
    "callable sgd": as_optimizer_provider(lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9)),
    "callable fused adam": as_optimizer_provider(lambda given: torch.optim.Adam(given, lr=0.1, fused=True)),
    "callable adagrad": as_optimizer_provider(lambda given: torch.optim.Adagrad(given, lr=0.1)),  # makes its state when it is built
}


class WholeStochastic(OptimizerProvider):
    """An optimizer of whole parameters that takes fp32 gradients of bf16 parameters."""

    def build(self, parameters):
        return StochasticRoundingAdamW(parameters, lr=0.1)


BF16 = {
    "stochastic": StochasticAdamW(lr=0.1),
    "stochastic in bf16": StochasticAdamW(lr=0.1, state_dtype="bf16"),
    "whole stochastic": WholeStochastic(),
}
PROVIDERS = ELEMENTWISE | WHOLE | BF16


def num_ranks(degrees):
    return math.prod(degrees.values())


def job_train(degrees):
    return {name: trained(provider, torch.bfloat16 if name in BF16 else torch.float64, 3, degrees) for name, provider in PROVIDERS.items()}


@functools.cache
def expected():
    return job_train(ONE)


@pytest.mark.parametrize("mesh", MESHES)
def test_updates_on_a_mesh_equal_those_of_one_process(mesh):
    """Contract 14, B21: every part on every rank; bitwise where whole parameters are updated, and where bf16 is rounded."""
    for rank, found in enumerate(run_on_ranks(num_ranks(MESHES[mesh]), job_train, MESHES[mesh])):
        for provider in PROVIDERS:
            for name in SHAPES:
                (box, part), whole = found[provider][name], expected()[provider][name][1]
                difference = (part - whole[box]).abs()
                assert (difference <= (1e-12 if provider in ELEMENTWISE else 0.0)).all(), (rank, provider, name)


def job_shapes():
    context = context_of({"dp_shard": 2})
    return {row.name: tuple(row.local.shape) for row in rows_of(context, torch.float32, {"dp_shard": 2})}


def test_the_parts_of_the_test_are_uneven_and_some_are_empty():
    shapes = run_on_ranks(2, job_shapes)
    assert [of_rank["up.weight"] for of_rank in shapes] == [(3, 4), (2, 4)]
    assert [of_rank["one.weight"] for of_rank in shapes] == [(1, 3), (0, 3)]


def test_in_one_process_the_update_is_the_step_of_the_optimizer():
    update = build_update(WHOLE["muon"], ParameterTable([Model(torch.float32)]).trainable(), context_of(ONE))
    assert not update.is_spread and update.elsewhere == frozenset()
    assert (update.step.func, update.step.args) == (step_optimizer, (update.optimizer,))


def test_owners_have_equally_much():
    """The largest first, each to whom has least: 7 + 2 and 5 + 4 of 18."""
    assert balanced_owners([2, 5, 7, 4], 2) == [0, 1, 0, 1]
    assert balanced_owners([1, 1, 1], 3) == [0, 1, 2]
    assert balanced_owners([3], 2) == [0]


def job_ownership():
    context = context_of({"dp_shard": 2})
    rows = rows_of(context, torch.float64, {"dp_shard": 2})
    update = build_update(WHOLE["muon"], rows, context)
    train(update, rows, [0])
    held = {row.name: parameter for parameter, row in update.parameters.items()}
    return {
        "elsewhere": sorted(update.elsewhere),
        "kinds": {name: (tuple(parameter.shape), parameter.device.type) for name, parameter in held.items()},
        "state": {name: {k: tuple(v.shape) for k, v in update.optimizer.state[held[name]].items() if v.ndim} for name in held},
        "bytes": {name: held[name].untyped_storage().nbytes() for name in ("up.weight", "down.weight", "one.weight")},
        "grads": [row.name for row in rows if row.local.grad is None],
        "proxy grads": [name for name, parameter in held.items() if parameter.grad is not None],
        "same groups": [group["param_names"] for group in update.optimizer.param_groups],
    }


def test_each_whole_parameter_has_its_state_on_one_rank_and_no_memory_between_updates():
    """Muon's matrices are up (20 elements), down (18) and one (3); the cube and the embedding stay cut."""
    first, second = run_on_ranks(2, job_ownership)
    assert (first["elsewhere"], second["elsewhere"]) == (["down.weight", "one.weight"], ["up.weight"])
    assert first["kinds"]["up.weight"] == ((5, 4), "cpu") and second["kinds"]["up.weight"] == ((5, 4), "meta")
    assert first["kinds"]["embed.weight"] == ((4, 4), "cpu") and second["kinds"]["embed.weight"] == ((3, 4), "cpu")
    assert first["state"]["up.weight"] == {"momentum_buffer": (5, 4)} and second["state"]["up.weight"] == {}
    assert first["state"]["one.weight"] == {} and second["state"]["one.weight"] == {"momentum_buffer": (1, 3)}
    assert first["state"]["embed.weight"] == {"exp_avg": (4, 4), "exp_avg_sq": (4, 4)}
    assert first["bytes"]["up.weight"] == second["bytes"]["down.weight"] == 8
    assert first["proxy grads"] == ["embed.weight", "up.bias", "cube.weight"]
    assert first["grads"] == [] and first["same groups"] == second["same groups"]


def job_without_gradient_and_with_error():
    context = context_of({"dp_shard": 2})
    rows = rows_of(context, torch.float64, {"dp_shard": 2})
    update = build_update(WHOLE["callable sgd"], rows, context)
    before = parts_of(rows)
    for row in rows:
        row.local.grad = None
    update.step()
    unchanged = all(torch.equal(parts_of(rows)[name][1], part) for name, (_, part) in before.items())
    update.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        update.step()
    held = [parameter for parameter in update.parameters if not parameter.is_meta]
    return unchanged, [p.grad for p in held], {p.untyped_storage().nbytes() for p in held}


def test_a_missing_gradient_is_one_of_zeros_and_a_failed_step_frees_what_it_held():
    """Contract 4: unused everywhere counts as zero."""
    for unchanged, gradients, num_bytes in run_on_ranks(2, job_without_gradient_and_with_error):
        assert unchanged and not any(g is not None for g in gradients) and num_bytes == {8}


def job_exchange(round_elements):
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "ROUND_ELEMENTS", round_elements)
        return exchanged(dist.group.WORLD)


def exchanged(group):
    rank = group.rank()
    wholes = [torch.arange(12.0).view(3, 4) + 100 * index for index in range(3)]
    cuts = [
        [Box((0, 0), (3, 1)), Box((0, 1), (3, 3))],
        [Box((0, 0), (3, 4)), Box((3, 0), (0, 4))],
        [Box((0, 0), (1, 4)), Box((1, 0), (2, 4))],
    ]
    moved = Exchange(group, cuts, owners := [1, 1, 0])
    parts = [cut[rank].of(whole).clone() for cut, whole in zip(cuts, wholes, strict=True)]
    owned = {index: torch.zeros(3, 4) for index in range(3) if owners[index] == rank}
    moved.to_owners(parts, owned)
    arrived = all(torch.equal(owned[index], wholes[index]) for index in owned)
    for whole in owned.values():
        whole += 1
    moved.from_owners(owned, parts)
    return arrived, all(torch.equal(part, cut[rank].of(whole + 1)) for part, cut, whole in zip(parts, cuts, wholes, strict=True))


@pytest.mark.parametrize("round_elements", [1, 2**24])
def test_boxes_reach_their_owners_and_come_back(round_elements):
    assert run_on_ranks(2, job_exchange, round_elements) == [(True, True)] * 2


# State from 2 ranks to 1 to 3.

KINDS = {"muon": WHOLE["muon"], "adam": WHOLE["callable fused adam"], "adamw": ELEMENTWISE["adamw"]}


def job_resume(kind, path, degrees, begin, end, weights):
    """Steps `begin` to `end`, from the state at `path` if there is one before, and its save."""
    context = context_of(degrees)
    rows = rows_of(context, torch.float64, degrees)
    update = build_update(KINDS[kind], rows, context)
    optimizer, held = update.optimizer, update.parameters
    if begin:
        put(rows, weights)
        materialize_state(optimizer)
        manifest = read_manifest(f"{path}/step-{begin:08d}")
        shapes = {name: record.shape for name, record in manifest.tensors.items()}
        check_optimizer_state(optimizer, held, shapes, manifest.values)
        templates = optimizer_templates(optimizer, held, {name: record.dtype for name, record in manifest.tensors.items()})
        load(f"{path}/step-{begin:08d}", templates, strict=False, context=context)
        assert load_optimizer_state(optimizer, held, templates, manifest.values) == []
    train(update, rows, range(begin, end))
    tensors, values = optimizer_tensors(optimizer, held), optimizer_values(optimizer, held)
    values = merge_optimizer_values(context.host.exchange(values)) if update.is_spread else values
    CheckpointSaver(context).save(f"{path}/step-{end:08d}", tensors, values, step=end)
    return parts_of(rows)


def put_together(parts):
    wholes = {name: torch.empty(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for of_rank in parts:
        for name, (box, part) in of_rank.items():
            wholes[name][box] = part
    return wholes


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_from_two_ranks_to_one_to_three(kind, tmp_path):
    """Contracts 14 and 27, B21: as the run without interruption, and the same keys and shapes in every checkpoint."""
    path = str(tmp_path)
    weights = put_together(run_on_ranks(2, job_resume, kind, path, {"dp_shard": 2}, 0, 2, None))
    weights = put_together([job_resume(kind, path, ONE, 2, 4, weights)])
    weights = put_together(run_on_ranks(3, job_resume, kind, path, {"dp_shard": 3}, 4, 6, weights))
    straight = trained(KINDS[kind], torch.float64, 6, ONE)
    for name in SHAPES:
        assert (weights[name] - straight[name][1]).abs().max() <= (0.0 if kind == "adam" else 1e-12), name
    saved = [read_manifest(f"{path}/step-0000000{step}") for step in (2, 4, 6)]
    assert len({tuple(sorted((name, record.shape) for name, record in manifest.tensors.items())) for manifest in saved}) == 1
    assert len({str(manifest.values) for manifest in saved}) == 1


def job_live_memory():
    context = context_of({"dp_shard": 2})
    rows = rows_of(context, torch.float64, {"dp_shard": 2})
    update = build_update(ELEMENTWISE["adamw"], rows, context)
    materialize_state(update.optimizer)
    tensors = optimizer_tensors(update.optimizer, update.parameters)
    dtypes = {key: torch.float32 if key.endswith("avg") else tensor.dtype for key, tensor in tensors.items()}
    templates = optimizer_templates(update.optimizer, update.parameters, dtypes)
    shapes = {key: tuple(template.shape) for key, template in templates.items()}
    for key, template in templates.items():
        template.to_local().fill_(3.0) if template.ndim else template.fill_(3.0)
        assert template.dtype == dtypes[key]
    live = {f"{row.name}/{key}": value for p, row in update.parameters.items() for key, value in update.optimizer.state[p].items()}
    in_place = sorted({key.rsplit("/", 1)[1] for key, value in live.items() if (value == 3).all() and value.numel()})
    remarks = load_optimizer_state(update.optimizer, update.parameters, templates)
    live = {f"{row.name}/{key}": value for p, row in update.parameters.items() for key, value in update.optimizer.state[p].items()}
    whole = {key: torch.full(shape, 4.0, dtype=torch.float64) for key, shape in shapes.items()}
    loaded = all((value == 3).all() and value.dtype == dtypes[key] for key, value in live.items())
    load_optimizer_state(update.optimizer, update.parameters, whole)  # whole tensors, of which each rank takes its part
    after = [v.shape == p.shape and (v == 4).all() for p in update.parameters for v in update.optimizer.state[p].values() if v.ndim]
    return shapes, in_place, remarks, loaded, all(after)


def test_templates_share_the_live_memory_and_have_the_saved_dtype():
    """B18 on shards: the shapes are those of the whole tensors; nothing is cast."""
    for shapes, in_place, remarks, loaded, after in run_on_ranks(2, job_live_memory):
        assert {key: shape for key, shape in shapes.items() if key.endswith("/exp_avg")} == {f"{n}/exp_avg": s for n, s in SHAPES.items()}
        assert in_place == ["exp_avg_sq", "step"] and loaded and after
        assert len(remarks) == 1 and "'exp_avg' is torch.float32" in remarks[0]


def test_values_of_ranks_become_one_and_differences_are_an_error():
    """Contract 28."""
    first = {"optimizer": ["Adam"], "state": {"a/n": 1, "b/n": float("nan")}, "stateless": ["x", "y"]}
    second = {"optimizer": ["Adam"], "state": {"b/n": float("nan"), "c/n": 3}, "stateless": ["y", "z"]}
    merged = merge_optimizer_values([first, second])
    assert merged["optimizer"] == ["Adam"] and set(merged["state"]) == {"a/n", "b/n", "c/n"} and merged["stateless"] == ["x", "y", "z"]
    with pytest.raises(CheckpointError, match=r"'a/n' is 1 on rank 0 and 2 on rank 1"):
        merge_optimizer_values([first, {**second, "state": {"a/n": 2}}])


def job_foreign_mesh():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    context = context_of({"dp_shard": 2})
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("mine",)))
    with pytest.raises(ConfigurationError, match=r"over the mesh dimensions mine, which no domain"):
        build_update(WHOLE["muon"], ParameterTable([model]).trainable(), context)


def test_a_mesh_that_is_not_of_the_strategy_is_an_error():
    run_on_ranks(2, job_foreign_mesh)
