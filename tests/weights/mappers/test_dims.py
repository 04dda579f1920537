"""Mappers that move, add or take away dims: what becomes of shapes and values, and which errors wrong shapes give."""

import pytest
import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.weights import Rename, Squeeze, StateGroup, Transpose, Unsqueeze

CUBE = torch.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("mapper", "tensor", "expected"),
    [
        (Rename("a", "b"), CUBE, CUBE),
        (Rename("a", "b"), torch.tensor(3), torch.tensor(3)),
        (Transpose("a", "b"), torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 3], [2, 4]])),
        (Transpose("a", "b", dims=(-1, 0)), CUBE, CUBE.transpose(0, 2)),
        (Unsqueeze("a", "b", dim=0), torch.tensor(3), torch.tensor([3])),
        (Unsqueeze("a", "b", dim=-1), torch.tensor([1, 2]), torch.tensor([[1], [2]])),
        (Squeeze("a", "b", dim=1), torch.tensor([[1], [2]]), torch.tensor([1, 2])),
        (Squeeze("a", "b", dim=-2), torch.zeros(2, 1, 1), torch.zeros(2, 1)),
    ],
    ids=repr,
)
def test_values_and_the_way_back(mapper, tensor, expected):
    """Contracts 35 and 36."""
    assert mapper.groups() == [StateGroup(frozenset("a"), frozenset("b"))]
    made = mapper.apply({"a": tensor})
    assert torch.equal(made["b"], expected)
    assert torch.equal(mapper.inverse().apply(made)["a"], tensor)


def test_a_tensor_keeps_its_name_where_no_other_is_given():
    assert Transpose("a").groups() == [StateGroup(frozenset("a"), frozenset("a"))]
    assert Squeeze("a", dim=0).inverse().apply({"a": torch.zeros(2)})["a"].shape == (1, 2)


@pytest.mark.parametrize(
    ("mapper", "shape", "words"),
    [
        (Squeeze("a", dim=1), (2, 3), r"Squeeze\('a' -> 'a', dim=1\): 'a' has shape \[2, 3\], expected size 1 at dim=1"),
        (Squeeze("a", dim=2), (2, 3), r"'a' has shape \[2, 3\], expected a shape that has dim=2"),
        (Transpose("a"), (5,), r"'a' has shape \[5\], expected a shape that has dim=1"),
        (Unsqueeze("a", dim=3), (5,), "expected a shape that has dim=3"),
    ],
)
def test_wrong_shapes_are_told_with_tensor_and_argument(mapper, shape, words):
    """Contract 35."""
    with pytest.raises(ConfigurationError, match=words):
        mapper.apply({"a": torch.empty(shape, device="meta")})
    with pytest.raises(ConfigurationError, match=words):
        mapper.pieces({"a": shape})


def test_wrong_arguments():
    with pytest.raises(ConfigurationError, match="no group of .* has the inputs 'c'"):
        Rename("a", "b").apply({"c": CUBE})
    with pytest.raises(ConfigurationError, match="two dims"):
        Transpose("a", dims=(0, 1, 2))
    with pytest.raises(ConfigurationError, match="takes one name"):
        Transpose(["a", "b"])
    with pytest.raises(ConfigurationError, match="names of tensors are texts, found 3"):
        Rename("a", [3])
