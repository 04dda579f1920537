"""How a model is called: the stage form, and the ordinary way."""

import pytest
import torch
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.model import ModelCaller
from trainer_kit.task import Args


class Echo(nn.Module):
    def forward(self, *args, **kwargs):
        return args, kwargs


class Staged(nn.Module):
    def forward(self, inputs, shared):
        return inputs, shared


class WithSpec(nn.Module):
    def forward(self, x, positions):
        return x, positions

    def stage_transfer_spec(self, inputs, boundary):
        return inputs


class OtherOrder(nn.Module):
    def forward(self, shared, inputs):
        return shared, inputs


x, y = torch.zeros(1), torch.ones(1)


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        (x, (x,), {}),
        ((x, y), (x, y), {}),
        ({"a": x, "b": y}, (), {"a": x, "b": y}),
        (Args(x, b=y), (x,), {"b": y}),
        ([x, y], ([x, y],), {}),
        (None, (None,), {}),
    ],
    ids=["tensor", "tuple", "mapping", "Args", "list", "None"],
)
def test_the_ordinary_way(inputs, args, kwargs):
    assert ModelCaller(Echo())(inputs) == (args, kwargs)


def test_a_packed_sequence_is_one_argument():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.zeros(1, 2)])
    ((given,), named) = ModelCaller(Echo())(packed)
    assert given is packed and named == {}
    assert ModelCaller(nn.GRU(2, 4))(packed)[1].shape == (1, 2, 4)


@pytest.mark.parametrize("kind", [Staged, WithSpec])
def test_the_stage_form_passes_both_as_they_are(kind):
    inputs = {"a": x}
    assert ModelCaller(kind())(inputs, {"p": y}) == (inputs, {"p": y})
    assert ModelCaller(kind())(inputs) == (inputs, None)


@pytest.mark.parametrize("kind", [Echo, OtherOrder])
def test_shared_is_an_error_for_ordinary_models(kind):
    with pytest.raises(ModelError, match=r"shared=.*inputs="):
        ModelCaller(kind())(x, shared=y)


def test_a_compiled_model_is_called_in_the_form_of_the_original():
    assert ModelCaller(torch.compile(Staged(), backend="eager")).stage_form
    assert not ModelCaller(torch.compile(nn.Linear(1, 1), backend="eager")).stage_form


def test_a_wrapped_forward_keeps_the_form():
    model = Staged()
    forward = model.forward
    model.forward = lambda *args: forward(*args)
    assert ModelCaller(model)(x, y) == (x, y)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
def test_a_scripted_model_is_called_the_ordinary_way():
    assert not ModelCaller(torch.jit.script(nn.Linear(1, 1))).stage_form
