"""Settings from JSON: the right provider, and errors with the path and the nearest name."""

import json

import pydantic
import pytest

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.optim import SGD, Adam, AdamW, Muon, OptimizerConfig, Piecewise, StochasticAdamW, parse_optimizer


@pytest.mark.parametrize(
    "provider",
    [
        AdamW(lr=0.1, groups=[{"pattern": "*.weight", "lr": 2.0}]),
        Adam(eps=1e-6),
        SGD(momentum=0.9, nesterov=True),
        Muon(rest=StochasticAdamW(lr=0.5), rest_patterns=["a*"]),
        StochasticAdamW(state_dtype="bf16", seed=3),
    ],
)
def test_settings_survive_json_and_the_union_chooses_by_name(provider):
    data = json.loads(provider.model_dump_json())
    assert parse_optimizer(data) == provider
    assert pydantic.TypeAdapter(OptimizerConfig).validate_python(data) == provider
    assert data == provider.hparams()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "adamw", "lerning_rate": 1}, ["optim.lerning_rate", "'lr'", "learning_rate"]),
        ({"name": "adamw", "weight_decey": 1}, ["optim.weight_decey", "did you mean 'weight_decay'?"]),
        ({"name": "adamw", "groups": [{"pattern": "a", "weightdecay": 1}]}, ["optim.groups.0.weightdecay", "did you mean 'weight_decay'?"]),
        ({"name": "muon", "rest": {"name": "adamw", "epss": 1}}, ["optim.rest.epss", "did you mean 'eps'?"]),
        ({"name": "muon", "rest": {"lr": 1}}, ["optim.rest", "'name'"]),
        ({"name": "adamx"}, ["optim.name", "'adamx'", "did you mean 'adam"]),
        ({"lr": 1}, ["optim.name", "no 'name'", "adamw", "stochastic_adamw"]),
        ({"name": "adamw", "lr": -1}, ["optim.lr", "greater than or equal to 0", "-1"]),
        ({"name": "adamw", "lr": float("nan")}, ["optim.lr", "finite"]),
        ({"name": "adamw", "lr": "fast"}, ["optim.lr", "'fast'"]),
        ({"name": "adam", "betas": [0.9, 1.0]}, ["betas=(0.9, 1.0)", "[0, 1)"]),
        ({"name": "sgd", "nesterov": True}, ["nesterov=True needs momentum"]),
        ({"name": "sgd", "dampening": 0.1}, ["dampening=0.1 has no effect without momentum"]),
        ({"name": "adam", "no_decay": ["*.bias"]}, ["no_decay= has no effect with weight_decay=0"]),
        ({"name": "adamw", "groups": [{"pattern": "a*"}]}, ["optim.groups.0", "'a*' sets nothing"]),
        ({"name": "adamw", "kernel": "fast"}, ["optim.kernel", "'fused'"]),
    ],
)
def test_errors_name_the_path_and_the_nearest_setting(settings, words):
    """B141."""
    with pytest.raises(ConfigurationError) as caught:
        parse_optimizer(settings, "optim")
    for word in words:
        assert word in str(caught.value)


def test_the_constructor_gives_the_same_errors_and_settings_are_frozen():
    with pytest.raises(ConfigurationError, match=r"AdamW.lerning_rate.*'lr'"):
        AdamW(lerning_rate=1)
    with pytest.raises(ConfigurationError, match="expected settings"):
        parse_optimizer("adamw")
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        AdamW().lr = 2.0


def test_an_outer_model_reports_the_same_text():
    """B141."""

    class Config(pydantic.BaseModel):
        optim: OptimizerConfig
        schedule: Piecewise

    with pytest.raises(pydantic.ValidationError, match=r"AdamW.lerning_rate: unknown setting.*'lr'"):
        Config.model_validate({"optim": {"name": "adamw", "lerning_rate": 1}, "schedule": {}})
