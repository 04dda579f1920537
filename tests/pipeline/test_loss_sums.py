"""Sums of losses: terms that several stages on one rank add to, with one coefficient or several."""

import pytest
import torch

from trainer_kit.pipeline import LossSums
from trainer_kit.pipeline.loss_terms import Term


def term(name: str, value: float, weight: float, coefficient: float = 1.0) -> Term:
    return Term(name, torch.tensor(value), weight, weight * coefficient, coefficient)


def test_the_weight_of_a_microbatch_counts_once_for_each_term():
    """Two stages add 4 and 3 in a microbatch of weight 2, one adds 1 in another of weight 1: (2 * 7 + 1) / 3."""
    losses, weighed = LossSums(), set()
    losses.add([term("router", 4.0, 2)], weighed)
    losses.add([term("main", 1.0, 2), term("router", 3.0, 2)], weighed)
    losses.add([term("main", 1.0, 1), term("router", 1.0, 1)])
    assert weighed == {"main", "router"} and losses.weights == {"main": 3, "router": 3}
    assert {name: float(value) for name, value in losses.values("train").items()} == {
        "train/main": 1.0, "train/router": 5.0, "train/loss": 6.0,
    }  # fmt: skip


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_term_with_several_coefficients_is_the_sum_of_the_products(order):
    """As in one forward: 0.5 * 4 + 0.25 * 8 + 1 * 1 = 5, which is what is minimised."""
    losses, weighed = LossSums(), set()
    added = [term("router", 4.0, 2, 0.5), term("router", 8.0, 2, 0.25), term("router", 1.0, 2, 1.0)]
    for index in order:
        losses.add([added[index]], weighed)
    assert float(losses.sums["router"]) == 10.0 and losses.coefficients == {"router": 1.0} and losses.weights == {"router": 2}
    assert float(losses.values("val")["val/loss"]) == 5.0
