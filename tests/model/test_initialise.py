"""Initial values are a function of (seed, name), and resets may do what stays right on every mesh."""

import random
import sys

import pytest
import torch
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.model import build_stage

pytestmark = pytest.mark.usefixtures("nan_memory")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)


def by_name(model):
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def build(form, context, seed=0, **options):
    return by_name(build_stage(form, context, seed=seed, **options))


def dict_of(names, extra=0):
    return lambda: nn.ModuleDict({**{f"other{i}": nn.Linear(3, 3) for i in range(extra)}, **{n: Block() for n in names}})


def test_values_depend_on_seed_and_name_alone(context):
    """Contract 11: another order and other modules beside it change nothing; another seed or name does."""
    one = build(dict_of(["a", "b", "c"]), context)
    for other in (dict_of(["c", "a", "b"]), dict_of(["a", "b", "c"], extra=3)):
        found = build(other, context)
        assert all(torch.equal(found[name], one[name]) for name in one)
    part = build(dict_of(["b"]), context)
    assert all(torch.equal(part[name], one[name]) for name in part)
    assert not torch.equal(one["a.fc.weight"], one["b.fc.weight"])
    assert not torch.equal(one["a.fc.weight"], build(dict_of(["a"]), context, seed=1)["a.fc.weight"])


def test_values_have_the_distribution_of_the_module(context):
    weight = build(lambda: nn.Linear(64, 512), context)["weight"]
    bound = 64**-0.5  # kaiming_uniform_ with a = sqrt(5): uniform in +-1/sqrt(fan_in)
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)


def test_global_random_streams_are_untouched(context):
    """Contract 11: the build changes nothing of python's, torch's and numpy's streams."""
    numpy = pytest.importorskip("numpy")

    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.choice = random.random()
            self.w = nn.Parameter(torch.empty(3))

        def reset_parameters(self):
            values = [random.random(), numpy.random.rand(), torch.rand(()).item()]
            self.w.copy_(torch.tensor(values))

    def states():
        return random.getstate(), torch.get_rng_state().tolist(), [str(part) for part in numpy.random.get_state()]

    torch.manual_seed(1)
    before = states()
    first = build_stage(Draws, context, seed=0)
    assert states() == before
    random.random(), torch.rand(1), numpy.random.rand()
    second = build_stage(Draws, context, seed=0)
    assert torch.equal(first.w, second.w)
    assert first.choice == second.choice
    assert "numpy" in sys.modules


class Tied(nn.Module):
    def __init__(self, tie=True, tied_first=False):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        if tie:
            self.head.weight = self.embedding.weight


def test_tied_weights_are_filled_by_their_first_owner(context):
    """Contract 12, B89: the values of the embedding, not of the head; the head's own bias is initialised all the same."""
    tied, untied = build_stage(Tied, context, seed=0), build_stage(lambda: Tied(tie=False), context, seed=0)
    assert tied.head.weight is tied.embedding.weight
    assert torch.equal(tied.embedding.weight, untied.embedding.weight)
    assert torch.equal(tied.head.bias, untied.head.bias)
    assert [name for name, _ in tied.named_parameters()] == ["embedding.weight", "head.bias"]


def test_a_tied_weight_whose_first_holder_has_no_reset(context):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = None
            self.fc = nn.Linear(2, 2)
            self.shared = self.fc.weight

    model = build_stage(Holder, context, seed=0)
    assert model.shared is model.fc.weight
    assert torch.isfinite(model.shared).all()


class RootInit(nn.Module):
    """The initialisation of a whole model in its root, as many models have it."""

    def __init__(self, extra=0):
        super().__init__()
        self.extra = nn.ModuleList(nn.Linear(4, 4) for _ in range(extra))
        self.wte = nn.Embedding(8, 4, padding_idx=2)
        self.fc = nn.Linear(4, 4)
        self.proj = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.wte.weight
        self.reset_parameters()

    def reset_parameters(self):
        self.apply(self._init_weights)
        nn.init.normal_(self.proj.weight, std=0.5)
        self.proj.weight.data.mul_(1e-3)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=3.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.weight.data[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)


def test_root_initialisation_is_keyed_by_parameter(context):
    """Contract 11: a root's random operations give a value that does not depend on the other modules."""
    model = build_stage(RootInit, context, seed=0)
    one, other = by_name(model), build(lambda: RootInit(extra=2), context)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(one["fc.bias"], torch.zeros(4))
    assert torch.equal(one["norm.weight"], torch.ones(4))
    assert (one["fc.weight"] - 3.0).abs().max() < 0.2
    assert 0 < one["proj.weight"].abs().max() < 5e-3
    # As in one plain loop: the head comes last and is tied, so its draw is what remains, in the padding row too.
    assert model.head.weight is model.wte.weight
    assert (one["wte.weight"] - 3.0).abs().max() < 0.2
    assert not torch.equal(one["fc.weight"], one["wte.weight"][:4])


def test_truncated_normal_in_a_root_is_one_keyed_draw(context):
    class Root(nn.Module):
        def __init__(self, extra):
            super().__init__()
            self.a = nn.Linear(32, 32)
            self.extra = nn.Linear(5, 5) if extra else nn.Identity()
            self.b = nn.Linear(32, 32)

        def reset_parameters(self):
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=1.0, a=-1.0, b=1.0)

    one, other = build(lambda: Root(False), context), build(lambda: Root(True), context)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["a.weight"].abs().max() <= 1.0
    assert one["a.weight"].std().item() == pytest.approx(0.5396, abs=0.03)  # of a normal distribution cut at +-1
    assert not torch.equal(one["a.weight"], one["b.weight"])


RANDOM = {
    "normal_": lambda w: w.normal_(),
    "uniform_": lambda w: w.uniform_(),
    "bernoulli_": lambda w: w.bernoulli_(0.5),
    "exponential_": lambda w: w.exponential_(),
    "log_normal_": lambda w: w.log_normal_(),
    "geometric_": lambda w: w.geometric_(0.5),
    "cauchy_": lambda w: w.cauchy_(),
    "random_": lambda w: w.random_(0, 1000),
    "slices": lambda w: (w[:10].normal_(), w[10:].uniform_()),
}


@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM)
def test_every_random_operation_of_a_root_is_keyed(draw, context):
    class Root(nn.Module):
        def __init__(self, num_before):
            super().__init__()
            self.before = nn.ModuleList(nn.Linear(2, 2) for _ in range(num_before))
            self.fc = nn.Linear(16, 16)

        def reset_parameters(self):
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    draw(module.weight.data)

    one, other = build(lambda: Root(0), context), build(lambda: Root(2), context)
    assert torch.equal(one["fc.weight"], other["fc.weight"])
    assert not torch.equal(one["fc.weight"], build(lambda: Root(0), context, seed=1)["fc.weight"])


class Orthogonal(nn.Linear):
    def reset_parameters(self):
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)


def root_with(reset):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def reset_parameters(self):
            reset(self.fc)

    return Root


REFUSED = {
    "orthogonal_": lambda fc: nn.init.orthogonal_(fc.weight),
    "eye_": lambda fc: nn.init.eye_(fc.weight),
    "copy of a computed tensor": lambda fc: fc.weight.copy_(torch.randn(4, 4)),
    "matrix product": lambda fc: fc.weight.copy_(fc.weight @ fc.weight),
    "norm": lambda fc: fc.weight.div_(fc.weight.norm()),
    "svd": lambda fc: torch.linalg.svd(fc.weight),
    "add of a computed tensor": lambda fc: fc.weight.add_(torch.eye(4)),
}


@pytest.mark.parametrize("reset", REFUSED.values(), ids=REFUSED)
def test_a_root_may_not_compute_the_values_of_others(reset, context):
    """Contract 11: anything but element-wise and random operations belongs into the owning module."""
    with pytest.raises(ModelError, match=r"reset_parameters of Root .*'fc\.weight'.*(?s:.*)Linear 'fc'"):
        build_stage(root_with(reset), context, seed=0)


def test_a_generator_of_its_own_in_a_root_is_refused(context):
    reset = root_with(lambda fc: fc.weight.normal_(generator=torch.Generator()))
    with pytest.raises(ModelError, match="generator="):
        build_stage(reset, context, seed=0)


def test_an_owner_may_compute_anything(context):
    """Contract 11: orthogonal_ in the owning module, also when the root calls its reset."""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = Orthogonal(6, 6)

        def reset_parameters(self):
            self.fc.reset_parameters()
            self.fc.weight.mul_(2.0)

    alone = build(lambda: nn.ModuleDict({"fc": Orthogonal(6, 6)}), context)["fc.weight"]
    torch.testing.assert_close(alone @ alone.T, torch.eye(6))
    assert torch.equal(build(Root, context)["fc.weight"], 2.0 * alone)


def test_a_root_that_calls_resets_keeps_its_own_stream(context):
    class Root(nn.Module):
        def __init__(self, calls):
            super().__init__()
            self.calls, self.fc, self.scale = calls, nn.Linear(2, 2), nn.Parameter(torch.empty(4))

        def reset_parameters(self):
            for _ in range(self.calls):
                self.fc.reset_parameters()
            self.scale.normal_()

    values = [build(lambda calls=calls: Root(calls), context) for calls in (0, 1, 3)]
    assert all(torch.equal(value[name], values[0][name]) for value in values for name in value)


def test_a_copy_of_another_parameter_is_element_wise(context):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.online, self.target = nn.Linear(3, 3), nn.Linear(3, 3)

        def reset_parameters(self):
            for to, source in zip(self.target.parameters(), self.online.parameters(), strict=True):
                to.copy_(source)

    model = build_stage(Pair, context, seed=0)
    assert torch.equal(model.online.weight, model.target.weight)


def test_parameter_lists_belong_to_their_parent(context):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.empty(4, 4)) for _ in range(2))
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.empty(3))})

        def reset_parameters(self):
            for weight in self.weights:
                nn.init.orthogonal_(weight)
            self.named["a"].copy_(torch.arange(3.0))

    model = build_stage(Experts, context, seed=0)
    torch.testing.assert_close(model.weights[1] @ model.weights[1].T, torch.eye(4))
    assert model.named["a"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "form",
    [
        lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.PReLU(), nn.Bilinear(2, 2, 2)),
        lambda: nn.ConvTranspose1d(2, 2, 3),
        lambda: nn.RMSNorm(4),
        lambda: nn.EmbeddingBag(5, 3),
    ],
    ids=["Transformer", "attention", "attention with widths", "LSTM", "convolutions", "transposed", "RMSNorm", "EmbeddingBag"],
)
def test_torch_modules_are_initialised(form, context):
    model = build_stage(form, context, seed=0)
    assert all(torch.isfinite(t).all() for t in [*model.parameters(), *model.buffers()])


def test_a_built_lstm_uses_its_parameters(context):
    model = build_stage(lambda: nn.LSTM(3, 4), context, seed=0)
    plain = nn.LSTM(3, 4)
    plain.load_state_dict(model.state_dict())
    x = torch.linspace(-1, 1, 6).reshape(2, 1, 3)
    torch.testing.assert_close(model(x)[0], plain(x)[0])


def test_bf16_parameters_are_the_fp32_ones_rounded(context):
    """Contract 11: owners and roots draw in the dtype that the constructor chose."""
    for form in (dict_of(["a"]), RootInit, lambda: Orthogonal(6, 6)):
        full, half = build(form, context), build(form, context, dtype=torch.bfloat16)
        for name, value in half.items():
            assert value.dtype == torch.bfloat16
            if name != "proj.weight":  # scaled by its root after it was rounded
                assert torch.equal(value, full[name].bfloat16())
