"""Files that go with a model are copied beside its weights: which ones, with which dtype, and complete or absent as the weights are."""

import itertools
import json
import os

import pytest
import torch

from tests.weights.test_publish import Fault, KilledError, break_disk, by_our_reader, check_complete
from trainer_kit.exceptions import CheckpointError, ConfigurationError
from trainer_kit.weights import items_of, write_model_state

CONFIG = {"architectures": ["Qwen3"], "torch_dtype": "float32", "text_config": {"dtype": "float32"}, "quantization_config": {"bits": 4}}
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "merges.txt")


@pytest.fixture(autouse=True)
def _quick_flush(monkeypatch):
    """The tests kill processes, not machines: waiting for the disk would change nothing."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def base(tmp_path):
    """A folder as other tools leave it."""
    (folder := tmp_path / "base").mkdir()
    for name in (*FILES, "README.md", "model.safetensors", "tokenizer.model", "training_args.bin", ".gitattributes"):
        (folder / name).write_bytes(json.dumps(CONFIG).encode() if name == "config.json" else b"of " + name.encode())
    (folder / "tokenizer").mkdir()
    return folder


def write(folder, companions, value=1.0, **options):
    tensors = {name: torch.full((3,), value) for name in "abcdef"}
    return write_model_state(folder, items_of(tensors), companions=companions, **options)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_gives_configuration_and_tokenizer(base, tmp_path):
    """Not its weights, nor texts about it; byte for byte; and the files of the export are those of the weights."""
    assert write(tmp_path / "m", base) == ["model.safetensors"]
    assert names_in(tmp_path / "m") == sorted([*FILES, "tokenizer.model", "model.safetensors"])
    assert all((tmp_path / "m" / name).read_bytes() == (base / name).read_bytes() for name in FILES)
    write(tmp_path / "m", base, max_shard_size=24)
    assert len(names_in(tmp_path / "m")) == len(FILES) + 1 + 3 + 1


def test_a_list_names_single_files(base, tmp_path):
    write(tmp_path / "m", [base / "config.json", str(base / "README.md")])
    assert names_in(tmp_path / "m") == ["README.md", "config.json", "model.safetensors"]
    write(tmp_path / "n", f"file://{base}/config.json")
    assert names_in(tmp_path / "n") == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("entries", "changed"),
    [
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"dtype": "float32", "torch_dtype": "float32"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        ({}, {"torch_dtype": "bfloat16"}),
        ({"text_config": {"dtype": "float32"}, "dtype": None}, {"text_config": {"dtype": "bfloat16"}, "dtype": "bfloat16"}),
    ],
)
def test_the_config_says_the_dtype_of_the_export(tmp_path, entries, changed):
    """B93: under the name that is there, in parts too; nothing else changes."""
    others = {"name": "é", "quantization_config": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps({**others, **entries}))
    write(tmp_path / "m", tmp_path, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == {**others, **changed}


def test_what_cannot_be_copied_is_told_before_anything_is_written(base, tmp_path):
    (tmp_path / "empty").mkdir()
    for companions, error, words in (
        (tmp_path / "nothing", CheckpointError, "there is no such file or folder"),
        (tmp_path / "empty", CheckpointError, "no configuration or tokenizer file"),
        ([base / "model.safetensors"], ConfigurationError, "these are weights"),
        ([base / "config.json", base / ".." / "base" / "config.json"], ConfigurationError, "two files of the name 'config.json'"),
    ):
        with pytest.raises(error, match=words):
            write(tmp_path / "m", companions)
        assert not (tmp_path / "m").exists()
    (base / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        write(tmp_path / "m", base, dtype=torch.bfloat16)
    assert not list((tmp_path / "m").glob("*"))


def test_a_folder_can_be_its_own_companion(base, tmp_path):
    write(tmp_path / "m", base)
    write(tmp_path / "m", tmp_path / "m", value=2.0, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert names_in(tmp_path / "m") == sorted([*FILES, "tokenizer.model", "model.safetensors"])


@pytest.mark.parametrize("kill", [True, False], ids=["kill", "error"])
@pytest.mark.parametrize("limit", [1000, 24], ids=["single", "three files"])
def test_a_fault_at_every_file_operation(tmp_path, limit, kill):
    """Contract 37, B30: companions are whole whenever they are there, all of them when the new weights are, and leave no temporaries."""
    for name, number in itertools.product(("old", "new"), range(2)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / f"tokenizer-{number}").write_text(f"{name} {number}" * 3)
    for at in itertools.count(1):
        folder, fault = tmp_path / str(at), Fault(at, kill)
        write(folder, tmp_path / "old", value=0.0, max_shard_size=limit)
        with pytest.MonkeyPatch.context() as patch:
            break_disk(patch, fault)
            try:
                write(folder, tmp_path / "new", max_shard_size=limit)
            except (KilledError, CheckpointError) as error:
                assert kill == isinstance(error, KilledError)
        check_complete(folder, had_old=True)
        found = {path.read_text() for path in folder.glob("tokenizer-?")}
        assert found <= {f"{name} {number}" * 3 for name in ("old", "new") for number in range(2)} and len(found) == 2
        if by_our_reader(folder) == {1.0}:
            assert found == {f"new {number}" * 3 for number in range(2)}
        if not kill:
            assert not list(folder.glob("*.tmp"))
        if fault.count < at:
            break
        files = write(folder, tmp_path / "new", max_shard_size=limit)
        assert names_in(folder) == sorted([*files, *(f"tokenizer-{number}" for number in range(2))])
    assert at > 8
