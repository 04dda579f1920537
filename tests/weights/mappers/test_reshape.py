"""Reshape: which shapes fit, the way back, and when it is made of boxes."""

import pytest
import torch

from tests.weights.mosaics import assemble
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.weights import Reshape
from trainer_kit.weights.mappers import reshape


@pytest.mark.parametrize(
    ("source_shape", "shape", "found", "made", "num_pieces"),
    [
        ((6,), (2, 3), (6,), (2, 3), 2),
        ((2, 3), (6,), (2, 3), (6,), 2),
        ((-1, 4), (3, -1, 4), (6, 4), (3, 2, 4), 3),
        ((2, 3, 4), (6, 4), (2, 3, 4), (6, 4), 2),
        ((4, 6), (2, 2, 3, 2), (4, 6), (2, 2, 3, 2), 6),
        ((1, 6, 1), (6, 1, 1, 1), (1, 6, 1), (6, 1, 1, 1), 1),
        ((1,), (), (1,), (), 1),
        ((2, 6), (4, 3), (2, 6), (4, 3), 0),  # no box of one is a box of the other
        ((0, 3), (3, 0), (0, 3), (3, 0), 0),
    ],
)
def test_shapes_values_and_the_way_back(source_shape, shape, found, made, num_pieces):
    """Contract 36."""
    mapper = Reshape("a", "b", source_shape=source_shape, shape=shape)
    tensor = torch.randn(found)
    output = mapper.apply({"a": tensor})["b"]
    assert output.shape == made and torch.equal(output.flatten(), tensor.flatten())
    assert torch.equal(mapper.inverse().apply({"b": output})["a"], tensor)
    pieces = mapper.pieces({"a": found}).get("b", [])
    assert len(pieces) == num_pieces
    if pieces:
        assert torch.equal(assemble(pieces, {"a": tensor}, torch.full(made, torch.nan)), output)


def test_too_many_boxes_are_none(monkeypatch):
    monkeypatch.setattr(reshape, "MAX_PIECES", 2)
    assert Reshape("a", source_shape=(6,), shape=(3, 2)).pieces({"a": (6,)}) == {}


@pytest.mark.parametrize(
    ("source_shape", "shape", "found", "words"),
    [
        ((2, 3), (6,), (3, 2), r"'a' has shape \[3, 2\], expected \[2, 3\]; change source_shape="),
        ((6,), (2, 3), (2, 3), r"expected \[6\]"),
        ((-1,), (2, -1), (5,), r"expected one whose 5 elements fit shape=\[2, -1\]"),
        ((-1,), (2, 3), (7,), r"expected one whose 7 elements fit shape=\[2, 3\]"),
    ],
)
def test_wrong_shapes_are_told_with_tensor_and_argument(source_shape, shape, found, words):
    """Contract 35."""
    with pytest.raises(ConfigurationError, match=words):
        Reshape("a", source_shape=source_shape, shape=shape).apply({"a": torch.empty(found, device="meta")})


def test_wrong_arguments():
    with pytest.raises(ConfigurationError, match="the shapes have 6 and 4 elements; change shape="):
        Reshape("a", source_shape=(6,), shape=(2, 2))
    with pytest.raises(ConfigurationError, match="at most one -1 in each shape"):
        Reshape("a", source_shape=(6,), shape=(-1, -1))
