"""How a sequence is cut over the ranks of a context group, so that a causal mask gives all of them the same work.

Of 2R equal chunks, R the number of ranks, rank r has chunk r and chunk 2R - 1 - r, one after the other: with R = 2 and 8 positions, 0 1 6 7
and 2 3 4 5. A query of a late position sees many keys and one of an early position few, so each rank gets as many of both.
Everything that belongs to a position is cut alike: ids, labels, loss weights, positions. Labels are shifted by one before the cut; a shift
after it would take the neighbour of a chunk for the next token.
Before editing: attention relies on positions rising within a part, and on the first chunk of rank r being chunk r.
"""

# ruff: noqa: N803, N806  (shape suffixes are upper case: B batch, T the whole sequence)
from __future__ import annotations

import torch
import torch.distributed as dist

from trainer_kit.exceptions import ConfigurationError

SEQUENCE_DIM = 1  # of (B, T, ...)


def check_parts(num_positions: int, num_ranks: int) -> None:
    """Raises ConfigurationError if a sequence cannot be cut over so many ranks."""
    if num_positions % (2 * num_ranks):
        step = 2 * num_ranks
        longer = -(-num_positions // step) * step
        raise ConfigurationError(
            f"a sequence of {num_positions} positions cannot be cut over cp={num_ranks} ranks; expected a multiple of 2 * cp = {step}. "
            f"Pad or pack the rows to {longer} positions, or lower the cp degrees of the MeshStrategy"
        )


def part_positions(num_positions: int, rank: int, num_ranks: int, *, device: torch.device | str | None = None) -> torch.Tensor:
    """The places in the whole sequence that a rank has: rising int64 of shape (num_positions / num_ranks,).

    As position ids they are right for rows without documents; see `document_positions`.
    """
    check_parts(num_positions, num_ranks)
    first, second = (torch.arange(start, stop, device=device) for start, stop in _bounds(num_positions, rank, num_ranks))
    return torch.cat([first, second])


def take_part(x: torch.Tensor, rank: int, num_ranks: int, *, dim: int = SEQUENCE_DIM) -> torch.Tensor:
    """The part of a rank: a copy, of size T / num_ranks in dim `dim`, where the whole has T. Gradients go back to the places."""
    num_positions = x.shape[dim]
    check_parts(num_positions, num_ranks)
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in _bounds(num_positions, rank, num_ranks)], dim)


def join_parts(parts: torch.Tensor, *, dim: int = SEQUENCE_DIM) -> torch.Tensor:
    """The whole sequence from the parts of all ranks, stacked before the first dim: (R, B, T / R, ...) to (B, T, ...) for `dim` 1."""
    num_ranks, dim = parts.shape[0], dim % (parts.dim() - 1)
    chunks = parts.unflatten(dim + 1, (2, -1)).movedim(dim + 1, 1).flatten(0, 1)  # of rank 0, of rank 0, of rank 1, ...
    order = [2 * rank for rank in range(num_ranks)] + [2 * rank + 1 for rank in reversed(range(num_ranks))]
    return torch.cat([chunks[place] for place in order], dim)


def split_parts(x: torch.Tensor, num_ranks: int, *, dim: int = SEQUENCE_DIM) -> torch.Tensor:
    """The parts of all ranks, stacked before the first dim: the opposite of `join_parts`."""
    return torch.stack([take_part(x, rank, num_ranks, dim=dim) for rank in range(num_ranks)])


def gather_parts(part: torch.Tensor, group: dist.ProcessGroup, *, dim: int = SEQUENCE_DIM) -> torch.Tensor:
    """The whole sequence on each rank of the group, for predictions and ids: (B, T / R, ...) to (B, T, ...). No gradient goes through.

    Every rank of the group takes part, with a tensor of the same shape.
    """
    part = part.detach().contiguous()
    parts = part.new_empty(dist.get_world_size(group), *part.shape)
    dist.all_gather_single(parts.flatten(0, 1), part, group=group)
    return join_parts(parts, dim=dim)


def document_positions(document_ids_BT: torch.Tensor) -> torch.Tensor:
    """The place of each token in its document: 0, 1, ... from where the id differs from the one before it. (B, T) int64.

    Of whole rows, before they are cut. Rotary positions of packed documents are these.
    """
    places_T = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)
    is_start_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    is_start_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    return places_T - torch.where(is_start_BT, places_T, 0).cummax(1).values


def _bounds(num_positions: int, rank: int, num_ranks: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the two chunks of a rank start and stop."""
    size = num_positions // (2 * num_ranks)
    last = 2 * num_ranks - 1 - rank
    return (rank * size, (rank + 1) * size), (last * size, (last + 1) * size)
