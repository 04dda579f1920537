"""Muon and its companion, against the two optimizers of torch run side by side."""

import copy

import pytest
import torch
from torch import nn

from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.optim import AdamW, CombinedOptimizer, Muon, StochasticAdamW, build_optimizer
from trainer_kit.optim.wide_muon import WideMuon

SHAPES = {
    "embed_tokens.weight": (8, 4), "layers.0.attention.output.dense.weight": (4, 4), "layers.0.norm.weight": (4,),
    "layers.0.mlp.weight": (6, 4), "layers.0.mlp.bias": (6,), "layers.0.experts": (2, 4, 4), "lm_head.weight": (8, 4),
}  # fmt: skip
MATRICES = ["layers.0.attention.output.dense.weight", "layers.0.mlp.weight"]
PROVIDER = Muon(lr=0.02, weight_decay=0.1, adjust_lr="match_rms_adamw", orthogonalise_in="bf16", rest=AdamW(lr=0.01, weight_decay=0.0))


def make_parameters():
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_parity_with_muon_and_adamw_run_separately():
    ours, plain = make_parameters(), make_parameters()
    optimizer = build_optimizer(PROVIDER, list(ours.items()))
    muon = torch.optim.Muon([plain[name] for name in MATRICES], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([p for name, p in plain.items() if name not in MATRICES], lr=0.01, weight_decay=0.0, fused=True)
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(plain, step)
        optimizer.step()
        muon.step()
        adamw.step()
    for name in SHAPES:
        assert torch.equal(ours[name], plain[name]), name


def newton_schulz(matrix, steps=5):
    """The formula in double precision, by the singular values: each one goes through the polynomial."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_update_in_the_dtype_of_the_parameter(dtype, tolerance, adjust_lr, nesterov):
    """Against the closed form of two steps; the small digits of the gradient stay."""
    weight = nn.Parameter(torch.randn(6, 4, dtype=dtype, generator=torch.Generator().manual_seed(0)))
    gradients = [torch.randn(6, 4, dtype=dtype, generator=torch.Generator().manual_seed(k)) for k in (1, 2)]
    provider = Muon(lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr=adjust_lr, nesterov=nesterov)
    optimizer = build_optimizer(provider, [("layer.weight", weight)])
    expected, average = weight.detach().double().clone(), torch.zeros(6, 4, dtype=torch.float64)
    scale = 0.2 * 6**0.5 if adjust_lr == "match_rms_adamw" else 1.5**0.5
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        average = 0.9 * average + 0.1 * gradient.double()
        direction = 0.1 * gradient.double() + 0.9 * average if nesterov else average
        expected = (1 - 0.02 * 0.1) * expected - 0.02 * scale * newton_schulz(direction)
    assert torch.allclose(weight.double(), expected, rtol=0, atol=tolerance)


def test_it_behaves_as_one_optimizer_of_torch():
    parameters = make_parameters()
    optimizer = build_optimizer(PROVIDER, list(parameters.items()))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [group["name"] for group in optimizer.param_groups] == ["default", "rest/default"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    set_gradients(parameters, 0)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.005]
    assert calls == [1]
    assert set(optimizer.state) == set(parameters.values())
    assert set(optimizer.state[parameters["layers.0.mlp.weight"]]) == {"momentum_buffer"}
    assert set(optimizer.state[parameters["lm_head.weight"]]) == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters.values())
    with pytest.raises(UnsupportedError, match="no further groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
def test_a_schedule_set_through_the_groups_and_restored_state_reach_the_parts(way):
    """The state of the whole is the state of the parts also after it was replaced."""
    straight, resumed = make_parameters(), make_parameters()
    one = build_optimizer(PROVIDER, list(straight.items()))
    two = build_optimizer(PROVIDER, list(resumed.items()))
    for step in range(4):
        if step == 2 and way == "state_dict":
            two.load_state_dict(copy.deepcopy(one.state_dict()))
            for name in SHAPES:
                resumed[name].data.copy_(straight[name])
        elif step == 2:
            two = copy.deepcopy(one)
            copied = {name: p for group in two.param_groups for name, p in zip(group["param_names"], group["params"], strict=True)}
            resumed = {name: copied[name] for name in SHAPES}
        for optimizer, parameters in ((one, straight), (two, resumed)):
            set_gradients(parameters, step)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (step + 1)
            optimizer.step()
    for name in SHAPES:
        assert torch.equal(straight[name], resumed[name]), name


def test_on_a_mesh_only_the_matrices_of_muon_are_needed_whole():
    """The choice is by name and number of dims, which shards have too, empty ones as well."""
    assert PROVIDER.whole_parameters(list(make_parameters().items())) == set(MATRICES)
    parts = {name: nn.Parameter(torch.ones(0, *shape[1:])) for name, shape in SHAPES.items()}
    assert PROVIDER.whole_parameters(list(parts.items())) == set(MATRICES)


def test_patterns_move_matrices_to_the_rest():
    parameters = make_parameters()
    optimizer = build_optimizer(Muon(rest_patterns=("*.output.*",), rest=StochasticAdamW()), list(parameters.items()))
    assert isinstance(optimizer, CombinedOptimizer)
    assert optimizer.param_groups[0]["param_names"] == ["layers.0.mlp.weight"]
    only = build_optimizer(Muon(), [("layer.weight", nn.Parameter(torch.ones(3, 3)))])
    assert type(only) is WideMuon


@pytest.mark.parametrize(
    ("provider", "names", "words"),
    [
        (Muon(rest_patterns=("nothing*",)), SHAPES, r"rest_patterns.*'nothing\*'"),
        (Muon(groups=[{"pattern": "*.bias", "lr": 1.0}]), SHAPES, r"groups\[0\].*'\*.bias' matches none of the 2"),
        (Muon(), ["embed_tokens.weight", "layers.0.norm.weight", "lm_head.weight"], "none of the 3 parameters"),
    ],
)
def test_what_would_have_no_effect_is_refused(provider, names, words):
    """Contract 45."""
    parameters = make_parameters()
    with pytest.raises(ConfigurationError, match=words):
        provider.build([(name, parameters[name]) for name in names])
