"""The three forms of a model provider, and what each refuses."""

import functools

import pytest
import torch
from torch import nn

from trainer_kit.exceptions import ConfigurationError, ModelError, StateError, UnsupportedError
from trainer_kit.model import ModelProvider, StageContext, StageInfo, as_model_provider, build_stage
from trainer_kit.weights.mapper import StateGroup


class Net(nn.Module):
    def __init__(self, stage: "StageInfo | None" = None, hidden: int = 3):
        super().__init__()
        self.got = stage
        self.fc = nn.Linear(2, hidden)


class Plain(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


def annotated(hidden: int = 4, *, info: StageInfo = StageInfo()):  # noqa: B008
    return Net(info, hidden)


def takes_one(s):
    return Net(s)


def by_keyword(*, stage):
    return Net(stage)


def named_second(hidden=5, stage=None):
    return Net(stage, hidden)


@pytest.mark.parametrize(
    "form", [takes_one, by_keyword, named_second, annotated, Net, functools.partial(Net, hidden=7), lambda stage: Net(stage)]
)
def test_callables_that_take_the_stage(form):
    stage = StageInfo(1, 3)
    ctx = StageContext(context=None, stage=stage)
    assert as_model_provider(form).initialize_model_stage(ctx).got == stage


@pytest.mark.parametrize("form", [Plain, lambda: Plain(), lambda width=2: nn.Linear(width, 2), functools.partial(nn.Linear, 2, 2)])
def test_callables_without_a_stage(form, context):
    assert isinstance(build_stage(form, context, seed=0), nn.Linear)
    with pytest.raises(UnsupportedError, match="parameter `stage`"):
        build_stage(form, context, StageInfo(0, 2), seed=0)


def test_an_instance_keeps_its_weights(context):
    model = nn.Linear(3, 2)
    before = model.weight.clone()
    assert build_stage(model, context, seed=0) is model
    assert torch.equal(model.weight, before)


def test_an_instance_cannot_be_cut(context):
    with pytest.raises(UnsupportedError, match="lambda stage"):
        build_stage(nn.Linear(1, 1), context, StageInfo(0, 2), seed=0)


@pytest.mark.parametrize("value", [None, 3, "model", [nn.Linear(1, 1)]])
def test_anything_else_is_refused(value):
    with pytest.raises(ConfigurationError, match=r"model_provider= is a .*expected an nn\.Module"):
        as_model_provider(value)


def test_a_provider_class_is_refused():
    with pytest.raises(ConfigurationError, match="instance"):
        as_model_provider(ModelProvider)


def test_surplus_arguments_are_named():
    with pytest.raises(ConfigurationError, match=r"in_features, out_features.*lambda"):
        as_model_provider(nn.Linear)


@pytest.mark.parametrize("form", [lambda: None, lambda: "model", lambda stage: nn.Linear])
def test_a_callable_must_return_a_module(form, context):
    with pytest.raises(ModelError, match=r"expected an nn\.Module"):
        build_stage(form, context, seed=0)


def test_a_stage_must_be_one_of_them():
    assert StageInfo().is_first
    assert StageInfo().is_last
    assert not StageInfo(0, 2).is_last
    with pytest.raises(ConfigurationError, match="index=2"):
        StageInfo(2, 2)


def test_default_mappers_hold_the_state_names_once(context):
    """Contract 12: a tied weight has one canonical name, the first."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 2)
            self.head = nn.Linear(2, 5)
            self.head.weight = self.embedding.weight
            self.register_buffer("kept", torch.zeros(1))
            self.register_buffer("table", torch.zeros(1), persistent=False)

    provider = as_model_provider(Tied())
    ctx = StageContext(context, StageInfo(), Tied())
    names = [StateGroup(frozenset({n}), frozenset({n})) for n in ("embedding.weight", "head.bias", "kept")]
    for mapper in (provider.load_mapper(ctx), provider.export_mapper(ctx)):
        assert sorted(mapper.groups(), key=str) == sorted(names, key=str)


def test_own_provider_is_built_on_meta_and_parallelized_with_its_module(context):
    seen = {}

    class Provider(ModelProvider):
        def initialize_model_stage(self, ctx):
            model = nn.Linear(2, 2)
            seen["meta"], seen["stage"] = model.weight.is_meta, ctx.stage
            return model

        def parallelize_model_stage(self, ctx):
            seen["module"] = ctx.module

    model = build_stage(Provider(), context, seed=0)
    assert seen == {"meta": True, "stage": StageInfo(0, 1), "module": model}
    assert not model.weight.is_meta


def test_mesh_is_that_of_the_context(context):
    """Contract 10: one process has no mesh."""
    with pytest.raises(StateError, match="dense"):
        StageContext(context, StageInfo()).mesh("dense")
