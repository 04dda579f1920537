"""Pieces: boxes of outputs that are boxes of inputs, cut, composed, and read into views."""

import torch

from tests.weights.mosaics import assemble
from trainer_kit.weights.pieces import Piece, whole


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


def test_dims_may_be_swapped_dropped_and_added():
    """Contract 36. Out of x (2, 3, 4): rows 1 and 2 of its first matrix, transposed, with a dim of size 1 between."""
    x = numbered(2, 3, 4)
    piece = Piece("x", (0, 1, 0), (1, 2, 4), (0, 0, 0), (2, None, 1))
    assert piece.output_sizes == (4, 1, 2)
    found = assemble([piece], {"x": x}, torch.zeros(4, 1, 2, dtype=torch.long))
    assert torch.equal(found[:, 0], x[0, 1:3].T)


def test_a_clipped_piece_stays_where_it_is():
    """Contract 34: what a rank needs of an input for its part of an output."""
    piece = Piece("x", (0, 1), (4, 5), (2, 0), (1, 0))  # out[2:7, 0:4] = x[0:4, 1:6].T
    assert piece.clip((4, 1), (10, 2)) == Piece("x", (1, 3), (2, 3), (4, 1), (1, 0))
    assert piece.clip((7, 0), (1, 4)) is None and piece.clip((2, 0), (0, 4)) is None


def test_pieces_of_pieces():
    """Contract 36: a part of a permutation, permuted again."""
    x = numbered(2, 3, 4)
    first = [Piece("x", (0, 0, 0), (2, 3, 4), (0, 0, 0), (2, 0, 1))]
    second = Piece("m", (1, 0, 0), (2, 2, 3), (0, 0, 0), (1, 2, 0))
    expected = x.permute(2, 0, 1)[1:3].permute(1, 2, 0)
    assert torch.equal(assemble(list(second.through(first)), {"x": x}, torch.zeros(2, 3, 2, dtype=torch.long)), expected)


def test_a_piece_of_several_pieces():
    """Contract 36: rows of a concatenation that lie on both sides of the seam; the others are left out."""
    a, b, c = numbered(2, 3), numbered(3, 3) + 10, numbered(1, 3) + 100
    joined = [whole("a", (2, 3)), Piece("b", (0, 0), (3, 3), (2, 0), (0, 1)), Piece("c", (0, 0), (1, 3), (5, 0), (0, 1))]
    found = list(Piece("m", (1, 0), (2, 3), (0, 0), (0, 1)).through(joined))
    assert [piece.source for piece in found] == ["a", "b"]
    result = assemble(found, {"a": a, "b": b, "c": c}, torch.zeros(2, 3, dtype=torch.long))
    assert torch.equal(result, torch.cat([a, b, c])[1:3])


def test_scalars():
    piece = whole("s", ())
    assert piece.clip((), ()) == piece
    assert assemble([piece], {"s": torch.tensor(3)}, torch.tensor(0)) == 3
