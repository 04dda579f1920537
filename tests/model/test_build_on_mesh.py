"""Initial values on a mesh: bit for bit those of one process, whatever is cut and how; and what cannot be had is said."""

import copy
import random
import re

import pytest
import torch
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.layout import is_distributed, local_of
from trainer_kit.model import ModelCaller, build_stage
from trainer_kit.names import all_tensors
from trainer_kit.parameters import ParameterTable
from trainer_kit.testing import run_on_ranks

from .on_mesh import MESHES, Laid, alone, boxes, covers, differences, mesh


class Rotary(nn.Module):
    """Two sizes of constants that are not part of the state, and a table that a reset assigns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(3), persistent=False)
        self.register_buffer("scale", torch.empty(()))

    def reset_parameters(self):
        self.inv_freq = 1.0 / 10_000 ** (torch.arange(0, 6, 2, dtype=torch.float32) / 6)
        self.scale.fill_(0.5)


class Orthogonal(nn.Linear):
    """Its values depend on the whole matrix."""

    def reset_parameters(self):
        nn.init.orthogonal_(self.weight)
        self.bias.data = torch.linspace(0, 1, len(self.bias))


class Lists(nn.Module):
    """Parameters in lists, which have no reset of their own."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(3, 2)) for _ in range(2))

    def reset_parameters(self):
        for weight in self.weights:
            weight.normal_()
            weight[1:].zero_()

    def forward(self, x):
        return x


class Model(nn.Module):
    """Tied, frozen and marked parameters, sizes 1, 3, 5 and 251, buffers of all kinds."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(251, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.five = Orthogonal(6, 5)
        self.three = nn.Linear(5, 3, bias=False).requires_grad_(False)
        self.one = nn.Linear(3, 1)
        self.norm = nn.BatchNorm1d(5)
        self.rotary = Rotary()
        self.lists = Lists()
        self.head = nn.Linear(6, 251)
        self.head.weight = self.embedding.weight
        self.up.bias.no_decay = True


class RootInit(Model):
    """The initialisation of a whole model in its root: random and element-wise operations on tensors of other modules."""

    def reset_parameters(self):
        self.apply(self._init)
        nn.init.trunc_normal_(self.down.weight, std=0.5)
        self.down.weight.data.mul_(1e-3)
        self.up.weight.data.copy_(self.up.weight).add_(1.0)
        torch._foreach_mul_([self.five.weight, self.three.weight, self.norm.weight], 2.0)

    def _init(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=1.0, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.uniform_(module.bias, -0.1, 0.1)


def plan():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"embedding": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(), "five": ColwiseParallel()}


def built_alike(names):
    """Per mesh: the differences to one process, for both kinds of initialisation and dtypes; and the boxes of this rank."""
    torch.set_deterministic_debug_mode("error")  # memory that nobody wrote holds nan
    kinds = [(model, dtype) for model in (Model, RootInit) for dtype in (None, torch.bfloat16)]
    references = {(model, dtype): build_stage(model, alone(), seed=3, dtype=dtype) for model, dtype in kinds}
    found = {}
    for name in names:
        with mesh(name) as context:
            for model, dtype in kinds:
                module = build_stage(Laid(model, plan), context, seed=3, dtype=dtype)
                assert module.up.bias.no_decay and module.head.weight is module.embedding.weight
                assert is_distributed(module.embedding.weight) == is_distributed(module.down.weight) == ("replicate" not in name)
                found[name, model.__name__, str(dtype)] = differences(module, references[model, dtype]), boxes(module)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_initial_values_are_those_of_one_process(num_ranks):
    """Contracts 11, 12, 13, 14; B92, B120: bitwise, for uneven and empty shards, ties, frozen parts, bf16 and buffers on every rank."""
    names = [name for name, degrees in MESHES.items() if torch.tensor(list(degrees.values())).prod() == num_ranks]
    ranks = run_on_ranks(num_ranks, built_alike, names)
    for kind in ranks[0]:
        assert [found[kind][0] for found in ranks] == [[]] * num_ranks, kind
        for name, (shape, *_) in ranks[0][kind][1].items():
            assert covers(shape, [found[kind][1][name][1:] for found in ranks]), (kind, name)


class Drawn(nn.Module):
    """Its constructor draws python's and torch's random numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.low, self.high = random.random(), 1 + torch.rand((), device="cpu").item()

    def reset_parameters(self):
        self.weight.uniform_(self.low, self.high)


def drawn_by_ranks():
    with mesh("fsdp 2") as context:
        for seed in range(context.rank + 1):
            random.seed(seed), torch.manual_seed(seed)
        module = build_stage(Laid(Drawn), context, seed=0)
        return module.low, module.high, differences(module, build_stage(Drawn, alone(), seed=0))


def test_what_a_constructor_draws_is_the_same_on_all_ranks():
    """Contract 11: though the random streams of the ranks differ."""
    one, other = run_on_ranks(2, drawn_by_ranks)
    assert one == other and one[2] == []


# ---- memory


class LiveStorages(torch.utils._python_dispatch.TorchDispatchMode):
    """`peak`: the most bytes of CPU storages, made by operations inside the block, that were alive at one time."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils._pytree import tree_leaves

        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and local_of(leaf).device.type == "cpu":
                storage = local_of(leaf).untyped_storage()
                self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


class Wide(nn.Module):
    """Six equal matrices and one of twice their size, in modules of their own."""

    def __init__(self, root_init):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 101, bias=False) for _ in range(6)))
        self.large = nn.Linear(64, 202, bias=False)
        if root_init:
            self.reset_parameters = lambda: self.apply(self._init)

    def _init(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)


def peak_of_build(root_init):
    with mesh("fsdp 2") as context:
        context.mesh_for("dense")
        with LiveStorages() as storages:
            module = build_stage(Laid(lambda: Wide(root_init)), context, seed=0)
        local = sum(local_of(p).untyped_storage().nbytes() for p in module.parameters())
        return storages.peak, local


@pytest.mark.parametrize("root_init", [False, True])
def test_the_build_needs_the_shards_and_the_largest_module(root_init):
    """Contract 11: not the whole model, which is twice the shards; a shard is 51 rows of 64 numbers, padded."""
    row = 64 * 4
    for peak, local in run_on_ranks(2, peak_of_build, root_init):
        assert local == (6 * 51 + 101) * row
        assert local + 202 * row <= peak <= local + 202 * row + 51 * row  # and one shard more while FSDP pads it


# ---- what cannot be had


class Root(nn.Module):
    """A root whose reset does something with its layers."""

    def __init__(self, reset):
        super().__init__()
        self.fc, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.plain = nn.Parameter(torch.empty(4, 4))
        self._reset = reset

    def reset_parameters(self):
        self.plain.zero_()
        self._reset(self)


def cut_columns(module, context):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(module, context.mesh_for("dense")["tp"], {"fc": ColwiseParallel(), "other": RowwiseParallel()})


REFUSED_RESETS = {
    "an index": (lambda m: m.fc.weight[1].fill_(0.0), r"takes a part .*'fc\.weight' \(select\).*owns it, Linear 'fc'"),
    "a slice of data": (lambda m: m.fc.weight.data[:2].normal_(), r"takes a part .*'fc\.weight' \(slice\)"),
    "a transpose": (lambda m: m.fc.weight.t().fill_(1.0), r"takes a part .*'fc\.weight' \(t"),
    "an indexed write": (lambda m: m.fc.weight.index_fill_(0, torch.tensor([0]), 1.0), r"runs index_fill_ on 'fc\.weight'"),
    "a copy of another cut": (lambda m: m.other.weight.copy_(m.fc.weight), r"combines .* by copy_ .* lies differently"),
    "a copy of a whole": (lambda m: m.fc.weight.copy_(m.plain), r"combines 'fc\.weight' by copy_ .* lies differently"),
    "a copy to a whole": (lambda m: m.plain.copy_(m.fc.weight), r"combines 'fc\.weight' by copy_ .* lies differently"),
    "a computed copy": (lambda m: m.fc.weight.copy_(torch.eye(4)), r"'fc\.weight' by copy_ with a computed tensor"),
    "an assignment": (lambda m: setattr(m.fc.weight, "data", torch.zeros(4, 4)), r"'fc\.weight' was assigned"),
    "an assignment of its own": (lambda m: setattr(m.fc.weight, "data", m.fc.weight.data * 2), r"'fc\.weight' was assigned"),
    "a generator": (lambda m: m.fc.weight.normal_(generator=torch.Generator()), r"generator="),
}


def refused_resets():
    found = {}
    with mesh("tp 2") as context:
        for name, (reset, _) in REFUSED_RESETS.items():
            try:
                build_stage(Laid(lambda reset=reset: Root(reset), parallelize=cut_columns), context, seed=0)
            except ModelError as error:
                found[name] = str(error)
    return found


def test_a_root_may_not_touch_parts_of_distributed_tensors():
    """Contract 11: what would be silently nothing, or differ by rank, is an error that says where to move it."""
    for found in run_on_ranks(2, refused_resets):
        assert found.keys() == REFUSED_RESETS.keys()
        for name, (_, message) in REFUSED_RESETS.items():
            assert re.search(message, found[name], re.DOTALL), found[name]


class Sizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Embedding(4, 5)
        self.c = nn.Linear(5, 4, bias=False)
        self.c.weight = self.b.weight


def uneven_columns(module, context):
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    parallelize_module(module, context.mesh_for("dense")["tp"], {"a": RowwiseParallel()})


def partial(module, context):
    from torch.distributed.tensor import DTensor, Partial

    tp = context.mesh_for("dense")["tp"]
    module.a.bias = nn.Parameter(DTensor.from_local(module.a.bias.detach(), tp, [Partial()], run_check=False))


def local_part(module, context):
    module.a.bias = nn.Parameter(module.a.bias.detach()[:2])


def apart(module, context):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(module, context.mesh_for("dense")["tp"], {"b": RowwiseParallel(), "c": ColwiseParallel()})


REFUSED_LAYOUTS = {
    uneven_columns: r"'a\.weight' of shape \(4, 5\) is cut into 2 parts along dim 1.*MeshStrategy",
    partial: r"'a\.bias' cannot be kept.*P\(sum\).*'tp'",
    local_part: r"changed the shape of 'a\.bias' from \(4,\) to \(2,\)",
    apart: r"'c\.weight' and 'b\.weight'.*head\.weight = embedding\.weight",
}


def refused_layouts():
    found = []
    with mesh("tp 2") as context:
        for parallelize in REFUSED_LAYOUTS:
            try:
                build_stage(Laid(Sizes, parallelize=parallelize), context, seed=0)
            except ModelError as error:
                found.append(str(error))
    return found


def test_layouts_that_nobody_could_use_are_refused():
    """Contracts 12, 14: uneven columns, partial values, another shape, ties cut apart."""
    for found in run_on_ranks(2, refused_layouts):
        assert len(found) == len(REFUSED_LAYOUTS)
        for text, message in zip(found, REFUSED_LAYOUTS.values(), strict=True):
            assert re.search(message, text, re.DOTALL), text


# ---- models that have values


class Loaded(nn.Module):
    """Values that differ by rank, of every kind."""

    def __init__(self, rank=0, size=5):
        super().__init__()
        self.fc = nn.Linear(size, 3, device="cpu")
        self.tied = nn.Linear(size, 3, device="cpu")
        self.tied.weight = self.fc.weight
        generator = torch.Generator("cpu").manual_seed(rank)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, device="cpu")
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 1], device="cpu"))
        self.register_buffer("steps", torch.tensor(rank, device="cpu"))
        self.register_buffer("table", torch.full((3, 2), float(rank), device="cpu").t(), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 2, device="cpu"))
        self.register_buffer("narrow", torch.full((2,), rank + 0.5, dtype=torch.bfloat16, device="cpu"))


def given_by_ranks(name):
    from torch.distributed.fsdp import fully_shard

    found = []
    with mesh(name) as context:
        provider = Laid(lambda: Loaded(context.rank))
        found.append(differences(build_stage(provider, context, seed=0), Loaded(0)))
        half = build_stage(provider, context, seed=0, dtype=torch.bfloat16)
        found.append(differences(half, build_stage(Loaded(0), alone(), seed=0, dtype=torch.bfloat16)))

        given = Loaded(0)
        fully_shard(given, mesh=context.mesh_for("dense")["dp_cp_shard"])
        before = dict(all_tensors(given))
        built = build_stage(given, context, seed=0)
        assert all(tensor is before[key] for key, tensor in all_tensors(built))
        found.append(differences(built, Loaded(0)))
        try:
            build_stage(given, context, seed=0, dtype=torch.bfloat16)
        except ModelError as error:
            found.append(str(error))
    return found


def test_a_module_with_weights_gets_those_of_rank_0():
    """Contract 12, B120: parameters and buffers of every dtype and layout; one that its author distributed is taken as it is."""
    for weights, half, distributed, refused in run_on_ranks(2, given_by_ranks, "fsdp 2"):
        assert weights == half == distributed == []
        assert "'fc.weight' was distributed in torch.float32" in refused and "before it is distributed" in refused


def given_differing(sizes):
    with mesh("fsdp 2") as context:
        try:
            build_stage(Laid(lambda: Loaded(size=sizes[context.rank])), context, seed=0)
        except ModelError as error:
            return str(error)
    return None


def test_modules_that_differ_between_ranks_are_named():
    """Not a hang: the sizes are compared before anything is sent."""
    for text in run_on_ranks(2, given_differing, (5, 6)):
        assert "ranks 0 and 1" in text and "fc.weight torch.float32 [3, 5]" in text and "fc.weight torch.float32 [3, 6]" in text


# ---- models that their author distributes, and how FSDP modules are called


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.b(self.a(x))


class StageForm(TwoLayers):
    def forward(self, inputs, shared):
        return super().forward(inputs) + shared


def distributed_by_author():
    from torch.distributed.fsdp import fully_shard

    with mesh("fsdp 2") as context:
        dense = context.mesh_for("dense")["dp_cp_shard"]
        x = torch.linspace(-1, 1, 6).view(2, 3)

        def distribute():
            model = StageForm()
            fully_shard(model.a, mesh=dense)
            return fully_shard(model, mesh=dense)

        reference = build_stage(StageForm, alone(), seed=0)
        built = build_stage(distribute, context, seed=0)
        found = [differences(built, reference)]
        caller = ModelCaller(built)
        with torch.no_grad():
            torch.testing.assert_close(caller(x, 1.0), reference(x, 1.0))
        assert caller.stage_form and not is_distributed(built.b.weight)  # whole, since FSDP leaves the root as it was used
        found.append(differences(build_stage(built, context, seed=1), reference))
        half = build_stage(distribute, context, seed=0, dtype=torch.bfloat16)
        found.append(differences(half, build_stage(StageForm, alone(), seed=0, dtype=torch.bfloat16)))

        ordinary = build_stage(Laid(TwoLayers), context, seed=0)
        assert not ModelCaller(ordinary).stage_form
        with pytest.raises(ModelError, match=r"given, but TwoLayers is called"):
            ModelCaller(ordinary)(x, 1.0)
        return found


def test_models_that_their_author_distributes():
    """In the callable, before they have memory, or later; after an evaluation too. The form of the call and the class are the author's."""
    assert run_on_ranks(2, distributed_by_author) == [[[], [], []]] * 2


class NoReset(TwoLayers):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def without_reset():
    with mesh("fsdp 2") as context:
        try:
            build_stage(Laid(NoReset), context, seed=0)
        except ModelError as error:
            return str(error)
    return None


def test_a_parameter_without_a_value_is_named_on_every_rank():
    """Contract 12, B95: with the class as it is written, though FSDP has put its own before it."""
    for text in run_on_ranks(2, without_reset):
        assert re.search(r"scale of NoReset$", text, re.MULTILINE), text


def lay_out_by_ours(module, context):
    from trainer_kit.parallel import parallelize_fsdp, parallelize_replicate, parallelize_tensor

    dense = context.mesh_for("dense")
    if context.num_tensor_ranks > 1:
        cut = {"embedding": "vocabulary", "head": "vocabulary", "up": "column", "down": "row", "five": "column"}
        parallelize_tensor(module, dense["tp"], cut)
    parallelize_replicate(module.rotary, dense["dp_replicate"])
    if context.dense_sizes()["dp_cp_shard"] > 1:
        parallelize_fsdp(module.up, dense["dp_cp_shard"])
        parallelize_fsdp(module, dense["dp_cp_shard"])
    else:
        parallelize_replicate(module, dense["dp_replicate"])


def with_contracts(names):
    found = []
    for name in names:
        with mesh(name) as context:
            module = build_stage(Laid(Model, parallelize=lay_out_by_ours), context, seed=0)
            assert module.up.bias.no_decay
            found.append(differences(module, build_stage(Model, alone(), seed=0)))
            ParameterTable([module]).check_contracts(context.dense_sizes())
    return found


@pytest.mark.parametrize("num_ranks, names", [(2, ["replicate 2", "fsdp 2", "tp 2"]), (4, ["tp 2 x fsdp 2"])])
def test_gradient_contracts_survive_the_build(num_ranks, names):
    """Contracts 1, 6, 11: memory and values are given without losing what the parallelize functions wrote onto the parameters."""
    assert run_on_ranks(num_ranks, with_contracts, names) == [[[]] * len(names)] * num_ranks


class Scaled(TwoLayers):
    """With a parameter that FSDP leaves whole, since it has no dims."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))

    def reset_parameters(self):
        self.scale.normal_()


def with_default_plan():
    found = []
    reference = build_stage(Scaled, alone(), seed=0)
    for name in ("replicate 2", "fsdp 2"):
        with mesh(name) as context:
            for form in (Scaled, reference if context.is_main else build_stage(Scaled, alone(), seed=1)):
                module = build_stage(copy.deepcopy(form), context, seed=0)
                assert is_distributed(module.a.weight) == (name == "fsdp 2")
                found.append(differences(module, reference))
    return found


def test_a_model_alone_is_laid_out_by_the_default_plan():
    """Contract 11: a class, and a module with weights, in a run whose provider says nothing of the mesh."""
    assert run_on_ranks(2, with_default_plan) == [[[]] * 4] * 2
