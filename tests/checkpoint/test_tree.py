"""A nested state survives being taken apart, written as strict JSON, and put together."""

from __future__ import annotations

import datetime
import enum
import json
import math
from collections import OrderedDict

import pytest
import torch

from trainer_kit.checkpoint import flatten_state, unflatten_state
from trainer_kit.checkpoint.tree import merge_values
from trainer_kit.exceptions import CheckpointError


def through_json(nested):
    tensors, values = flatten_state(nested)
    return unflatten_state(tensors, json.loads(json.dumps(values, allow_nan=False)))


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -5, 2**63, -(2**5000), 10**6000, 0.1, -0.0, 5e-324, math.inf, -math.inf, "", "ä\ud800\n", "$tensor",
     [], {}, (), [1, (2, [3, ()])], {"a": {}, "b": (None,)}, {1: "x", -2: "y"}, {1: "int", "1": "str"}, {"$tuple": [1]}, {"$x": 1, "y": 2}],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int) else str(value.bit_length() if isinstance(value, int) else value),
)  # fmt: skip
def test_plain_values_come_back_with_their_types(value):
    """B26."""
    found = through_json({"part": value})["part"]
    assert found == value
    assert repr(found) == repr(value) if not isinstance(value, int) else type(found) is type(value)


def test_nan_comes_back():
    assert math.isnan(through_json([math.nan])[0])


def test_tensors_are_keyed_by_their_path_and_not_copied():
    weight, second = torch.ones(2), torch.zeros(3, dtype=torch.int64)
    tensors, values = flatten_state({"model": {"layers.0.weight": weight}, "list": [1, (second,)]})
    assert set(tensors) == {"model/layers.0.weight", "list/1/0"}
    assert tensors["model/layers.0.weight"].data_ptr() == weight.data_ptr()
    back = unflatten_state(tensors, values)
    assert back["list"][1][0] is tensors["list/1/0"]


def test_a_part_can_be_put_together_alone():
    tensors, values = flatten_state({"a": {"x": torch.ones(1)}, "b": [torch.zeros(1)]})
    assert torch.equal(unflatten_state({"b/0": tensors["b/0"]}, values["b"])[0], torch.zeros(1))


def test_ordered_dict_is_a_dict_and_parameters_lose_their_graph():
    tensors, values = flatten_state({"model": OrderedDict(w=torch.nn.Parameter(torch.ones(1)))})
    assert not tensors["model/w"].requires_grad
    assert type(unflatten_state(tensors, values)["model"]) is dict


def test_values_of_several_ranks_become_one():
    """Every entry, at any depth; where two say different things the first one is right; keys that JSON has not, and lists of one length."""
    first = {"a": 1, "n": {2: "two", "x": (1,)}, "l": [{"u": 0}, 5], "e": {}, "only": math.nan}
    second = {"a": 9, "n": {1: "one", 2: "no", -(2**70): 0}, "l": [{"v": 1}, 6], "e": {3: {}}, "$y": [1, 2]}
    third = {"n": [], "l": [1, 2, 3]}
    merged = merge_values([flatten_state(each)[1] for each in (first, second, third)])
    found = unflatten_state({}, json.loads(json.dumps(merged, allow_nan=False)))
    assert math.isnan(found.pop("only"))
    assert found == {
        "a": 1, "n": {2: "two", "x": (1,), 1: "one", -(2**70): 0}, "l": [{"u": 0, "v": 1}, 5], "e": {3: {}}, "$y": [1, 2],
    }  # fmt: skip
    assert merge_values([3, {"a": 1}]) == 3 and merge_values([{"$tuple": [1]}, {"a": 1}]) == {"$tuple": [1]}


def test_what_concerns_others_is_left_out():
    """In dicts of any kind and depth, also inside of lists."""
    t = torch.ones(1)
    state = {"d": {"mine": t, "theirs": t}, "l": [({"theirs": t},)], "i": {1: {"theirs": t}, "theirs": t, "mine": t}}
    tensors, values = flatten_state(state)
    without = {key for key in tensors if key.endswith("theirs")}
    kept = {key: tensor for key, tensor in tensors.items() if key not in without}
    assert len(without) == 4
    assert unflatten_state(kept, values, without=without) == {"d": {"mine": t}, "l": [({},)], "i": {1: {}, "mine": t}}
    with pytest.raises(CheckpointError, match="theirs' is missing"):
        unflatten_state(kept, values)


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value", [datetime.datetime(2024, 1, 1), Colour.RED, torch.Size([1]), {1, 2}, b"x", 1j, torch.float32, torch.device("cpu"), range(3)]
)
def test_everything_else_is_refused_with_its_key(value):
    """B26."""
    with pytest.raises(CheckpointError, match=rf"callbacks/EMA/foo/1: found .*{type(value).__name__}.*Convert"):
        flatten_state({"callbacks": {"EMA": {"foo": [0, value]}}})


@pytest.mark.parametrize("key", [None, True, 1.5, (1, 2)])
def test_other_keys_are_refused(key):
    with pytest.raises(CheckpointError, match=r"task: found the key .* keys must be str or int"):
        flatten_state({"task": {key: 1}})


def test_two_tensors_under_one_key_are_refused():
    with pytest.raises(CheckpointError, match="two tensors to save have the key 'a/b'"):
        flatten_state({"a": {"b": torch.ones(1)}, "a/b": torch.zeros(1)})


def test_a_state_that_contains_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        flatten_state({"x": loop})


@pytest.mark.parametrize(
    "values", [{"$code": "x"}, {"$float": "1.5"}, {"$int": 3}, {"$tensor": "gone"}, {"$dict": [[{}, 1]]}, {"$tuple": 1}]
)
def test_hostile_values_are_refused(values):
    with pytest.raises(CheckpointError):
        unflatten_state({}, {"x": [values]})
