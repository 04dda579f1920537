"""What the reader does with pieces, from tensors in memory: for the tests that hold them against what a mapper computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trainer_kit.mesh.layout import box_index
from trainer_kit.weights.pieces import Piece


def assemble(pieces: Sequence[Piece], inputs: Mapping[str, torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """Fill `output` from whole inputs."""
    for piece in pieces:
        box = output[box_index(piece.offsets, piece.output_sizes)]
        source = inputs[piece.source][box_index(piece.source_offsets, piece.sizes)]
        piece.in_source_dims(box).copy_(source)
    return output
