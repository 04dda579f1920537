"""State mappers: groups that are declared and checked before any tensor exists, and the identity."""

import pytest
import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.weights import IdentityMapper, StateGroup, check_groups
from trainer_kit.weights.pieces import whole


def group(inputs, outputs):
    return StateGroup(frozenset(inputs), frozenset(outputs))


def test_identity_declares_one_group_per_name_and_undoes_itself():
    """Contracts 35 and 36."""
    mapper = IdentityMapper(["a", "b"])
    assert mapper.groups() == [group("a", "a"), group("b", "b")]
    tensors = {"a": torch.arange(3)}
    assert mapper.inverse().apply(mapper.apply(tensors))["a"] is tensors["a"]
    assert mapper.pieces({"a": (3,)}) == {"a": [whole("a", (3,))]}


def test_identity_refuses_unknown_names_and_a_text():
    with pytest.raises(ConfigurationError, match="'c'"):
        IdentityMapper(["a"]).apply({"c": torch.zeros(1)})
    with pytest.raises(ConfigurationError, match=r"takes several names.*'abc'"):
        IdentityMapper("abc")


def test_consistent_groups_pass():
    """Contract 36: constants, fan-out, and what is left out on purpose."""
    check_groups([group([], ["constant"]), group("ab", "c"), group("d", "ef"), group("g", [])])


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([group("a", "x"), group("b", "x")], "output 'x' is made by 2 groups"),
        ([group("a", "x"), group("a", "y")], "input 'a' is used by 2 groups"),
        ([group([], [])], "a group has neither inputs nor outputs"),
        ([group(["layers.{i}"], ["x"])], r"'layers.\{i\}' has a placeholder that nothing fills; put the mapper into for_each"),
        ([group([], "x"), group([], "y")], "several groups have no inputs"),
    ],
)
def test_contradicting_groups_are_named(groups, words):
    """Contract 35."""
    with pytest.raises(ConfigurationError, match=words):
        check_groups(groups)


def test_all_faults_are_in_one_message():
    with pytest.raises(ConfigurationError) as caught:
        check_groups([group("a", "x"), group("a", "x"), group([], [])])
    assert all(words in str(caught.value) for words in ("output 'x'", "input 'a'", "neither inputs nor outputs"))
