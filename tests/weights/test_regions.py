"""Boxes of stored tensors: the right elements, and no more bytes than are worth their reading."""

import io

import pytest
import torch

from trainer_kit.exceptions import CheckpointError
from trainer_kit.weights import regions

BOXES = [
    ((), ()), ((0,), (7,)), ((2,), (3,)), ((0, 0), (7, 5)), ((2, 0), (3, 5)), ((1, 2), (5, 2)),
    ((1, 2, 0), (2, 2, 3)), ((0, 1, 1), (4, 2, 1)),
]  # fmt: skip


@pytest.mark.parametrize("offsets, sizes", BOXES)
@pytest.mark.parametrize("piece_bytes", [8, 64, regions.PIECE_BYTES])
@pytest.mark.parametrize("seek_bytes", [1, regions.SEEK_BYTES])
def test_any_box_of_a_saved_chunk_is_read(tmp_path, monkeypatch, offsets, sizes, piece_bytes, seek_bytes):
    """B21: the boxes that resharding asks for, against plain slicing; in slabs of one element, of some rows, at once, and part by part."""
    monkeypatch.setattr("trainer_kit.weights.regions.SEEK_BYTES", seek_bytes)
    monkeypatch.setattr("trainer_kit.weights.regions.PIECE_BYTES", piece_bytes)
    chunk = torch.arange(7 * 5 * 3, dtype=torch.float64)[: {0: 1, 1: 7, 2: 35, 3: 60}[len(sizes)]]
    chunk = chunk.view({0: (), 1: (7,), 2: (7, 5), 3: (4, 5, 3)}[len(sizes)])
    (tmp_path / "f").write_bytes(b"head" + chunk.numpy().tobytes())
    expected = chunk[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
    for target in (torch.zeros(sizes, dtype=torch.float64), torch.zeros((*sizes, 2), dtype=torch.float64)[..., 0]):
        with open(tmp_path / "f", "rb", buffering=0) as file:
            regions.read_region(file, target, 4, chunk.shape, offsets, "f")
        assert torch.equal(target, expected)


class CountingFile(io.FileIO):
    """Adds up the bytes that are read."""

    num_read = 0

    def readinto(self, buffer):
        count = super().readinto(buffer)
        self.num_read += count or 0
        return count


@pytest.mark.parametrize("offsets, sizes", [((3, 0), (4, 3000)), ((0, 1500), (8, 1500)), ((5, 1500), (2, 1500)), ((8, 0), (0, 3000))])
def test_only_the_bytes_of_the_box_are_read(tmp_path, offsets, sizes):
    """Contract 34: rows, columns and a block of a matrix; a rank without rows reads nothing."""
    whole = torch.arange(8 * 3000, dtype=torch.float32).view(8, 3000)
    (tmp_path / "f").write_bytes(whole.numpy().tobytes())
    target = torch.zeros(sizes)
    with CountingFile(tmp_path / "f") as file:
        regions.read_region(file, target, 0, whole.shape, offsets, "f")
    assert file.num_read == target.numel() * 4
    assert torch.equal(target, whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))])


@pytest.mark.parametrize("sizes", [(8, 3000), (8, 1500), (8, 2999)], ids=["whole rows", "parts", "nearly whole rows"])
def test_a_file_that_ends_early_is_named(tmp_path, sizes):
    (tmp_path / "f").write_bytes(bytes(8 * 3000 * 4 - 2000 * 4))
    with CountingFile(tmp_path / "f") as file, pytest.raises(CheckpointError, match=r"model f ends at byte 88000"):
        regions.read_region(file, torch.zeros(sizes), 0, (8, 3000), (0, 0), "model f")
