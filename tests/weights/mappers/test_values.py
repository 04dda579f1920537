"""Mappers about values: casts, copies of tied weights, constants, what is left out on purpose, and functions."""

import pytest
import torch

from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.weights import Cast, Constant, Copy, Drop, Function, Parallel, StateGroup, check_groups


def test_cast_is_lossy_and_goes_back_to_the_dtype_that_was_told():
    """Contract 36: a cast inverts only with lossy=True."""
    mapper = Cast("a", dtype=torch.float32, source_dtype=torch.bfloat16)
    made = mapper.apply({"a": torch.ones(2, dtype=torch.bfloat16)})
    assert made["a"].dtype == torch.float32
    with pytest.raises(UnsupportedError, match=r"may change values; inverse\(lossy=True\) casts back"):
        mapper.inverse()
    assert mapper.inverse(lossy=True).apply(made)["a"].dtype == torch.bfloat16
    assert mapper.pieces({"a": (2,)}) == {}
    with pytest.raises(ConfigurationError, match="'a' is torch.float16, expected torch.bfloat16; change source_dtype="):
        mapper.apply({"a": torch.ones(2, dtype=torch.float16)})


def test_the_inverse_of_a_cast_from_anything_keeps_the_dtype():
    back = Cast("a", "b", dtype=torch.float32).inverse(lossy=True)
    assert back.apply({"b": torch.ones(1)})["a"].dtype == torch.float32


def test_copy_and_unify():
    """Contract 36: fan-out is expressible, and the way back loses nothing: equal bits are needed, and a NaN equals itself."""
    mapper = Copy("tied", ["embedding", "head"])
    assert mapper.groups() == [StateGroup(frozenset(["tied"]), frozenset(["embedding", "head"]))]
    weight = torch.tensor([1.0, float("nan")])
    made = mapper.apply({"tied": weight})
    assert made["embedding"] is weight and made["head"] is weight
    assert mapper.inverse().apply({"embedding": weight, "head": weight.clone()})["tied"] is weight


@pytest.mark.parametrize("other", [torch.tensor([1.0, 3.0]), torch.tensor([1.0]), torch.tensor([1, 2])], ids=repr)
def test_tensors_that_differ_are_not_stored_as_one(other):
    mapper = Copy("tied", ["embedding", "head"]).inverse(lossy=True)
    with pytest.raises(ConfigurationError, match="'embedding' and 'head' differ, so they cannot be stored as one tensor"):
        mapper.apply({"embedding": torch.tensor([1.0, 2.0]), "head": other})


def test_constants_come_from_nothing_and_are_dropped_on_the_way_back():
    """Contract 36."""
    mapper = Parallel([Constant("a", torch.ones(2)), Constant("b", torch.zeros(3))])
    assert mapper.groups() == [StateGroup(frozenset(), frozenset("ab"))]
    assert torch.equal(mapper.apply({})["b"], torch.zeros(3))
    assert mapper.pieces({}) == {}
    with pytest.raises(UnsupportedError, match=r"inverse\(lossy=True\) drops 'a'"):
        mapper.inverse()
    assert mapper.inverse(lossy=True).groups() == Drop(["a", "b"]).groups()


def test_drop_uses_names_and_makes_nothing():
    """Contract 35: what is left out is declared."""
    mapper = Drop(["a", "b"])
    check_groups(mapper.groups())
    assert mapper.groups() == [StateGroup(frozenset("a"), frozenset()), StateGroup(frozenset("b"), frozenset())]
    assert mapper.apply({"a": torch.ones(1)}) == {}
    assert mapper.inverse(lossy=True).groups() == []
    with pytest.raises(UnsupportedError, match="cannot come back"):
        mapper.inverse()
    with pytest.raises(ConfigurationError, match="'c'"):
        mapper.apply({"c": torch.ones(1)})


def test_functions_with_several_tensors_and_their_inverse():
    """Contract 36."""
    mapper = Function(["a", "b"], ["x", "y"], lambda a, b: (a + b, a - b), backward=lambda x, y: ((x + y) / 2, (x - y) / 2))
    made = mapper.apply({"b": torch.tensor([1.0]), "a": torch.tensor([3.0])})
    assert made == {"x": torch.tensor([4.0]), "y": torch.tensor([2.0])}
    assert mapper.inverse().apply(made) == {"a": torch.tensor([3.0]), "b": torch.tensor([1.0])}
    assert mapper.inverse().inverse().apply(mapper.inverse().apply(made)) == made
    assert mapper.pieces({"a": (1,), "b": (1,)}) == {}


def test_a_function_that_needs_values_has_a_stand_in_for_meta_tensors():
    mapper = Function("a", "b", lambda a: torch.tensor(a.tolist()) * 2, meta=torch.empty_like)
    assert mapper.apply({"a": torch.ones(3, device="meta")})["b"].shape == (3,)
    assert mapper.apply({"a": torch.ones(2)})["b"].tolist() == [2.0, 2.0]


def test_functions_that_cannot_go_back_say_so():
    """Contract 36."""
    with pytest.raises(UnsupportedError, match="has no inverse; give it backward="):
        Function("a", "b", torch.relu).inverse(lossy=True)
    nearly = Function("a", "b", torch.exp, backward=torch.log, lossy=True)
    with pytest.raises(UnsupportedError, match=r"only nearly by its backward; inverse\(lossy=True\) does that"):
        nearly.inverse()
    assert nearly.inverse(lossy=True).apply({"b": torch.ones(1)})["a"].item() == 0.0


def test_a_function_gives_as_many_tensors_as_it_has_outputs():
    with pytest.raises(ConfigurationError, match="the function gave 1 tensors, expected 2, one per output"):
        Function("a", ["x", "y"], torch.neg).apply({"a": torch.ones(1)})
