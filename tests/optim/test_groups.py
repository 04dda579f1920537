"""Groups by name pattern and the rule for weight decay."""

import pytest
import torch
from torch import nn

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.optim import AdamW


def parameters():
    shapes = {
        "embed.weight": (6, 2), "block.weight": (2, 2), "block.bias": (2,), "norm.weight": (2,), "head.weight": (6, 2), "head.bias": (6,),
    }  # fmt: skip
    return [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]


def table(provider):
    """name -> (group, lr, weight decay)."""
    return {
        name: (group["name"], group["lr"], group["weight_decay"])
        for group in provider.build(parameters()).param_groups
        for name in group["param_names"]
    }


def test_norms_and_biases_do_not_decay_by_default():
    assert table(AdamW(lr=1.0, weight_decay=0.1)) == {
        "embed.weight": ("default", 1.0, 0.1),
        "block.weight": ("default", 1.0, 0.1),
        "block.bias": ("no_decay", 1.0, 0.0),
        "norm.weight": ("no_decay", 1.0, 0.0),
        "head.weight": ("default", 1.0, 0.1),
        "head.bias": ("no_decay", 1.0, 0.0),
    }


def test_no_decay_patterns_add_to_the_rule_and_decay_vectors_lifts_it():
    exempt = table(AdamW(lr=1.0, weight_decay=0.1, no_decay=("embed.*",)))
    assert {name for name, (_, _, decay) in exempt.items() if decay == 0} == {"embed.weight", "block.bias", "norm.weight", "head.bias"}
    all_decay = table(AdamW(lr=1.0, weight_decay=0.1, decay_vectors=True))
    assert {decay for _, _, decay in all_decay.values()} == {0.1}


def test_groups_take_the_first_match_and_keep_the_rule_unless_they_set_a_decay():
    groups = [{"pattern": "head.bias", "weight_decay": 0.5}, {"pattern": "head.*", "lr": 2.0}, {"pattern": "block.*", "lr": 3.0}]
    result = table(AdamW(lr=1.0, weight_decay=0.1, groups=groups))
    assert result["head.bias"] == ("head.bias", 1.0, 0.5)
    assert result["head.weight"] == ("head.*", 2.0, 0.1)
    assert result["block.weight"] == ("block.*", 3.0, 0.1)
    assert result["block.bias"] == ("block.*/no_decay", 3.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"groups": [{"pattern": "haed.weight", "lr": 1.0}]}, r"groups\[0\].*'haed.weight' matches none.*'head.weight'"),
        ({"no_decay": ["*.gamma"]}, r"no_decay.*'\*.gamma' matches none"),
        ({"groups": [{"pattern": "*", "lr": 1.0}, {"pattern": "head.*", "lr": 2.0}]}, r"groups\[1\].*'head.\*'.*earlier group"),
    ],
)
def test_a_pattern_without_effect_is_an_error_that_names_it(settings, words):
    """Contract 45."""
    with pytest.raises(ConfigurationError, match=words):
        AdamW(**settings).build(parameters())
