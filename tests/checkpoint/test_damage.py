"""Hostile, truncated and altered checkpoints: an error that names the file, and nothing changed."""

from __future__ import annotations

import json
import zlib

import pytest
import torch

from trainer_kit.checkpoint import load, read_manifest
from trainer_kit.checkpoint.manifest import decode_manifest
from trainer_kit.exceptions import CheckpointError

DATA = "rank-00000.safetensors"


@pytest.fixture
def saved(tmp_path, save):
    save(tmp_path / "step-00000001", 1, {"w": torch.arange(1, 7.0).view(2, 3), "v": torch.ones(2)})
    return tmp_path / "step-00000001"


def templates():
    return {"w": torch.zeros(2, 3), "v": torch.zeros(2)}


def refuses(path, match, **options):
    targets = templates()
    with pytest.raises(CheckpointError, match=match):
        load(path, targets, **options)
    assert all(int(t.count_nonzero()) == 0 for t in targets.values())


def rewrite(path, change):
    """Alter the manifest and give it a right checksum again: what somebody who knows the format can do."""
    content = json.loads((path / "manifest.json").read_text())["manifest"]
    text = json.dumps(change(content) or content, separators=(",", ":")).encode()
    (path / "manifest.json").write_bytes(b'{"crc32":%d,"manifest":%b}' % (zlib.crc32(text), text))


def test_a_changed_bit_in_a_data_file_is_found(saved):
    data = (saved / DATA).read_bytes()
    for index in range(0, len(data), 5):
        (saved / DATA).write_bytes(data[:index] + bytes([data[index] ^ 16]) + data[index + 1 :])
        refuses(saved, f"{DATA} was altered or damaged")


def test_verify_false_loads_an_altered_file_all_the_same(saved):
    data = bytearray((saved / DATA).read_bytes())
    data[-4:] = torch.tensor([9.0]).numpy().tobytes()
    (saved / DATA).write_bytes(data)
    targets = templates()
    load(saved, targets, verify=False)
    assert [t for t in targets.values() if 9.0 in t.flatten().tolist()]


@pytest.mark.parametrize("length", [0, 1, 8, 100, -1])
def test_a_truncated_data_file_is_found_without_its_checksum(saved, length):
    (saved / DATA).write_bytes((saved / DATA).read_bytes()[:length])
    refuses(saved, rf"{DATA} has \d+ bytes, expected \d+", verify=False)


def test_a_missing_or_longer_data_file_is_found(saved):
    with open(saved / DATA, "ab") as file:
        file.write(b"x")
    refuses(saved, f"{DATA} has .* expected")
    (saved / DATA).unlink()
    refuses(saved, f"{DATA} is missing")


def test_every_changed_or_missing_byte_of_the_manifest_is_found(saved):
    data = (saved / "manifest.json").read_bytes()
    for index in range(len(data)):
        for altered in (data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :], data[:index]):
            with pytest.raises(CheckpointError, match=r"the/manifest\.json"):
                decode_manifest(altered, "the/manifest.json")


def test_no_manifest(saved):
    (saved / "manifest.json").unlink()
    refuses(saved, "step-00000001 has no manifest.json: it is incomplete")
    refuses(saved / "nothing", "does not exist")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", "", ".hidden", "C:\\x", "rank\n", "a" * 300])
def test_names_that_leave_the_folder_are_refused(saved, name):
    """Promise 5: a manifest of somebody else opens no other file."""
    (saved.parent / "secret").write_bytes((saved / DATA).read_bytes())

    def change(content):
        content["files"] = {name: content["files"][DATA]}
        for tensor in content["tensors"].values():
            tensor["chunks"][0]["file"] = name

    rewrite(saved, change)
    refuses(saved, "manifest.json: it lists the file .* no plain name")


def chunk_change(**fields):
    return lambda content: content["tensors"]["w"]["chunks"][0].update(fields)


def tensor_change(**fields):
    return lambda content: content["tensors"]["w"].update(fields)


CHUNK = {"offsets": [0, 0], "sizes": [1, 3], "file": DATA, "start": 0, "end": 12}
HOSTILE = {
    "beyond the file": chunk_change(start=10**6, end=10**6 + 24),
    "negative start": chunk_change(start=-24, end=0),
    "range too short": chunk_change(end=200, start=190),
    "beyond the shape": chunk_change(offsets=[1, 0]),
    "huge offset": chunk_change(offsets=[2**63, 0]),
    "fractional size": chunk_change(sizes=[2.0, 3]),
    "bool size": chunk_change(sizes=[True, 3]),
    "other dims": chunk_change(sizes=[6], offsets=[0]),
    "unlisted file": chunk_change(file="other"),
    "file is a list": chunk_change(file=[1]),
    "unknown dtype": tensor_change(dtype="OBJECT"),
    "huge shape": tensor_change(shape=[2**62, 2**62]),
    "negative shape": tensor_change(shape=[-2, -3]),
    "no chunks": tensor_change(chunks=[]),
    "half covered": tensor_change(chunks=[CHUNK]),
    "overlap": tensor_change(chunks=[CHUNK, CHUNK]),
    "chunks are numbers": tensor_change(chunks=3),
    "tensor is text": lambda content: content["tensors"].update(w="x"),
    "tensors are a list": lambda content: content.update(tensors=[]),
    "files are a list": lambda content: content.update(files=[1]),
    "size is text": lambda content: content["files"][DATA].update(size="1"),
    "no size": lambda content: content["files"][DATA].pop("size"),
    "no step": lambda content: (content.pop("step"), None)[1],
    "negative step": lambda content: content.update(step=-1),
    "step is text": lambda content: content.update(step="1"),
    "identity is a list": lambda content: content.update(identity=[]),
    "no values": lambda content: (content.pop("values"), None)[1],
    "nan": lambda content: content.update(values=float("nan")),
    "other format": lambda content: content.update(format="something"),
    "newer version": lambda content: content.update(version=2),
    "a list": lambda content: [content],
    "a number": lambda content: 3,
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_refused(saved, change):
    """Promise 5: offsets are never trusted."""
    rewrite(saved, change)
    refuses(saved, r"step-00000001/manifest\.json", verify=False)


def test_a_deeply_nested_manifest_is_refused(saved):
    text = b"[" * 200_000
    (saved / "manifest.json").write_bytes(b'{"crc32":%d,"manifest":%b}' % (zlib.crc32(text), text))
    refuses(saved, "manifest.json")


def test_a_manifest_edited_by_hand_loads_without_its_checksum(saved):
    data = (saved / "manifest.json").read_bytes()
    assert b'"step":1' in data
    (saved / "manifest.json").write_bytes(data.replace(b'"step":1', b'"step":2'))
    with pytest.raises(CheckpointError, match="was altered or damaged: its checksum"):
        read_manifest(saved)
    assert read_manifest(saved, verify=False).step == 2


def test_chunks_of_a_hostile_manifest_share_no_element(saved):
    """Two halves that cover the tensor are fine, in any order; the same bytes may serve both."""

    def change(content):
        chunk = content["tensors"]["w"]["chunks"][0]
        first = {**chunk, "sizes": [1, 3], "end": chunk["start"] + 12}
        content["tensors"]["w"]["chunks"] = [{**first, "offsets": [1, 0]}, first]

    rewrite(saved, change)
    targets = templates()
    load(saved, targets)
    assert targets["w"].tolist() == [[1, 2, 3], [1, 2, 3]]
