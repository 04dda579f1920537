"""Providers against torch's own optimizers, and what is refused in place of one."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.optim import SGD, Adam, AdamW, Muon, OptimizerProvider, StochasticAdamW, as_optimizer_provider, build_optimizer


def make_parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"layer.weight": (4, 3), "layer.bias": (4,), "norm.weight": (4,), "head.weight": (5, 4)}
    return [(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype))) for name, shape in shapes.items()]


def train(optimizer: torch.optim.Optimizer, parameters: list[tuple[str, nn.Parameter]], steps: int, first: int = 0) -> None:
    """Steps with gradients that depend on the step alone."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 + step)
        for _, parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def split(parameters: list[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict]:
    """The default rule by hand."""
    return [
        {"params": [p for _, p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for _, p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("kernel", ["auto", "fused", "foreach", "loop"])
@pytest.mark.parametrize(
    ("provider", "reference", "values"),
    [
        (AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
        (Adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
        (SGD, torch.optim.SGD, {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True}),
    ],
)
def test_every_kernel_gives_what_the_loop_of_torch_gives(provider, reference, values, kernel):
    ours, plain = make_parameters(), make_parameters()
    train(build_optimizer(provider(**values, kernel=kernel), ours), ours, 5)
    train(reference(split(plain, 0.1), **values, foreach=False, fused=False), plain, 5)
    for (name, a), (_, b) in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)


def test_the_fused_kernel_is_chosen_on_cpu_and_foreach_without_one():
    optimizer = build_optimizer(AdamW(), make_parameters())
    assert all(group["fused"] for group in optimizer.param_groups)
    complex_parameter = [("c", nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)))]
    group = AdamW().build(complex_parameter).param_groups[0]
    assert (group["fused"], group["foreach"]) == (False, True)
    with pytest.raises(ConfigurationError, match=r"kernel='fused'.*'c' is torch.complex64"):
        AdamW(kernel="fused").build(complex_parameter)


def test_bf16_parameters_are_warned_about_once_by_name_of_the_remedy():
    """B108."""
    for provider in (AdamW(), Adam()):
        with pytest.warns(UserWarning, match="StochasticAdamW") as caught:
            provider.build(make_parameters(dtype=torch.bfloat16))
        assert len(caught) == 1
    StochasticAdamW().build(make_parameters(dtype=torch.bfloat16))  # no warning: those are errors here


def test_fp16_parameters_are_refused():
    for provider in (AdamW(), Adam(), SGD(), Muon(), StochasticAdamW()):
        with pytest.raises(ConfigurationError, match=r"layer.weight.*float16"):
            provider.build(make_parameters(dtype=torch.float16))


def test_a_callable_gets_the_list_of_parameters_and_the_result_is_used():
    parameters = make_parameters()
    optimizer = build_optimizer(as_optimizer_provider(lambda given: torch.optim.Adagrad(given, lr=0.5)), parameters)
    assert type(optimizer) is torch.optim.Adagrad
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for _, p in parameters]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), "exists already.*lambda parameters: torch.optim.SGD"),
        (AdamW, r"class AdamW.*AdamW\(\)"),
        ("adamw", "'adamw', expected a provider"),
        (None, "None, expected a provider"),
    ],
)
def test_what_is_no_provider_is_refused_with_the_right_form(value, words):
    with pytest.raises(ConfigurationError, match=words):
        as_optimizer_provider(value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda given: torch.optim.SGD(given[1:], lr=1.0), "lacks 'layer.weight'"),
        (lambda given: torch.optim.SGD([*given, nn.Parameter(torch.ones(7))], lr=1.0), r"shape \(7,\).*not given"),
        (lambda given: [given], "gave a list"),
    ],
)
def test_a_callable_must_give_an_optimizer_of_exactly_these_parameters(function, words):
    with pytest.raises(ConfigurationError, match=words):
        as_optimizer_provider(function).build(make_parameters())


def test_own_providers_are_checked_too_and_no_parameter_is_an_error():
    class Forgetful(OptimizerProvider):
        def build(self, parameters):
            return torch.optim.SGD([parameter for _, parameter in parameters[:-1]], lr=1.0)

    with pytest.raises(ConfigurationError, match=r"Forgetful.*lacks 'head.weight'"):
        build_optimizer(Forgetful(), make_parameters())
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        build_optimizer(AdamW(), [])


def test_the_import_is_light():
    """Contract 43."""
    heavy = ["torch.distributed.checkpoint", "torch.distributed.tensor", "tensorboard", "matplotlib"]
    code = f"import torch, sys; a = set(sys.modules); import trainer_kit.optim; print([m for m in {heavy} if m in set(sys.modules) - a])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
