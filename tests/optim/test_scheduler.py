"""Schedulers during a run, across a resume, with another length; and torch's behind the same methods."""

import json
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from trainer_kit.checkpoint import flatten_state, unflatten_state
from trainer_kit.exceptions import CheckpointError, ConfigurationError, UnsupportedError
from trainer_kit.optim import (
    LRSchedulerProvider,
    Piecewise,
    as_lr_scheduler_provider,
    as_optimizer_provider,
    build_optimizer,
    group_values,
    load_group_values,
)


def make_optimizer(*lrs):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs or (1.0,)], lr=1.0)


def run(optimizer, scheduler, num):
    """The rates of the updates, one list per update."""
    used = []
    for _ in range(num):
        used.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return used


def through_json(state):
    """As a checkpoint keeps it."""
    tensors, values = flatten_state(state)
    return unflatten_state({key: value.clone() for key, value in tensors.items()}, json.loads(json.dumps(values)))


class Halving:
    """A callable with a state of its own."""

    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return 0.5**step


PROVIDERS = {
    "piecewise": Piecewise(start=1.0).cosine(0.0, rest=True),
    "cosine": lambda optimizer, total_steps: lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps),
    "one-cycle": lambda optimizer, total_steps: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=total_steps + 1, cycle_momentum=False),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[3]
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, 2), lr_scheduler.StepLR(optimizer, 3)]
    ),
    "multi-step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 5, 7], 0.3),
    "sequential multi-step": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1, 2), lr_scheduler.MultiStepLR(optimizer, [1, 4], 0.3)], milestones=[3]
    ),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "lambda object": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Halving()),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9 + step / 100),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2, 0.01),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, 3, mode="triangular2", cycle_momentum=False),
}


def build(name, total_steps, *lrs):
    optimizer = make_optimizer(*lrs)
    return optimizer, as_lr_scheduler_provider(PROVIDERS[name]).build(optimizer, total_steps)


def test_warm_up_counts_updates_and_scales_every_group():
    """B125, B128: one call per executed update."""
    optimizer = make_optimizer(1.0, 0.5)
    scheduler = Piecewise().linear(1.0, steps=4).build(optimizer, None)
    assert run(optimizer, scheduler, 5) == [[0.25, 0.125], [0.5, 0.25], [0.75, 0.375], [1.0, 0.5], [1.0, 0.5]]
    assert scheduler.last_epoch == 5
    assert scheduler.get_last_lr() == [1.0, 0.5]


def test_a_skipped_update_leaves_the_schedule_where_it_is():
    """B124: without a call of step() the next update has the same rate."""
    optimizer = make_optimizer()
    scheduler = Piecewise().linear(1.0, steps=4).build(optimizer, None)
    assert optimizer.param_groups[0]["lr"] == 0.25  # skipped: no update, no step()
    assert run(optimizer, scheduler, 2) == [[0.25], [0.5]]
    assert scheduler.last_epoch == 2


@pytest.mark.parametrize("name", PROVIDERS)
def test_rates_after_a_resume_are_exactly_those_of_the_straight_run(name):
    """B17: 10 straight equal 4 + 6, and the first resumed update uses entry 5."""
    straight = run(*build(name, 10, 1.0, 0.3), 10)
    optimizer, scheduler = build(name, 10, 1.0, 0.3)
    first = run(optimizer, scheduler, 4)
    state = through_json(scheduler.state_dict())
    optimizer, scheduler = build(name, 10, 1.0, 0.3)
    scheduler.load_state_dict(state)
    assert scheduler.last_epoch == 4
    assert first + run(optimizer, scheduler, 6) == straight


@pytest.mark.parametrize("name", PROVIDERS)
def test_another_length_rebuilds_the_schedule_and_puts_it_at_the_restored_step(name):
    """B28: the settings of now decide; the rates are those that a run of the new length would have had from here on."""
    expected = run(*build(name, 20), 20)
    optimizer, scheduler = build(name, 10)
    run(optimizer, scheduler, 5)
    state = through_json(scheduler.state_dict())
    optimizer, scheduler = build(name, 20)
    scheduler.load_state_dict(state)
    assert run(optimizer, scheduler, 15) == expected[5:]
    assert scheduler.last_epoch == 20


def test_linear_decay_extended_from_10_to_20_by_its_formula():
    """B28."""
    schedule = Piecewise(start=1.0).linear(0.0, rest=True)
    optimizer = make_optimizer()
    scheduler = schedule.build(optimizer, 10)
    run(optimizer, scheduler, 5)
    again = make_optimizer()
    resumed = schedule.build(again, 20)
    resumed.load_state_dict(scheduler.state_dict())
    rates = [lr for (lr,) in run(again, resumed, 16)]
    assert rates == pytest.approx([1 - k / 20 for k in range(6, 21)] + [0.0])
    assert min(rates) >= 0


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_second_schedule_on_the_same_optimizer_starts_from_the_same_base(name):
    expected = run(*build(name, 20), 20)
    optimizer, scheduler = build(name, 10)
    run(optimizer, scheduler, 5)
    longer = as_lr_scheduler_provider(PROVIDERS[name]).build(optimizer, 20)
    longer.load_state_dict(through_json(scheduler.state_dict()))
    assert run(optimizer, longer, 15) == expected[5:]


def test_other_base_rates_in_the_settings_are_used_and_reported():
    """Contract 45."""
    optimizer = make_optimizer(2.0)
    scheduler = Piecewise().linear(1.0, steps=4).build(optimizer, None)
    with pytest.warns(UserWarning, match=r"\[1.0\].*\[2.0\]"):
        scheduler.load_state_dict({"last_epoch": 1, "base_lrs": [1.0]})
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("name", [name for name in PROVIDERS if name != "piecewise"])
def test_other_base_rates_are_used_under_torch_schedulers_too(name):
    """Contract 45: from the resume on, the rates are those of a run that had the new base rate from its start."""
    expected = run(*build(name, 10, 0.5), 10)
    optimizer, scheduler = build(name, 10, 1.0)
    run(optimizer, scheduler, 4)
    state = through_json(scheduler.state_dict())
    optimizer, scheduler = build(name, 10, 0.5)
    with pytest.warns(UserWarning, match=r"\[1.0\].*\[0.5\]"):
        scheduler.load_state_dict(state)
    assert run(optimizer, scheduler, 6) == expected[4:]


def test_other_settings_of_a_torch_scheduler_are_used_and_reported():
    """Contract 45: its state would bring the old milestones and factor back."""

    def make(*arguments):
        optimizer = make_optimizer()
        return optimizer, as_lr_scheduler_provider(lambda o: lr_scheduler.MultiStepLR(o, *arguments)).build(optimizer, 10)

    optimizer, scheduler = make([2, 6], 0.1)
    run(optimizer, scheduler, 4)
    state = through_json(scheduler.state_dict())
    optimizer, scheduler = make([3, 5], 0.5)
    with pytest.warns(UserWarning, match=r"\(MultiStepLR\) has other settings"):
        scheduler.load_state_dict(state)
    assert run(optimizer, scheduler, 3) == [[0.5], [0.25], [0.25]]


def test_momenta_of_one_cycle_are_those_of_the_straight_run_after_a_resume():
    """It moves the momentum too, which the groups' values bring back; and a new maximum is used."""

    def make(max_lr):
        provider = as_optimizer_provider(lambda given: torch.optim.AdamW(given, lr=1.0))
        optimizer = build_optimizer(provider, [("w", nn.Parameter(torch.ones(1)))])
        return optimizer, as_lr_scheduler_provider(lambda o: lr_scheduler.OneCycleLR(o, max_lr, total_steps=11)).build(optimizer, 10)

    def values(optimizer, scheduler, num):
        used = []
        for _ in range(num):
            used.append((optimizer.param_groups[0]["lr"], *optimizer.param_groups[0]["betas"]))
            run(optimizer, scheduler, 1)
        return used

    straight, other = values(*make(0.5), 10), values(*make(0.8), 10)
    optimizer, scheduler = make(0.5)
    values(optimizer, scheduler, 4)
    groups, state = through_json(group_values(optimizer)), through_json(scheduler.state_dict())
    for max_lr, expected, told in ((0.5, straight, nullcontext()), (0.8, other, pytest.warns(UserWarning, match="OneCycleLR"))):
        optimizer, scheduler = make(max_lr)
        assert load_group_values(optimizer, groups) == []
        with told:
            scheduler.load_state_dict(state)
        assert values(optimizer, scheduler, 6) == expected[4:]


def test_a_rate_set_by_a_callback_survives_a_resume():
    """StepLR goes on from the rate as it is, so a replay would lose it."""
    provider = as_lr_scheduler_provider(lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5))
    optimizer = make_optimizer()
    scheduler = provider.build(optimizer, None)
    run(optimizer, scheduler, 1)
    optimizer.param_groups[0]["lr"] = 8.0
    state = through_json(scheduler.state_dict())
    optimizer = make_optimizer()
    scheduler = provider.build(optimizer, None)
    scheduler.load_state_dict(state)
    assert run(optimizer, scheduler, 4) == [[8.0], [4.0], [4.0], [2.0]]


def test_a_saved_state_does_not_change_with_the_steps_after_it():
    optimizer, scheduler = build("multi-step", 10)
    state = scheduler.state_dict()
    kept = through_json(state)
    run(optimizer, scheduler, 5)
    assert state == kept and state["scheduler"]["milestones"] == {2: 1, 5: 2, 7: 1}


def test_a_state_with_a_learning_rate_that_is_a_tensor():
    def make():
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=torch.tensor(2.0), fused=True)
        provider = as_lr_scheduler_provider(lambda o: lr_scheduler.MultiStepLR(o, [2, 4], 0.5))
        return optimizer, provider.build(optimizer, None)

    optimizer, scheduler = make()
    run(optimizer, scheduler, 3)
    state = through_json(scheduler.state_dict())
    optimizer, scheduler = make()
    scheduler.load_state_dict(state)
    assert run(optimizer, scheduler, 3) == [[1.0], [0.5], [0.5]]


@pytest.mark.parametrize("position", [None, -1, "3", True])
def test_a_broken_state_is_an_error(position):
    for provider in (Piecewise().linear(1.0, steps=4), as_lr_scheduler_provider(lambda optimizer: lr_scheduler.StepLR(optimizer, 1))):
        with pytest.raises(CheckpointError, match="last_epoch"):
            provider.build(make_optimizer(), None).load_state_dict({"last_epoch": position, "base_lrs": [1.0]})


def test_a_learning_rate_that_is_a_tensor_is_filled():
    parameter = nn.Parameter(torch.ones(1))
    lr = torch.tensor(2.0)
    optimizer = torch.optim.AdamW([parameter], lr=lr, fused=True)
    scheduler = Piecewise().linear(1.0, steps=4).build(optimizer, None)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 1.0
    assert scheduler.get_last_lr() == [1.0]


def test_what_counts_as_a_provider():
    assert as_lr_scheduler_provider(None) is None
    schedule = Piecewise().linear(1.0, steps=1)
    assert as_lr_scheduler_provider(schedule) is schedule

    class Own(LRSchedulerProvider):
        def build(self, optimizer, total_steps):
            return schedule.build(optimizer, total_steps)

    own = Own()
    assert as_lr_scheduler_provider(own) is own
    seen = []
    as_lr_scheduler_provider(lambda o, total_steps=None: seen.append(total_steps) or lr_scheduler.StepLR(o, 1)).build(make_optimizer(), 7)
    as_lr_scheduler_provider(lambda o, n: seen.append(n) or lr_scheduler.StepLR(o, 1)).build(make_optimizer(), 8)
    as_lr_scheduler_provider(lambda o, gamma=0.5: seen.append(gamma) or lr_scheduler.StepLR(o, 1)).build(make_optimizer(), 9)
    assert seen == [7, 8, 0.5]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: as_lr_scheduler_provider("cosine"), ConfigurationError, "'cosine', expected a schedule"),
        (lambda: as_lr_scheduler_provider(lr_scheduler.StepLR(make_optimizer(), 1)), ConfigurationError, "StepLR that exists already"),
        (lambda: as_lr_scheduler_provider(lambda a, b, c: None), ConfigurationError, r"\(optimizer, total_steps\)"),
        (lambda: as_lr_scheduler_provider(lambda o: 3).build(make_optimizer(), 1), ConfigurationError, "gave a int without step"),
        (lambda: as_lr_scheduler_provider(lr_scheduler.ReduceLROnPlateau).build(make_optimizer(), 1), UnsupportedError, "needs a metric"),
        (lambda: as_lr_scheduler_provider(lr_scheduler.ReduceLROnPlateau(make_optimizer())), UnsupportedError, "needs a metric"),
    ],
)
def test_what_is_refused_and_why(make, error, words):
    with pytest.raises(error, match=words):
        make()
