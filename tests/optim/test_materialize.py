"""State before the first step: there for every parameter, and nothing else changed."""

import pytest
import torch
from torch import nn

from trainer_kit.exceptions import UnsupportedError
from trainer_kit.optim import (
    SGD,
    Adam,
    AdamW,
    Muon,
    StochasticAdamW,
    as_optimizer_provider,
    build_optimizer,
    materialize,
    materialize_state,
)

PROVIDERS = {
    "adamw": AdamW(lr=0.1, weight_decay=0.5),
    "adamw-loop": AdamW(lr=0.1, eps=0.0, kernel="loop"),
    "adam": Adam(lr=0.1, weight_decay=0.5, amsgrad=True),
    "sgd": SGD(lr=0.1, momentum=0.9, weight_decay=0.5),
    "sgd-plain": SGD(lr=0.1),
    "muon": Muon(lr=0.1),
    "stochastic": StochasticAdamW(lr=0.1),
    **{
        name: as_optimizer_provider(lambda given, name=name: getattr(torch.optim, name)(given, lr=0.1))
        for name in ("NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta")
    },
    "AdamW-tensor-lr": as_optimizer_provider(lambda given: torch.optim.AdamW(given, lr=torch.tensor(0.1), fused=True)),
}


def make_parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (4, 3), "a.bias": (4,), "embed.weight": (5, 2)}
    return [(name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in shapes.items()]


def step(optimizer, parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("portion_bytes", [1, 2**20])
@pytest.mark.parametrize("name", PROVIDERS)
def test_the_steps_after_it_are_bitwise_those_without_it(name, portion_bytes, monkeypatch):
    """Contract 27: nothing that the state holds before the first step differs from a fresh one, counts included."""
    monkeypatch.setattr(materialize, "PORTION_BYTES", portion_bytes)
    plain, ours = make_parameters(), make_parameters()
    one, two = build_optimizer(PROVIDERS[name], plain), build_optimizer(PROVIDERS[name], ours)
    materialize_state(two)
    for seed in range(3):
        step(one, plain, seed)
        step(two, ours, seed)
    for (label, a), (_, b) in zip(plain, ours, strict=True):
        assert torch.equal(a, b), label
        assert set(one.state[a]) == set(two.state[b])


@pytest.mark.parametrize("name", PROVIDERS)
def test_parameters_gradients_groups_and_hooks_are_untouched(name):
    parameters = make_parameters()
    optimizer = build_optimizer(PROVIDERS[name], parameters)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    parameters[0][1].grad = gradient = torch.full((4, 3), 7.0)
    before = [parameter.detach().clone() for _, parameter in parameters]
    groups = [dict(group) for group in optimizer.param_groups]
    materialize_state(optimizer)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, parameters, strict=True))
    assert parameters[0][1].grad is gradient
    assert torch.equal(gradient, torch.full((4, 3), 7.0))
    assert all(parameter.grad is None for _, parameter in parameters[1:])
    for was, group in zip(groups, optimizer.param_groups, strict=True):
        assert all(group[key] is value for key, value in was.items())
    assert calls == []
    assert name == "sgd-plain" or all(optimizer.state[parameter] for _, parameter in parameters)


def test_state_that_exists_stays_and_only_the_missing_is_made():
    parameters = make_parameters()
    optimizer = build_optimizer(AdamW(), parameters)
    step(optimizer, parameters[:1], 0)
    state = {key: value.clone() for key, value in optimizer.state[parameters[0][1]].items()}
    materialize_state(optimizer)
    assert all(torch.equal(value, optimizer.state[parameters[0][1]][key]) for key, value in state.items())
    assert optimizer.state[parameters[2][1]]["step"].item() == 0


def test_memory_is_that_of_before_and_parameters_without_data_are_left_out():
    """Whoever shares memory with a parameter still does; what the meta device stands for has its state on another rank."""
    here, elsewhere = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))
    no_memory = nn.Parameter(torch.zeros(()).expand(2, 3))
    optimizer = torch.optim.Adam([here, elsewhere, no_memory])
    memory = here.data_ptr()
    materialize_state(optimizer)
    assert here.data_ptr() == memory and elsewhere not in optimizer.state
    assert no_memory.stride() == (0, 0) and optimizer.state[no_memory]["exp_avg"].is_contiguous()


def test_a_schedule_of_torch_does_not_take_it_for_an_update():
    """Torch counts updates to warn about a wrong order; here only a real one counts."""
    parameters = make_parameters()
    optimizer = build_optimizer(SGD(momentum=0.9), parameters)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    materialize_state(optimizer)
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        scheduler.step()


def test_an_optimizer_that_needs_a_closure_is_refused():
    parameters = make_parameters()
    with pytest.raises(UnsupportedError, match=r"LBFGS.*closure"):
        materialize_state(torch.optim.LBFGS([parameter for _, parameter in parameters]))
