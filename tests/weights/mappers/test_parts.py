"""Mappers between one tensor and several along a dim: values, sizes, and the errors of what does not fit together."""

import pytest
import torch

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.weights import Chunk, Concatenate, Split, Stack, Unstack

TABLE = torch.arange(6).reshape(2, 3)


def apply(mapper, *tensors):
    return list(mapper.apply(dict(zip(mapper.inputs, tensors, strict=True))).values())


def assert_equal(found, expected):
    assert len(found) == len(expected) and all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("mapper", "tensors", "expected"),
    [
        (Split("a", ["x", "y"], sizes=[1, 2], dim=1), [TABLE], [TABLE[:, :1], TABLE[:, 1:]]),
        (Split("a", ["x", "y"], sizes=[0, 3], dim=-1), [TABLE], [TABLE[:, :0], TABLE]),
        (Chunk("a", ["x", "y"]), [TABLE], [TABLE[:1], TABLE[1:]]),
        (Concatenate(["x", "y"], "a"), [TABLE, TABLE + 10], [torch.tensor([[0, 1, 2], [3, 4, 5], [10, 11, 12], [13, 14, 15]])]),
        (Concatenate(["x", "y"], "a", sizes=[1, 2], dim=-1), [TABLE[:, :1], TABLE[:, 1:]], [TABLE]),
        (Stack(["x", "y"], "a"), [torch.tensor([1, 2]), torch.tensor([3, 4])], [torch.tensor([[1, 2], [3, 4]])]),
        (Stack(["x", "y"], "a", dim=-1), [torch.tensor([1, 2]), torch.tensor([3, 4])], [torch.tensor([[1, 3], [2, 4]])]),
        (Unstack("a", ["x", "y", "z"], dim=1), [TABLE], [TABLE[:, 0], TABLE[:, 1], TABLE[:, 2]]),
    ],
    ids=repr,
)
def test_values_and_the_way_back(mapper, tensors, expected):
    """Contract 36."""
    made = apply(mapper, *tensors)
    assert_equal(made, expected)
    assert_equal(apply(mapper.inverse(), *made), tensors)


def test_the_order_of_the_names_is_that_of_the_tensors():
    """Not that of a sorted or hashed set."""
    names = [f"{k}" for k in (3, 1, 2)]
    found = Stack(names, "a").apply({"1": torch.tensor(1), "2": torch.tensor(2), "3": torch.tensor(3)})
    assert found["a"].tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("mapper", "shapes", "words"),
    [
        (Split("a", ["x", "y"], sizes=[1, 2]), [(4, 3)], r"'a' has shape \[4, 3\], expected size 3 at dim=0, the sum of sizes=\[1, 2\]"),
        (Chunk("a", ["x", "y"], dim=1), [(4, 3)], r"'a' has shape \[4, 3\], expected a multiple of 2 at dim=1; Split takes uneven sizes"),
        (Unstack("a", ["x", "y"]), [(4, 3)], "expected size 2 at dim=0, the number of outputs"),
        (Stack(["x", "y"], "a"), [(2, 3), (2, 4)], r"'y' has shape \[2, 4\], expected \[2, 3\] as 'x'"),
        (Stack(["x", "y"], "a", dim=3), [(2, 3), (2, 3)], "expected a shape that has dim=3"),
        (Concatenate(["x", "y"], "a"), [(2, 3), (1, 3)], r"'y' has shape \[1, 3\], expected \[2, 3\] beside 'x'; uneven .* need sizes="),
        (Concatenate(["x", "y"], "a", sizes=[2, 1]), [(2, 3), (1, 4)], r"'y' has shape \[1, 4\], expected \[1, 3\] beside 'x' for sizes="),
        (Concatenate(["x", "y"], "a", sizes=[3, 1]), [(2, 3), (1, 3)], r"'x' has shape \[2, 3\], expected \[3, 3\]"),
    ],
)
def test_wrong_shapes_are_told_with_tensor_and_argument(mapper, shapes, words):
    """Contract 35."""
    with pytest.raises(ConfigurationError, match=words):
        apply(mapper, *(torch.empty(shape, device="meta") for shape in shapes))
    with pytest.raises(ConfigurationError, match=words):
        mapper.pieces(dict(zip(mapper.inputs, shapes, strict=True)))


@pytest.mark.parametrize("kind", [Stack, Concatenate])
def test_dtypes_are_not_mixed_in_silence(kind):
    with pytest.raises(ConfigurationError, match=r"'y' is torch.float64, expected torch.float32 as 'x'; put a Cast before"):
        apply(kind(["x", "y"], "a"), torch.zeros(2), torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Split("a", ["x", "y"], sizes=[1]), r"sizes=\[1\], expected 2 sizes"),
        (lambda: Split("a", ["x", "y"], sizes=[3, -1]), "none negative"),
        (lambda: Concatenate(["x", "y"], "a", sizes=[1, 2, 3]), "expected 2 sizes"),
        (lambda: Chunk("a", "xy"), "outputs='xy', expected a list"),
        (lambda: Stack([], "a"), r"inputs=\[\], expected a list with one name or more"),
        (lambda: Stack(["x", "x"], "a"), "has a name twice"),
    ],
)
def test_wrong_arguments(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()
