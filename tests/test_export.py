"""Export and its way back: `trainer.export` writes what other tools read, `source_model=` takes it in again, bit for bit."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import quiet_trainer, sgd
from trainer_kit import ModelProvider, SupervisedTask, Trainer
from trainer_kit.callbacks import EMA
from trainer_kit.exceptions import CheckpointError, NonFiniteError
from trainer_kit.gradients import NonFiniteGuard
from trainer_kit.models import Decoder, DecoderConfig
from trainer_kit.optim import AdamW
from trainer_kit.weights import IdentityMapper, StateGroup, StateMapper


class Network(nn.Module):
    """Parameters, a persistent counter of integers, a table that is not saved."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.scale = scale
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        self.register_buffer("calls", torch.tensor(7))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


DATA = [(torch.ones(2, 3), torch.ones(2, 1)), (torch.zeros(2, 3), torch.ones(2, 1))]


def make(model: Any = None, **settings: Any) -> Trainer:
    return quiet_trainer(Network() if model is None else model, SupervisedTask(F.mse_loss), DATA, **{"optimizer": sgd(0.1), **settings})


def written(folder: Path) -> dict[str, torch.Tensor]:
    """By the safetensors library alone."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in safetensors.torch.load_file(file).items()}


def header(folder: Path) -> dict[str, Any]:
    data = (folder / "model.safetensors").read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) and one[n].dtype == other[n].dtype for n in one)


def test_an_export_is_the_state_dict_as_other_tools_read_it(tmp_path):
    """Contract 37: `safetensors.torch.load_file` gives the state dict, with `format: pt`."""
    trainer = make()
    trainer.fit()
    assert trainer.export(tmp_path / "model") == ["model.safetensors"]
    assert same(written(tmp_path / "model"), trainer.model.state_dict())
    with safetensors.safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize("where", ["folder", "file", "url"])
@pytest.mark.parametrize("form", ["instance", "callable"])
def test_the_way_back_is_exact(form, where, tmp_path):
    """Both forms of a model start from the file's values, whatever theirs were; buffers that are not saved stay theirs."""
    trainer = make()
    trainer.fit()
    folder = f"memory://{tmp_path.name}/{form}" if where == "url" else tmp_path / "model"
    trainer.export(folder)
    source = folder / "model.safetensors" if where == "file" else folder
    model = Network() if form == "instance" else build_network
    again = make(model, source_model=source)
    again.build()
    assert same(again.model.state_dict(), trainer.model.state_dict())
    assert torch.equal(again.model.table, torch.arange(3.0))


def build_network() -> nn.Module:
    class Resets(Network):
        def reset_parameters(self):
            self.calls.zero_()
            self.table.copy_(torch.arange(3.0))

    return Resets()


def test_shards_and_their_index(tmp_path):
    """Contract 37: by size, a tensor above the limit alone, and the index names every file."""
    trainer = make()
    trainer.build()
    files = trainer.export(tmp_path / "model", max_shard_size=32)
    assert files[-1] == "model.safetensors.index.json" and len(files) > 3
    index = json.loads((tmp_path / "model" / files[-1]).read_text())
    state = trainer.model.state_dict()
    assert set(index["weight_map"]) == set(state) and set(index["weight_map"].values()) == set(files[:-1])
    assert index["metadata"]["total_size"] == sum(x.numel() * x.element_size() for x in state.values())
    assert same(written(tmp_path / "model"), state)
    again = make(source_model=tmp_path / "model")
    again.build()
    assert same(again.model.state_dict(), state)


def test_exported_twice_the_bytes_are_equal(tmp_path):
    """B98 on one process; and an export changes nothing of the run."""
    trainer = make()
    trainer.fit()
    trainer.export(tmp_path / "a")
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.export(tmp_path / "b", max_shard_size=40)
    trainer.export(tmp_path / "b")
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["model.safetensors"]
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert same(trainer.model.state_dict(), before)


def test_the_dtype_of_an_export_is_an_argument(tmp_path):
    """B93: fp32 training, export in bf16: floating tensors are bf16 in the header, integers as they are, the live model still fp32."""
    trainer = make()
    trainer.fit()
    trainer.export(tmp_path / "half", dtype=torch.bfloat16)
    trainer.export(tmp_path / "full")
    dtypes = {name: entry["dtype"] for name, entry in header(tmp_path / "half").items() if name != "__metadata__"}
    assert dtypes.pop("calls") == "I64" and set(dtypes.values()) == {"BF16"}
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    expected = {n: x.bfloat16() if x.is_floating_point() else x for n, x in trainer.model.state_dict().items()}
    assert same(written(tmp_path / "half"), expected)
    assert {entry["dtype"] for name, entry in header(tmp_path / "full").items() if name.startswith("first")} == {"F32"}
    again = make(source_model=tmp_path / "half")
    again.build()
    assert torch.equal(again.model.first.weight, expected["first.weight"].float())


def tied(*, is_tied: bool = True) -> nn.Module:
    return Decoder(DecoderConfig(vocab_size=5, num_layers=1, num_heads=1, hidden_size=4, intermediate_size=4, tie_embeddings=is_tied))


class Logits(SupervisedTask):
    def __init__(self):
        super().__init__(lambda out, target: out.mean())


def make_decoder(model: nn.Module, **settings: Any) -> Trainer:
    return quiet_trainer(model, Logits(), [(torch.tensor([[1, 2]]), torch.ones(1))], **settings)


def test_a_tied_weight_is_written_once_under_its_first_name(tmp_path):
    """B89: the embedding; and the result is documented in export()."""
    trainer = make_decoder(tied())
    trainer.fit()
    trainer.export(tmp_path / "model")
    names = set(written(tmp_path / "model"))
    assert "embedding.weight" in names and "head.weight" not in names
    assert "first name" in Trainer.export.__doc__


@pytest.mark.parametrize("kept", [("embedding.weight",), ("head.weight",), ("embedding.weight", "head.weight")])
def test_a_tied_model_takes_either_name(kept, tmp_path):
    """B89: a file with the embedding alone, the head alone, or both."""
    trainer = make_decoder(tied())
    trainer.export(tmp_path / "model")
    state = written(tmp_path / "model")
    weight = state.pop("embedding.weight")
    safetensors.torch.save_file({**state, **{name: weight.clone() for name in kept}}, tmp_path / "given.safetensors")
    again = make_decoder(tied(), source_model=tmp_path / "given.safetensors")
    again.build()
    assert again.model.head.weight is again.model.embedding.weight
    assert torch.equal(again.model.embedding.weight, weight)


def test_two_values_for_one_tied_weight_are_refused(tmp_path):
    """B89: which one is right cannot be known."""
    make_decoder(tied()).export(tmp_path / "model")
    state = written(tmp_path / "model")
    state["head.weight"] = state["embedding.weight"] + 1
    safetensors.torch.save_file(state, tmp_path / "given.safetensors")
    with pytest.raises(CheckpointError, match=r"different values.*'embedding.weight'.*'head.weight'"):
        make_decoder(tied(), source_model=tmp_path / "given.safetensors").build()


def test_an_untied_model_needs_both(tmp_path):
    """B89, B95: a tied export lacks the head of an untied model; nothing stays random in silence."""
    make_decoder(tied()).export(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"missing.*'head.weight'"):
        make_decoder(tied(is_tied=False), source_model=tmp_path / "model").build()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("first.bias"), "1 missing .*'first.bias'"),
        (lambda state: state.update(extra=torch.ones(1)), "1 unexpected .*'extra'"),
        (lambda state: state.update({"first.bias": torch.ones(5)}), r"'first.bias' is \[5\] in the files, \[4\] in the model"),
        (lambda state: state.update(calls=torch.tensor(7.0)), "'calls' is torch.float32 in the files, torch.int64"),
    ],
)
def test_what_does_not_fit_the_model_is_named_before_anything_is_read(change, words, tmp_path):
    """B95 and contract 12: missing, unexpected, of another shape or kind; the model keeps the values it had."""
    make().export(tmp_path / "model")
    state = written(tmp_path / "model")
    change(state)
    safetensors.torch.save_file(state, tmp_path / "given.safetensors")
    model = Network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=words):
        make(model, source_model=tmp_path / "given.safetensors").build()
    assert same(model.state_dict(), before)


class Prefix(StateMapper):
    """Adds a prefix to every name, and turns matrices; the inverse takes both away."""

    def __init__(self, names: Sequence[str], prefix: str = "model.", *, adds: bool = True):
        self.names, self.prefix, self.adds = tuple(names), prefix, adds

    def groups(self):
        pairs = [(name, self.prefix + name) for name in self.names]
        return [StateGroup(frozenset({a}), frozenset({b})) for a, b in (pairs if self.adds else [(b, a) for a, b in pairs])]

    def apply(self, tensors):
        ((name, tensor),) = tensors.items()
        renamed = self.prefix + name if self.adds else name.removeprefix(self.prefix)
        return {renamed: tensor.t() if tensor.ndim == 2 else tensor}

    def inverse(self, *, lossy=False):
        return Prefix(self.names, self.prefix, adds=not self.adds)


class Foreign(ModelProvider):
    """Describes the layout of the files once, for loading."""

    def initialize_model_stage(self, ctx):
        return build_network()

    def load_mapper(self, ctx):
        return Prefix([*ctx.built().state_dict()], adds=False)


def test_one_mapping_serves_both_ways(tmp_path):
    """Promise 3: the export mapper is the inverse of the load mapper."""
    trainer = make(Foreign())
    trainer.fit()
    trainer.export(tmp_path / "model")
    state = trainer.model.state_dict()
    expected = {f"model.{name}": tensor.t().contiguous() if tensor.ndim == 2 else tensor for name, tensor in state.items()}
    assert same(written(tmp_path / "model"), expected)
    again = make(Foreign(), source_model=tmp_path / "model")
    again.build()
    assert same(again.model.state_dict(), state)


def test_a_mapper_can_be_given_to_the_export(tmp_path):
    trainer = make()
    trainer.export(tmp_path / "model", mapper=Prefix([*trainer_state(trainer)]), max_shard_size="1KB")
    assert set(written(tmp_path / "model")) == {f"model.{name}" for name in trainer_state(trainer)}


def trainer_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    trainer.build()
    return trainer.model.state_dict()


def test_a_mapper_that_leaves_something_out_is_refused(tmp_path):
    """B95: an export is complete or it is not made."""
    trainer = make()
    with pytest.raises(ValueError, match=r"leaves out calls"):
        trainer.export(tmp_path / "model", mapper=IdentityMapper([n for n in trainer_state(trainer) if n != "calls"]))
    assert not (tmp_path / "model").exists()


def test_transposed_parameters_are_written_row_by_row(tmp_path):
    """B90: the strides of the live parameter stay."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 4).t())

        def forward(self, x):
            return x @ self.w[:3]

    trainer = make(Turned())
    trainer.export(tmp_path / "model")
    assert torch.equal(written(tmp_path / "model")["w"], trainer.model.w) and trainer.model.w.stride() == (1, 4)


@pytest.mark.parametrize(
    "settings", [{}, {"activation_checkpointing": ("first",)}, {"precision": "bf16-mixed"}, {"optimizer": AdamW(lr=0.1)}]
)
def test_the_names_are_the_models_own_whatever_is_switched_on(settings, tmp_path):
    trainer = make(**settings)
    trainer.fit()
    trainer.export(tmp_path / "model")
    assert same(written(tmp_path / "model"), trainer.model.state_dict()) and set(written(tmp_path / "model")) == set(Network().state_dict())


def test_a_compiled_model_keeps_its_names(tmp_path):
    """`torch.compile` puts a prefix into names; a file that had it would load nowhere."""
    model = torch.compile(Network(), backend="eager")
    trainer = make(model)
    trainer.export(tmp_path / "model")
    assert set(written(tmp_path / "model")) == set(Network().state_dict())
    again = make(torch.compile(Network(), backend="eager"), source_model=tmp_path / "model")
    again.build()
    assert same(written(tmp_path / "model"), {n.removeprefix("_orig_mod."): x for n, x in again.model.state_dict().items()})


def test_the_averages_can_be_exported(tmp_path):
    ema = EMA(0.5)
    trainer = make(callbacks=[ema])
    trainer.fit()
    live = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with ema.applied(trainer):
        trainer.export(tmp_path / "averages")
    found = written(tmp_path / "averages")
    assert all(torch.equal(found[name], average) for name, average in ema.averages.items())
    assert all(torch.equal(p, live[name]) for name, p in trainer.model.named_parameters())


def test_frozen_weights_are_exported_too(tmp_path):
    model = Network()
    model.first.requires_grad_(False)
    trainer = make(model)
    trainer.fit()
    trainer.export(tmp_path / "model")
    assert same(written(tmp_path / "model"), model.state_dict())


def test_a_bad_gradient_that_was_not_read_yet_stops_an_export(tmp_path, monkeypatch):
    """Design decision 6: what is read late is read before an export."""

    def resolve(self):
        raise NonFiniteError("step 1")

    trainer = make()
    trainer.fit()
    monkeypatch.setattr(NonFiniteGuard, "resolve", resolve)
    with pytest.raises(NonFiniteError):
        trainer.export(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_companions_and_the_dtype_they_tell(tmp_path):
    """B93: the config beside bf16 weights says bf16, whatever that of the base says."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float32"}))
    make().export(tmp_path / "model", dtype=torch.bfloat16, companions=tmp_path)
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == {"model_type": "llama", "torch_dtype": "bfloat16"}
    assert {x.dtype for name, x in written(tmp_path / "model").items() if name != "calls"} == {torch.bfloat16}


def streamed(trainer: Trainer, *args: Any, **options: Any) -> list[list[tuple[str, torch.Tensor]]]:
    with trainer.model_state(*args, **options) as buckets:
        return list(buckets)


def test_the_model_state_is_a_stream_of_what_an_export_writes(tmp_path):
    """In its order, mapped and cast alike, in buckets of at most so many bytes or one larger tensor."""
    trainer = make(Foreign())
    trainer.fit()
    trainer.export(tmp_path / "model", dtype=torch.bfloat16)
    buckets = streamed(trainer, bucket_bytes=16, dtype=torch.bfloat16)
    assert same({name: tensor for bucket in buckets for name, tensor in bucket}, written(tmp_path / "model"))
    assert [[name for name, _ in bucket] for bucket in buckets] == [
        ["model.calls"], ["model.first.weight"], ["model.first.bias", "model.second.weight"], ["model.second.bias"],
    ]  # fmt: skip
    with trainer.model_state() as whole, trainer.model_state(to="main", bucket_bytes="1GB") as main:
        assert len(whole) == len(main) == 1 and len(next(whole)) == len(next(main)) == 5
        assert list(whole) == []


def test_the_tensors_of_a_stream_do_not_change_with_the_model():
    """They are the receiver's own, whatever the mapper gives back."""
    trainer = make()
    trainer.build()
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    for mapper in (None, IdentityMapper(before), SameTensors(before)):
        found = {name: tensor for bucket in streamed(trainer, mapper) for name, tensor in bucket}
        with torch.no_grad():
            trainer.model.first.weight.add_(1)
        assert same(found, before)
        trainer.model.load_state_dict(before)


class SameTensors(Prefix):
    """Hands its inputs through."""

    def __init__(self, names: Sequence[str]):
        super().__init__(names, "")

    def apply(self, tensors):
        return dict(tensors)


def test_what_a_stream_is_asked_for_is_checked():
    trainer = make()
    asked = ({"to": "rank 0"}, {"bucket_bytes": "big"}, {"mapper": 3})
    for options, words in zip(asked, ('expected "all" or "main"', "bucket_bytes='big'", r"model_state\(mapper=3\)"), strict=True):
        with pytest.raises(ValueError, match=words):
            streamed(trainer, **options)
