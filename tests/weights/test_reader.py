"""Reading: folders and files of other tools, streaming into existing memory, and every kind of broken input."""

import json
import tracemalloc

import pytest
import torch
from safetensors.torch import save, save_file

from trainer_kit.exceptions import CheckpointError, ConfigurationError
from trainer_kit.storage import Folder
from trainer_kit.weights import IdentityMapper, ModelStateReader, StateGroup, StateMapper, load_model_state
from trainer_kit.weights.format import DTYPE_NAMES
from trainer_kit.weights.pieces import whole

from .memory import LiveBytes


def like(tensors, fill=0):
    return {name: torch.full_like(tensor, fill, memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def write_shards(folder, shards, weight_map=None):
    """A sharded model state as other tools write it."""
    folder.mkdir(exist_ok=True)
    for file, tensors in shards.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    names = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": names if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


class Concatenate(StateMapper):
    """Rows of several tensors in one."""

    def __init__(self, parts, whole):
        self.parts, self.whole = parts, whole

    def groups(self):
        return [StateGroup(frozenset(self.parts), frozenset((self.whole,)))]

    def apply(self, tensors):
        return {self.whole: torch.cat([tensors[part] for part in self.parts])}

    def inverse(self, *, lossy=False):
        raise NotImplementedError


class FanOut(StateMapper):
    """One stored tensor for two of the model."""

    def groups(self):
        return [StateGroup(frozenset("a"), frozenset("xy"))]

    def apply(self, tensors):
        return {"x": tensors["a"], "y": tensors["a"]}

    def inverse(self, *, lossy=False):
        raise NotImplementedError

    def pieces(self, shapes):
        return {name: [whole("a", shapes["a"])] for name in "xy"}


class Ones(StateMapper):
    """A tensor that no file holds."""

    def groups(self):
        return [StateGroup(frozenset(), frozenset("c"))]

    def apply(self, tensors):
        return {"c": torch.ones(3)}

    def inverse(self, *, lossy=False):
        raise NotImplementedError


# ---- forms of a model state


@pytest.mark.parametrize("form", ["folder", "file", "url of a folder", "url of a file"])
def test_single_file_in_every_form_of_path(tmp_path, form):
    """Contract 38."""
    tensors = {"w": torch.randn(3, 4), "n": torch.tensor(7)}
    save_file(tensors, tmp_path / "model.safetensors")
    path = {
        "folder": tmp_path,
        "file": tmp_path / "model.safetensors",
        "url of a folder": f"file://{tmp_path}",
        "url of a file": f"file://{tmp_path}/model.safetensors",
    }[form]
    targets = like(tensors)
    report = load_model_state(path, IdentityMapper(targets), targets)
    assert all(torch.equal(targets[name], tensors[name]) for name in tensors)
    assert report.missing == report.unexpected == ()


def test_memory_url():
    folder = Folder("memory://weights-reader")
    folder.make()
    folder.write_durably("other.safetensors", save({"w": torch.arange(5.0)}))
    targets = {"w": torch.zeros(5)}
    load_model_state("memory://weights-reader/other.safetensors", IdentityMapper(targets), targets)
    assert torch.equal(targets["w"], torch.arange(5.0))


@pytest.mark.parametrize("path", ["model", "model/model.safetensors.index.json"])
def test_sharded_as_other_tools_write_it(tmp_path, path):
    tensors = {f"layers.{i}.weight": torch.randn(4, i + 1) for i in range(5)}
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    write_shards(tmp_path / "model", {file: {n: tensors[n] for n in part} for file, part in shards.items()})
    targets = like(tensors)
    load_model_state(tmp_path / path, IdentityMapper(targets), targets)
    assert all(torch.equal(targets[name], tensors[name]) for name in tensors)


def test_a_single_file_goes_before_an_index(tmp_path):
    """The order of other tools, on which replacing one form by the other relies."""
    folder = write_shards(tmp_path / "m", {"1.safetensors": {"a": torch.ones(1)}})
    save_file({"a": torch.full((1,), 2.0)}, folder / "model.safetensors")
    targets = {"a": torch.zeros(1)}
    load_model_state(folder, IdentityMapper(targets), targets)
    assert targets["a"] == 2


def test_headers_tell_everything_before_data(tmp_path):
    save_file({"w": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    reader = ModelStateReader(tmp_path)
    assert reader.files == ["model.safetensors"]
    assert reader.entries["w"].shape == (2, 3) and reader.entries["w"].dtype == torch.bfloat16


# ---- dtypes, layouts, devices


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_dtype_is_read_bit_by_bit(tmp_path, dtype):
    raw = torch.arange(48, dtype=torch.uint8)
    raw = raw % 2 if dtype == torch.bool else raw
    tensor = raw.view(dtype).reshape(2, -1)
    header = json.dumps({"w": {"dtype": DTYPE_NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [0, 48]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(raw.tolist()))
    targets = {"w": torch.zeros(48, dtype=torch.uint8).view(dtype).reshape(2, -1)}
    load_model_state(tmp_path, IdentityMapper(targets), targets)
    assert torch.equal(targets["w"].view(-1).view(torch.uint8), raw)


def test_scalars_empty_tensors_and_strided_targets(tmp_path):
    """B90: the target keeps its strides."""
    tensors = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "t": torch.randn(3, 4), "image": torch.randn(2, 3, 4, 5)}
    save_file(tensors, tmp_path / "model.safetensors")
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    targets = {"scalar": torch.tensor(0.0), "empty": torch.empty(0, 3), "t": torch.zeros(4, 3).t(), "image": image}
    strides = {name: target.stride() for name, target in targets.items()}
    load_model_state(tmp_path, IdentityMapper(targets), targets)
    assert all(torch.equal(targets[name], tensors[name]) for name in tensors)
    assert {name: target.stride() for name, target in targets.items()} == strides


def test_parameters_are_filled_in_place_and_stay_trainable(tmp_path):
    save_file({"weight": torch.full((2, 3), 4.0)}, tmp_path / "model.safetensors")
    layer = torch.nn.Linear(3, 2, bias=False)
    address = layer.weight.data_ptr()
    load_model_state(tmp_path, IdentityMapper(["weight"]), dict(layer.named_parameters()))
    assert layer.weight.data_ptr() == address and layer.weight.requires_grad and layer.weight.is_leaf
    assert torch.equal(layer.weight, torch.full((2, 3), 4.0))


def test_slices_of_one_storage_touch_only_their_part(tmp_path):
    save_file({"w": torch.full((2, 3), 4.0)}, tmp_path / "model.safetensors")
    storage = torch.zeros(4, 3)
    load_model_state(tmp_path, IdentityMapper(["w"]), {"w": storage[1:3]})
    assert torch.equal(storage, torch.tensor([0.0, 4.0, 4.0, 0.0])[:, None].expand(4, 3))


@pytest.mark.parametrize(
    ("stored", "wanted"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float32)]
)
def test_floating_point_is_converted(tmp_path, stored, wanted):
    tensor = torch.randn(50).to(stored)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    targets = {"w": torch.zeros(50, dtype=wanted)}
    load_model_state(tmp_path, IdentityMapper(targets), targets)
    assert torch.equal(targets["w"], tensor.to(wanted))


@pytest.mark.parametrize(("stored", "wanted"), [(torch.int64, torch.float32), (torch.float32, torch.int64), (torch.int32, torch.int64)])
def test_other_conversions_are_refused(tmp_path, stored, wanted):
    save_file({"w": torch.ones(3, dtype=stored)}, tmp_path / "model.safetensors")
    targets = {"w": torch.zeros(3, dtype=wanted)}
    with pytest.raises(CheckpointError, match=f"'w' is {stored} in the files, {wanted} in the model"):
        load_model_state(tmp_path, IdentityMapper(targets), targets)
    assert not targets["w"].any()


# ---- names that do not fit


def test_a_file_that_was_asked_for_is_named(tmp_path):
    """Issue 5, bad input: not only its folder, which may hold others."""
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"other\.safetensors does not fit"):
        load_model_state(tmp_path / "other.safetensors", IdentityMapper(["b"]), {"b": torch.ones(1)})


def test_a_missing_name_is_an_error(tmp_path):
    """B95. Contract 12."""
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    targets = {"a": torch.zeros(1), "lost": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"1 missing.*'lost'"):
        load_model_state(tmp_path, IdentityMapper(targets), targets)
    assert targets["a"] == 0


def test_an_extra_name_is_an_error(tmp_path):
    """B95."""
    save_file({"a": torch.ones(1), "extra": torch.ones(1)}, tmp_path / "model.safetensors")
    targets = {"a": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"1 unexpected.*'extra'"):
        load_model_state(tmp_path, IdentityMapper(targets), targets)
    assert targets["a"] == 0


def test_allowed_names_pass_and_are_returned(tmp_path):
    """B95."""
    save_file({"a": torch.ones(1), "old.1": torch.ones(1), "old.2": torch.ones(1)}, tmp_path / "model.safetensors")
    targets = {"a": torch.zeros(1), "head.weight": torch.full((1,), 3.0)}
    report = load_model_state(tmp_path, IdentityMapper(targets), targets, allow_missing=["head.*"], allow_unexpected="old.*")
    assert report.missing == ("head.weight",) and report.unexpected == ("old.1", "old.2")
    assert targets["a"] == 1 and targets["head.weight"] == 3


def test_one_error_lists_everything_before_data_is_read(tmp_path):
    """B95. Contract 35."""
    save_file({"ok": torch.ones(1), "extra": torch.ones(1), "w": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    targets = {"ok": torch.zeros(1), "lost": torch.zeros(1), "w": torch.zeros(3, 2)}
    with pytest.raises(CheckpointError) as caught:
        load_model_state(tmp_path, IdentityMapper([*targets, "foreign"]), targets)
    text = str(caught.value)
    for words in ("'lost'", "'extra'", "'foreign'", "'w' is [2, 3] in the files, [3, 2] in the model", "allow_missing", str(tmp_path)):
        assert words in text
    assert targets["ok"] == 0


def test_targets_on_meta_and_wrong_aliases_are_refused(tmp_path):
    """B89: nothing stays on meta."""
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"meta device\): a"):
        load_model_state(tmp_path, IdentityMapper(["a"]), {"a": torch.zeros(1, device="meta")})
    for aliases in ({"b": "c"}, {"a": "a"}):
        with pytest.raises(ConfigurationError, match="aliases maps"):
            load_model_state(tmp_path, IdentityMapper(["a"]), {"a": torch.zeros(1)}, aliases=aliases)


# ---- tied weights


@pytest.mark.parametrize("listed", [["embed", "norm"], ["embed", "head", "norm"]])
@pytest.mark.parametrize("held", [["embed"], ["head"], ["embed", "head"]])
def test_tied_weights_load_from_either_name(tmp_path, held, listed):
    """B89. Contract 12."""
    weight = torch.randn(4, 2)
    save_file({**{name: weight.clone() for name in held}, "norm": torch.ones(2)}, tmp_path / "model.safetensors")
    targets = {"embed": torch.zeros(4, 2), "norm": torch.zeros(2)}
    load_model_state(tmp_path, IdentityMapper(listed), targets, aliases={"head": "embed"})
    assert torch.equal(targets["embed"], weight) and torch.equal(targets["norm"], torch.ones(2))


def test_tied_weights_missing_under_both_names_are_an_error(tmp_path):
    """B89."""
    save_file({"norm": torch.ones(2)}, tmp_path / "model.safetensors")
    targets = {"embed": torch.zeros(4, 2), "norm": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"1 missing.*'embed' \(made from 'head'\)"):
        load_model_state(tmp_path, IdentityMapper(targets), targets, aliases={"head": "embed"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_weights_that_differ_are_an_error(tmp_path, dtype):
    """B89."""
    save_file({"embed": torch.ones(4), "head": torch.zeros(4)}, tmp_path / "model.safetensors")
    targets = {"embed": torch.zeros(4, dtype=dtype)}
    with pytest.raises(CheckpointError, match=r"different values for '(embed' and 'head|head' and 'embed)'"):
        load_model_state(tmp_path, IdentityMapper(targets), targets, aliases={"head": "embed"})


def test_tied_weights_with_a_nan_are_equal_to_themselves(tmp_path):
    weight = torch.tensor([1.0, float("nan")])
    save_file({"embed": weight, "head": weight.clone()}, tmp_path / "model.safetensors")
    targets = {"embed": torch.zeros(2)}
    load_model_state(tmp_path, IdentityMapper(targets), targets, aliases={"head": "embed"})
    assert torch.equal(targets["embed"].nan_to_num(5.0), torch.tensor([1.0, 5.0]))


# ---- groups


def test_a_group_whose_inputs_lie_in_several_files(tmp_path):
    """Contracts 34 and 35."""
    parts = {name: torch.randn(2, 3) for name in "qkv"}
    write_shards(tmp_path / "m", {f"{i}.safetensors": {name: parts[name]} for i, name in enumerate("vqk")})
    targets = {"qkv": torch.zeros(6, 3)}
    load_model_state(tmp_path / "m", Concatenate("qkv", "qkv"), targets)
    assert torch.equal(targets["qkv"], torch.cat([parts["q"], parts["k"], parts["v"]]))


def test_a_group_that_lacks_an_input_names_it(tmp_path):
    """Contract 35."""
    save_file({"q": torch.ones(2, 3), "v": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'qkv' \(made from 'k'\)") as caught:
        load_model_state(tmp_path, Concatenate("qkv", "qkv"), {"qkv": torch.zeros(6, 3)})
    assert "unexpected" not in str(caught.value).split("Usual cause")[0]


@pytest.mark.parametrize(
    ("width", "words"), [(3, r"'qkv' is \[6, 3\] in the files, \[6, 4\]"), (2, r"'qkv' cannot be made from .*k \[2, 2\]")]
)
def test_wrong_shapes_of_a_group_are_found_before_data_is_read(tmp_path, width, words):
    """Contract 35: groups are tried on meta tensors."""
    save_file({"q": torch.ones(2, 3), "k": torch.ones(2, width), "v": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    targets = {"qkv": torch.zeros(6, 4)}
    with pytest.raises(CheckpointError, match=words):
        load_model_state(tmp_path, Concatenate("qkv", "qkv"), targets)
    assert not targets["qkv"].any()


def test_one_input_for_two_targets(tmp_path):
    """Contract 36."""
    save_file({"a": torch.arange(3.0)}, tmp_path / "model.safetensors")
    targets = {"x": torch.zeros(3), "y": torch.zeros(3, dtype=torch.bfloat16)}
    load_model_state(tmp_path, FanOut(), targets)
    assert targets["x"].tolist() == targets["y"].tolist() == [0, 1, 2]


def test_constants_need_no_input(tmp_path):
    """Contract 36."""
    save_file({}, tmp_path / "model.safetensors")
    targets = {"c": torch.zeros(3)}
    load_model_state(tmp_path, Ones(), targets)
    assert targets["c"].tolist() == [1, 1, 1]


def test_outputs_other_than_declared_are_refused(tmp_path):
    class Wrong(FanOut):
        def apply(self, tensors):
            return {"x": tensors["a"]}

        def pieces(self, shapes):
            return {}

    save_file({"a": torch.arange(3.0)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"declared the outputs \['x', 'y'\] and made \['x'\]"):
        load_model_state(tmp_path, Wrong(), {"x": torch.zeros(3), "y": torch.zeros(3)})


# ---- memory


def test_matching_targets_are_read_without_any_copy(tmp_path):
    """Contract 34."""
    tensors = {f"w{i}": torch.randn(512, 512) for i in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    targets = like(tensors)
    tracemalloc.start()
    try:
        with LiveBytes() as torch_memory:
            load_model_state(tmp_path, IdentityMapper(targets), targets)
        python_memory = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert torch_memory.peak == 0
    assert python_memory < 512 * 512 * 4 / 2
    assert all(torch.equal(targets[name], tensors[name]) for name in tensors)


def test_conversion_holds_one_tensor_at_a_time(tmp_path):
    """Contract 34."""
    tensors = {f"w{i}": torch.randn(100, 100) for i in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    targets = {name: torch.zeros(100, 100, dtype=torch.bfloat16) for name in tensors}
    with LiveBytes() as memory:
        load_model_state(tmp_path, IdentityMapper(targets), targets)
    assert memory.peak == 100 * 100 * 4


def test_groups_are_freed_when_done(tmp_path):
    """Contract 34: the inputs of the unfinished groups and nothing else."""

    class Pairs(StateMapper):
        def groups(self):
            return [StateGroup(frozenset((f"{i}.a", f"{i}.b")), frozenset((str(i),))) for i in range(4)]

        def apply(self, tensors):
            (whole,) = {name.split(".")[0] for name in tensors}
            return {whole: torch.cat([tensors[name] for name in sorted(tensors)])}

        def inverse(self, *, lossy=False):
            raise NotImplementedError

    write_shards(tmp_path / "m", {f"{i}.safetensors": {f"{i}.a": torch.ones(1000), f"{i}.b": torch.ones(1000)} for i in range(4)})
    targets = {str(i): torch.zeros(2000) for i in range(4)}
    with LiveBytes() as memory:
        load_model_state(tmp_path / "m", Pairs(), targets)
    assert memory.peak == 2 * 1000 * 4 + 2000 * 4
    assert all(target.all() for target in targets.values())


def test_files_are_opened_once_for_data_and_unneeded_ones_never(tmp_path, monkeypatch):
    """Contract 34."""
    write_shards(tmp_path / "m", {f"{i}.safetensors": {f"{i}": torch.ones(1)} for i in range(3)})
    reader_opens = []
    inner = ModelStateReader.open
    monkeypatch.setattr(ModelStateReader, "open", lambda self, file: reader_opens.append(file) or inner(self, file))
    targets = {"2": torch.zeros(1), "0": torch.zeros(1)}
    load_model_state(tmp_path / "m", IdentityMapper(targets), targets, allow_unexpected=["*"])
    assert reader_opens == ["0.safetensors", "2.safetensors"]


# ---- broken input


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"no model state at .*nowhere.*nothing of that name"):
        ModelStateReader(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="the folder is empty"):
        ModelStateReader(tmp_path)


def test_pickles_are_not_opened(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin; pickled weights are not read"):
        ModelStateReader(tmp_path)


def test_files_of_other_names_are_pointed_at(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "adapter.safetensors")
    with pytest.raises(CheckpointError, match=r"found adapter.safetensors; give the path of the file"):
        ModelStateReader(tmp_path)


@pytest.mark.parametrize("cut", [4, 12, 60, -1])
def test_a_truncated_file_is_named(tmp_path, cut):
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        ModelStateReader(tmp_path)


def test_a_file_truncated_after_its_header_was_read_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    reader = ModelStateReader(tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    named = r"model\.safetensors \(tensor 'a'\) ends at byte 464.*truncated"
    with reader.open("model.safetensors") as handle, pytest.raises(CheckpointError, match=named):
        reader.read(handle, "a", torch.zeros(100))


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b"nonsense", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 4]}}', b"[" * 10_000,
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}', b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_hostile_header_is_refused(tmp_path, header):
    """Design promise 5: a file is data."""
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        ModelStateReader(tmp_path)


def test_an_index_that_names_absent_files_and_tensors(tmp_path):
    """Contract 35."""
    folder = write_shards(tmp_path / "m", {"1.safetensors": {"a": torch.ones(1)}}, {"a": "1.safetensors", "b": "2.safetensors"})
    with pytest.raises(CheckpointError, match=r"files that are absent: 2.safetensors \(with 'b'\)"):
        ModelStateReader(folder)
    write_shards(folder, {"1.safetensors": {"a": torch.ones(1)}}, {"a": "1.safetensors", "b": "1.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensors that are absent: 'b' in 1.safetensors"):
        ModelStateReader(folder)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "", "..", 3, "a\\b"])
def test_an_index_cannot_lead_out_of_its_folder(tmp_path, file):
    folder = write_shards(tmp_path / "m", {}, {"a": file})
    with pytest.raises(CheckpointError, match="puts tensor 'a' into"):
        ModelStateReader(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 10_000])
def test_a_broken_index_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json is no index"):
        ModelStateReader(tmp_path)


def test_the_index_decides_between_two_copies(tmp_path):
    shards = {"1.safetensors": {"a": torch.ones(1)}, "2.safetensors": {"a": torch.zeros(1), "b": torch.ones(1)}}
    folder = write_shards(tmp_path / "m", shards, {"a": "1.safetensors", "b": "2.safetensors"})
    assert ModelStateReader(folder).file_of == {"a": "1.safetensors", "b": "2.safetensors"}
