"""The factors of `Piecewise` against closed forms written out, and what is refused."""

import builtins
import json
import math

import pytest
import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.optim import Piecewise


def factors(schedule, num, total_steps=None):
    return [schedule.factor(index, total_steps) for index in range(num)]


def test_a_warm_up_never_makes_an_update_with_rate_zero():
    """B125: one unit, the optimizer step."""
    assert factors(Piecewise().linear(1.0, steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_rest_ends_exactly_in_the_last_step():
    schedule = Piecewise().linear(1.0, steps=2).cosine(0.1, rest=True)
    got = factors(schedule, 12, 10)
    expected = [0.5, 1.0] + [0.1 + 0.9 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(1, 9)]
    assert got[:10] == pytest.approx(expected, rel=1e-12)
    assert got[9:] == [0.1, 0.1, 0.1]


def test_every_shape_against_its_formula():
    start = Piecewise(start=1.0)
    assert factors(start.polynomial(0.2, power=2.0, steps=4), 4) == pytest.approx([0.2 + 0.8 * (1 - k / 4) ** 2 for k in (1, 2, 3, 4)])
    assert factors(start.exponential(0.01, steps=4), 4) == pytest.approx([10**-0.5, 10**-1, 10**-1.5, 10**-2])
    assert factors(start.constant(steps=2).linear(0.0, steps=2), 5) == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert factors(Piecewise().constant(0.5, steps=2), 3) == [0.5, 0.5, 0.5]
    assert factors(Piecewise().linear(1.0, steps=2).constant(steps=2).linear(0.5, steps=1), 5) == [0.5, 1.0, 1.0, 1.0, 0.5]


def test_percentages_and_a_rest_in_the_middle():
    schedule = Piecewise().linear(1.0, percent=10).constant(rest=True).linear(0.0, percent=20)
    assert factors(schedule, 20, 20) == pytest.approx([0.5] + [1.0] * 15 + [0.75, 0.5, 0.25, 0.0])
    thirds = Piecewise(start=1.0).linear(0.9, percent=33.4).linear(0.8, percent=33.3).linear(0.7, percent=33.3)
    assert factors(thirds, 10, 10)[-1] == 0.7
    assert schedule.factor(0, 5) == 1.0  # a tenth of 5 steps is no step: it starts at the top


def test_a_cosine_equals_that_of_torch():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0.1)
    expected = []
    for _ in range(10):
        optimizer.step()
        reference.step()
        expected.append(optimizer.param_groups[0]["lr"])
    assert factors(Piecewise(start=1.0).cosine(0.1, steps=10), 10) == pytest.approx(expected, rel=1e-9)


def test_schedules_are_values():
    base = Piecewise().linear(1.0, steps=4)
    longer = base.polynomial(0.5, power=2, percent=50).cosine(0.1, rest=True)
    assert len(base.segments) == 1
    assert base == Piecewise().linear(1.0, steps=4)
    assert base != longer
    assert repr(longer) == str(longer) == "Piecewise().linear(1, steps=4).polynomial(0.5, percent=50, power=2).cosine(0.1, rest=True)"
    assert eval(repr(longer)) == longer
    assert Piecewise.model_validate(json.loads(longer.model_dump_json())) == longer
    data = {"name": "piecewise", "segments": [{"kind": "linear", "to": 1.0, "steps": 4}]}
    assert Piecewise.model_validate(data) == base
    assert base.hparams()["segments"] == [{"kind": "linear", "to": 1.0, "steps": 4, "rest": False}]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Piecewise().linear(1.0, rest=True).cosine(0.1, rest=True), r"rest=True.*segments \[0, 1\]"),
        (lambda: Piecewise().linear(1.0), "one of steps=, percent= and rest=True.*none"),
        (lambda: Piecewise().linear(1.0, steps=3, rest=True), "found steps=3 and rest=True"),
        (lambda: Piecewise().linear(1.0, steps=0), "steps.*greater than or equal to 1"),
        (lambda: Piecewise().linear(1.0, percent=120), "percent.*less than or equal to 100"),
        (lambda: Piecewise().linear(-1.0, steps=1), "to.*greater than or equal to 0"),
        (lambda: Piecewise().exponential(0.1, steps=3), "exponential from 0 to 0.1"),
        (lambda: Piecewise().constant(steps=3), r"constant\(1.0"),
        (lambda: Piecewise(strat=1.0), "'strat', did you mean 'start'"),
        (lambda: Piecewise(segments=[{"kind": "linear", "to": 1, "stpes": 3}]), r"segments.0.stpes.*did you mean 'steps'"),
        (lambda: Piecewise(segments=[{"kind": "linear", "to": 1, "steps": 3, "power": 2}]), "power=2.0 has no effect"),
        (lambda: Piecewise(segments=[{"kind": "polynomial", "to": 1, "steps": 3}]), "needs power="),
        (lambda: Piecewise().factor(0), "has no segment"),
        (lambda: Piecewise().linear(1.0, steps=1).factor(-1), "update_index=-1"),
        (lambda: Piecewise().linear(1.0, rest=True).factor(0), "rest=True, which needs.*total_steps="),
        (lambda: Piecewise().linear(1.0, percent=5).factor(0), "percent=5, which needs.*total_steps="),
        (lambda: Piecewise().linear(1.0, steps=11).factor(0, 10), "take 11 steps, but total_steps=10"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_what_to_change(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_plot_draws_the_factor_of_every_update():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    figure = Piecewise().linear(1.0, steps=4).linear(0.0, rest=True).plot(8)
    line = figure.axes[0].lines[0]
    assert line.get_xdata().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert line.get_ydata().tolist() == [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_plot_without_matplotlib_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigurationError, match=r'pip install "trainer_kit\[plot\]"'):
        Piecewise().linear(1.0, steps=4).plot()
