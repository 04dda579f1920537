"""Writing: what other tools read back, sharding, casting, memory, and refused input."""

import hashlib
import json
import tracemalloc

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import _TYPES, load_file

from trainer_kit.exceptions import CheckpointError, ConfigurationError, ModelError
from trainer_kit.storage import Folder
from trainer_kit.weights import IdentityMapper, StateItem, items_of, load_model_state, parse_size, write_model_state
from trainer_kit.weights.format import DTYPE_NAMES, DTYPES

from .memory import LiveBytes

INDEX = "model.safetensors.index.json"


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def load_back(folder):
    """All tensors, by the safetensors library and the index alone."""
    if not (folder / INDEX).exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(weight_map.values())}
    return {name: files[file][name] for name, file in weight_map.items()}


# ---- what is written


@pytest.mark.parametrize("limit", ["5GB", 100, 1])
def test_the_safetensors_library_reads_it(tmp_path, limit):
    """Contract 37."""
    tensors = {
        "w": torch.randn(5, 7), "half": torch.randn(3).bfloat16(), "flag": torch.tensor([True, False, True]), "n": torch.tensor(7),
        "empty": torch.empty(0, 3), "z": torch.randn(3, dtype=torch.float64),
    }  # fmt: skip
    write_model_state(tmp_path / "m", items_of(tensors), max_shard_size=limit)
    back = load_back(tmp_path / "m")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) and back[name].dtype == tensors[name].dtype for name in tensors)


@pytest.mark.parametrize("name", [name for name in DTYPES if name in _TYPES])
def test_every_dtype_behind_an_odd_number_of_bytes(tmp_path, name):
    """Contract 37: tools that view the bytes in place need each tensor aligned to its element size."""
    tensor = (torch.arange(16, dtype=torch.uint8) % 2).view(DTYPES[name])
    write_model_state(tmp_path, items_of({"odd": torch.ones(3, dtype=torch.uint8), "w": tensor}))
    back = load_file(tmp_path / "model.safetensors")["w"]
    assert back.dtype == tensor.dtype and torch.equal(bits(back), bits(tensor))
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    start = json.loads(data[8 : 8 + length])["w"]["data_offsets"][0]
    assert (8 + length + start) % tensor.element_size() == 0


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_our_reader_reads_every_dtype_that_we_write(tmp_path, dtype):
    tensor = (torch.arange(16, dtype=torch.uint8) % 2).view(dtype)
    write_model_state(tmp_path, items_of({"w": tensor}))
    target = torch.zeros(16, dtype=torch.uint8).view(dtype)
    load_model_state(tmp_path, IdentityMapper(["w"]), {"w": target})
    assert torch.equal(bits(target), bits(tensor))


def test_metadata_and_order(tmp_path):
    """Contract 37: `format: pt` is what transformers asks for."""
    write_model_state(tmp_path, items_of({"b": torch.ones(1), "a": torch.ones(1)}), metadata={"step": "12"})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "producer": "trainer_kit", "step": "12"}
    assert (tmp_path / "model.safetensors").read_bytes().find(b'"b"') < (tmp_path / "model.safetensors").read_bytes().find(b'"a"')


def test_shards_and_index(tmp_path):
    """Contract 37: a tensor above the limit gets its own file."""
    tensors = {name: torch.ones(100 if name == "big" else 10) for name in ("a", "b", "big", "c", "d", "e")}
    files = write_model_state(tmp_path, items_of(tensors), max_shard_size=80)
    names = [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    assert files == [*names, INDEX]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    assert [sorted(load_file(tmp_path / name)) for name in names] == [["a", "b"], ["big"], ["c", "d"], ["e"]]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 150 * 4
    assert index["weight_map"] == {"a": names[0], "b": names[0], "big": names[1], "c": names[2], "d": names[2], "e": names[3]}


def test_equal_input_gives_equal_files(tmp_path):
    """B98 on one process: the bytes are a function of the tensors."""
    tensors = {"a": torch.arange(10.0), "flag": torch.tensor(True), "b": torch.arange(6)}

    def digests(folder):
        write_model_state(folder, items_of(tensors), max_shard_size=50)
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}

    assert digests(tmp_path / "1") == digests(tmp_path / "2") == digests(tmp_path / "1")


@pytest.mark.parametrize("url", ["memory://weights-writer/a", "file://{}/a", "{}/deep/er"])
@pytest.mark.parametrize("limits", [("1GB", "1GB"), ("1GB", 40), (40, 40), (40, "1GB"), (40, 12)])
def test_urls_and_overwriting(tmp_path, url, limits):
    """Contract 37: stale files of an earlier export are gone."""
    url = url.format(tmp_path)
    Folder(url).remove()
    for value, limit in enumerate(limits):
        tensors = {name: torch.full((3,), float(value)) for name in "abcdefgh"}
        files = write_model_state(url, items_of(tensors), max_shard_size=limit)
        targets = {name: torch.full((3,), -1.0) for name in tensors}
        load_model_state(url, IdentityMapper(targets), targets)
        assert all(torch.equal(targets[name], tensors[name]) for name in tensors)
        assert Folder(url).names() == sorted(files)


# ---- casting and layout


def test_dtype_casts_floating_point_only(tmp_path):
    """B93."""
    quantised = torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"w": torch.randn(9), "half": torch.randn(2).half(), "n": torch.arange(3), "flag": torch.tensor([True]), "q": quantised}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    write_model_state(tmp_path, items_of(tensors), dtype=torch.bfloat16)
    back = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in back.items()} == {
        "w": torch.bfloat16, "half": torch.bfloat16, "n": torch.int64, "flag": torch.bool, "q": torch.float8_e4m3fn,
    }  # fmt: skip
    assert torch.equal(back["w"], tensors["w"].bfloat16()) and torch.equal(back["n"], tensors["n"])
    assert all(tensors[name].dtype == copies[name].dtype and torch.equal(bits(tensors[name]), bits(copies[name])) for name in tensors)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(8)[::2],
        torch.randn(3, 1).expand(3, 4), torch.randn(4, dtype=torch.complex64).conj(), torch.randn(6)[2:4],
        torch.nn.Parameter(torch.randn(3, 4)).t(),
    ],
)  # fmt: skip
def test_strided_tensors_are_written_row_by_row(tmp_path, tensor):
    """B90."""
    stride, address = tensor.stride(), tensor.data_ptr()
    write_model_state(tmp_path, items_of({"odd": torch.ones(1, dtype=torch.uint8), "w": tensor}))
    back = load_file(tmp_path / "model.safetensors")["w"]
    assert torch.equal(back, tensor.detach().resolve_conj()) and back.shape == tensor.shape
    assert (tensor.stride(), tensor.data_ptr()) == (stride, address)


# ---- memory


def test_plain_tensors_are_written_without_a_copy(tmp_path):
    tensors = {f"w{i}": torch.randn(512, 512) for i in range(4)}
    items = items_of(tensors)
    tracemalloc.start()
    try:
        with LiveBytes() as memory:
            write_model_state(tmp_path, items)
        python_memory = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert memory.peak == 0 and python_memory < 512 * 512 * 4 / 2


def test_one_tensor_at_a_time_is_on_the_host(tmp_path):
    """Contract 37, B90: no second copy of the model."""
    items = [StateItem(f"w{i}", (1000,), torch.float32, lambda: torch.ones(10, 100).t().reshape(1000)) for i in range(6)]
    with LiveBytes() as memory:
        write_model_state(tmp_path / "a", items, max_shard_size=9000)
    made = memory.peak
    with LiveBytes() as memory:
        items[0].source()
    assert made == memory.peak
    strided = items_of({f"w{i}": torch.ones(10, 100).t() for i in range(6)})
    with LiveBytes() as memory:
        write_model_state(tmp_path / "b", strided, dtype=torch.bfloat16)
    assert memory.peak == 1000 * 2


def test_each_tensor_is_asked_for_once(tmp_path):
    asked = []
    items = [StateItem(name, (2,), torch.float32, lambda name=name: asked.append(name) or torch.ones(2)) for name in "cab"]
    write_model_state(tmp_path, items, max_shard_size=8)
    assert asked == ["c", "a", "b"]


# ---- sizes


@pytest.mark.parametrize(
    ("value", "size"),
    [(1, 1), (10**12, 10**12), ("4GB", 4 * 10**9), ("500 mb", 5 * 10**8), ("1.5KiB", 1536), ("2GiB", 2**31), (" 7 B ", 7), ("1TB", 10**12)],
)
def test_sizes(value, size):
    assert parse_size(value) == size


@pytest.mark.parametrize("value", [0, -1, True, 1.5, None, "", "GB", "4", "4XB", "-4GB", "0MB", "4 G B", "1e3KB"])
def test_wrong_sizes_name_the_argument(tmp_path, value):
    with pytest.raises(ConfigurationError, match=r"max_shard_size=.*\"4GB\""):
        write_model_state(tmp_path / "m", items_of({"a": torch.ones(1)}), max_shard_size=value)
    assert not (tmp_path / "m").exists()


# ---- refused input


def refused(tmp_path, error, words, items, **options):
    with pytest.raises(error, match=words):
        write_model_state(tmp_path / "m", items, **options)
    assert not (tmp_path / "m").exists()


def test_items_that_cannot_be_written(tmp_path):
    one = StateItem("a", (1,), torch.float32, lambda: torch.ones(1))
    refused(tmp_path, ModelError, "'a' is used twice", [one, one])
    refused(tmp_path, ModelError, "'__metadata__' is used twice, or reserved", [one._replace(name="__metadata__")])
    refused(tmp_path, ModelError, "'a' has dtype torch.complex128", [one._replace(dtype=torch.complex128)])
    refused(tmp_path, ModelError, "no tensors to write", [])
    refused(tmp_path, ConfigurationError, "dtype=torch.int8: a floating-point", [one], dtype=torch.int8)
    refused(tmp_path, ConfigurationError, "metadata has the keys", [one], metadata={"format": "tf"})
    refused(tmp_path, ConfigurationError, "metadata has the keys", [one], metadata={"step": 3})


def test_a_tensor_other_than_announced_stops_the_export(tmp_path):
    old = {"a": torch.zeros(2)}
    write_model_state(tmp_path, items_of(old))
    wrong = ((torch.ones(3), r"announced as \[2\] and came as \[3\]"), (torch.ones(2, dtype=torch.int32), "came as torch.int32"))
    for tensor, words in wrong:
        with pytest.raises(ModelError, match=words):
            write_model_state(tmp_path, [StateItem("a", (2,), torch.float32, lambda tensor=tensor: tensor)])
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
        assert torch.equal(load_back(tmp_path)["a"], old["a"])


@pytest.mark.parametrize("name", ["notes.txt", "weights.pt", "step-00000100", "model.safetensors", "other.safetensors", INDEX])
def test_a_folder_with_other_things_is_left_alone(tmp_path, name):
    """Contract 37: an export folder that is not ours."""
    if name.startswith("step"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(b"{}")
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=f"{name}; nothing was written. Choose an empty"):
        write_model_state(tmp_path, items_of({"a": torch.ones(1)}))
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_weights_of_another_tool_are_never_overwritten(tmp_path):
    """Contract 37."""
    from safetensors.torch import save_file

    save_file({"precious": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no export of trainer_kit: model\.safetensors"):
        write_model_state(tmp_path, items_of({"a": torch.ones(1)}))
    assert list(load_back(tmp_path)) == ["precious"]


def test_files_that_go_with_a_model_are_kept(tmp_path):
    for name in ("config.json", "tokenizer.json", "generation_config.json", "README.md", ".gitattributes"):
        (tmp_path / name).write_text(name)
    for limit in (4, 1000):
        write_model_state(tmp_path, items_of({"a": torch.ones(1), "b": torch.ones(1)}), max_shard_size=limit)
    (tmp_path / "results.csv").write_text("kept too: the folder is known to be ours by now")
    write_model_state(tmp_path, items_of({"a": torch.ones(1)}))
    assert len(list(tmp_path.iterdir())) == 7 and (tmp_path / "config.json").read_text() == "config.json"


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "model.safetensors"):
        with pytest.raises(CheckpointError, match="a folder was expected"):
            write_model_state(tmp_path / name, items_of({"a": torch.ones(1)}))
