"""Model states of a pipeline: the files are those of one process, whatever the layout, and any of them loads into any layout."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.ranks.support import MeanOutput, Parts, on_mesh, t
from trainer_kit import CausalLMTask, ModelProvider, StageInfo
from trainer_kit.exceptions import CheckpointError, ModelError
from trainer_kit.model import distribute_layers
from trainer_kit.models import Decoder, DecoderConfig
from trainer_kit.testing import run_on_ranks
from trainer_kit.weights import StateGroup, StateMapper

ZBV = {"pp": 2, "pipeline": "zbv"}  # the first and the last stage on rank 0
INTERLEAVED = {"pp": 2, "pipeline": "interleaved_1f1b", "stages_per_rank": 2}
LAYOUTS = {
    "zbv": (2, ZBV),
    "interleaved": (2, INTERLEAVED),
    "dp_shard 2": (4, {"pp": 2, "dp_shard": 2}),
    "tp 2": (4, {"pp": 2, "tp": 2}),
    "zbv x dp_shard 2": (4, {**ZBV, "dp_shard": 2, "fsdp_sync": "pack"}),
}


def digests(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*.*")) if p.is_file()}


def data(value: float = 1.0) -> Parts:
    return Parts(*([[t(value, value)]] for _ in range(2)))


# ---- files


def export_decoders(folder, degrees):
    """Of a decoder with and without tied embeddings: one file, and shards in another dtype; the names that this rank was told."""
    told = []
    for tie in (True, False):
        config = DecoderConfig(
            vocab_size=7, num_layers=4, num_heads=2, hidden_size=8, intermediate_size=12, max_seq_len=4, tie_embeddings=tie
        )
        trainer = on_mesh(lambda stage, config=config: Decoder(config, stage), CausalLMTask(), data(), degrees)
        told.append(trainer.export(f"{folder}/{tie}/one"))
        if tie:
            told.append(trainer.export(f"{folder}/{tie}/shards", dtype=torch.bfloat16, max_shard_size=1000))
        trainer.close()
    return told


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return export_decoders(str(folder), {}), folder


@pytest.mark.parametrize("layout", ["zbv", "interleaved", "dp_shard 2", "tp 2"])
def test_the_files_are_those_of_one_process(layout, decoders, tmp_path):
    """B98, B89 and promise 1: byte for byte, in one file and in shards; a tied weight is there once, and every rank knows the names."""
    told, folder = decoders
    num_ranks, degrees = LAYOUTS[layout]
    assert run_on_ranks(num_ranks, export_decoders, str(tmp_path), degrees) == [told] * num_ranks
    assert digests(tmp_path) == digests(folder) and len(told[1]) > 4
    names = load_file(tmp_path / "True" / "one" / "model.safetensors").keys()
    assert "embedding.weight" in names and "head.weight" not in names


class Block(nn.Module):
    """Has buffers between its parameters: running statistics, and a counter of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


class Net(nn.Module):
    """The blocks of a stage; the weight of the embedding is the head, too."""

    def __init__(self, stage: StageInfo | None = None, *, tie: bool = True, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.stage, self.tie = stage or StageInfo(), tie
        if self.stage.is_first:
            self.embedding = nn.Linear(2, 2, bias=False)
        self.layers = nn.ModuleDict({str(n): Block() for n in distribute_layers(4, self.stage.num_stages)[self.stage.index]})
        if self.stage.is_last:
            self.head = nn.Linear(2, 2)
            if tie and self.stage.is_first:
                self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))

    def tied_parameters(self) -> dict[str, str]:
        return {"head.weight": "embedding.weight"} if self.tie and self.stage.is_last and not self.stage.is_first else {}

    def forward(self, inputs: torch.Tensor, shared: None = None) -> torch.Tensor:
        x = self.embedding(inputs.expand(-1, 2)) if self.stage.is_first else inputs
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.stage.is_last else x

    def stage_transfer_spec(self, inputs: torch.Tensor, boundary: str) -> torch.Tensor:
        return torch.empty(len(inputs), 2, device="meta")


class Rename(StateMapper):
    """Renames tensors; `joined` names some of which one file tensor is made, side by side. The inverse takes both back."""

    def __init__(self, names: Mapping[str, str], joined: tuple[str, ...] = (), *, out: bool = True) -> None:
        self.names, self.joined, self.out = dict(names), joined, out

    def groups(self):
        joined = [StateGroup(frozenset(self.joined), frozenset({"joined"}))] if self.joined else []
        groups = [*joined, *(StateGroup(frozenset({a}), frozenset({b})) for a, b in self.names.items())]
        return groups if self.out else [StateGroup(group.outputs, group.inputs) for group in groups]

    def apply(self, tensors):
        if self.out and set(tensors) == set(self.joined):
            return {"joined": torch.stack([tensors[name] for name in self.joined])}
        if "joined" in tensors:
            return dict(zip(self.joined, tensors["joined"].unbind(), strict=True))
        names = self.names if self.out else {b: a for a, b in self.names.items()}
        return {names[name]: tensor for name, tensor in tensors.items()}

    def inverse(self, *, lossy=False):
        return Rename(self.names, self.joined, out=not self.out)


class Foreign(ModelProvider):
    """Every stage describes its own part of files that use other names."""

    def __init__(self, tie: bool = True) -> None:
        self.tie = tie

    def initialize_model_stage(self, ctx):
        return Net(ctx.stage, tie=self.tie)

    def load_mapper(self, ctx):
        renamed = {"embedding.weight": "model.embed.weight", "head.weight": "lm_head.weight", "head.bias": "lm_head.bias"}
        state = ctx.built().state_dict()
        names = [name for name in state if not (name == "head.weight" and self.tie and ctx.stage.num_stages == 1)]
        return Rename({name: renamed.get(name, f"model.{name}") for name in names}, out=False)


class Breaks(Rename):
    """Fails where there are values, which is on one rank alone: the first of the stage."""

    def apply(self, tensors):
        if any(name.startswith("layers.2.linear") and tensor.device.type != "meta" for name, tensor in tensors.items()):
            raise ZeroDivisionError("no such luck")
        return super().apply(tensors)


class Broken(Foreign):
    """Its mapper of the export fails with values; `twice`: two stages make one name."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice

    def export_mapper(self, ctx):
        mapper = super().export_mapper(ctx)
        if not self.twice:
            return Breaks(mapper.names)
        return Rename({name: "model.embed.weight" if name == "head.bias" else new for name, new in mapper.names.items()})


def whole_mapper(tie: bool = True) -> Rename:
    """Of the whole model: joins matrices that lie on the first and on the last stage."""
    joined = ("layers.0.linear.weight", "layers.3.linear.weight")
    names = [name for name in Net(tie=tie).state_dict() if name not in (*joined, *(("head.weight",) if tie else ()))]
    return Rename({name: f"x.{name}" for name in names}, joined)


def make(model, degrees, **settings):
    return on_mesh(model, MeanOutput(), data(), degrees, **settings)


def export_mapped(folder, degrees):
    trainer = make(Foreign(), degrees)
    trainer.export(f"{folder}/foreign")
    trainer.export(f"{folder}/whole", mapper=whole_mapper())
    trainer.close()


@pytest.mark.parametrize("layout", ["zbv x dp_shard 2"])
def test_mappers_give_the_files_of_one_process(layout, tmp_path):
    """B98, contract 36: the mappers of the stages, and one given for the whole model whose groups reach over stages; with buffers."""
    export_mapped(str(tmp_path / "one"), {})
    num_ranks, degrees = LAYOUTS[layout]
    run_on_ranks(num_ranks, export_mapped, str(tmp_path / "ranks"), degrees)
    assert digests(tmp_path / "ranks") == digests(tmp_path / "one")
    names = load_file(tmp_path / "ranks" / "foreign" / "model.safetensors").keys()
    assert "model.embed.weight" in names and "lm_head.weight" not in names and "model.layers.3.norm.num_batches_tracked" in names


def said_by(call):
    try:
        call()
    except (CheckpointError, ModelError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fail_to_export(folder, foreign, degrees):
    """What this rank was told by exports that fail in several places, and a good one in the end."""
    said = []
    for twice in (False, True):
        trainer = make(Broken(twice), degrees)
        said.append(said_by(lambda trainer=trainer: trainer.export(f"{folder}/m")))
        trainer.close()
    trainer = make(Foreign(), degrees)
    names = whole_mapper().names
    said.append(said_by(lambda: trainer.export(foreign)))
    said.append(said_by(lambda: trainer.export(f"{folder}/m", mapper=Rename({**names, "nothing": "y"}, whole_mapper().joined))))
    said.append(said_by(lambda: trainer.export(f"{folder}/m", mapper=Rename(names))))
    trainer.export(f"{folder}/m")
    trainer.close()
    return said


def test_an_export_that_fails_on_one_rank_fails_on_all(tmp_path):
    """B43: on the first rank of a stage, on rank 0, or everywhere; nobody waits, nothing is left, and the next export works."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.safetensors").write_bytes(b"of someone else")
    results = run_on_ranks(4, fail_to_export, str(tmp_path), str(tmp_path / "foreign"), LAYOUTS["dp_shard 2"][1], timeout=40.0)
    assert results == results[:1] * 4
    broken, twice, foreign, missing, unused = results[0]
    assert broken == "ZeroDivisionError: no such luck"
    assert "stages 0 and 1 both make 'model.embed.weight'" in twice
    assert "no export of trainer_kit" in foreign
    assert "needs nothing, which the model does not have" in missing
    assert "leaves out layers.0.linear.weight, layers.3.linear.weight of the model" in unused
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["model.safetensors"]


# ---- loading


def load_and_export(folder, degrees):
    """Load every model state below `folder`, of the model's own names or of foreign ones, and export it again."""
    for source in sorted(path for path in Path(folder).glob("*-*") if not path.name.startswith("again")):
        form, tie = source.name.split("-")[:2]
        model = Foreign(tie == "tied") if form == "foreign" else lambda stage, tie=tie: Net(stage, tie=tie == "tied")
        trainer = make(model, degrees, source_model=source, seed=5)
        trainer.export(f"{folder}/again/{source.name}")
        trainer.close()


@pytest.mark.parametrize("layout", ["zbv x dp_shard 2"])
def test_any_layout_loads_what_another_one_wrote(layout, tmp_path):
    """Contracts 12, 34 and promise 3; B89: the model's names and foreign ones, tied weights from the name of either stage, or from both."""
    for form in ("own", "foreign"):
        for tie in ("tied", "untied")[: 2 if form == "own" else 1]:
            trainer = make(Foreign(tie == "tied") if form == "foreign" else lambda stage, tie=tie: Net(stage, tie=tie == "tied"), {})
            trainer.export(tmp_path / f"{form}-{tie}")
            trainer.close()
    expected = digests(tmp_path)
    for form, first, other in (("own", "embedding.weight", "head.weight"), ("foreign", "model.embed.weight", "lm_head.weight")):
        state = load_file(tmp_path / f"{form}-tied" / "model.safetensors")
        for kept in ("other", "both")[: 1 if form == "own" else 2]:
            given = {**state, other: state[first].clone()}
            if kept == "other":
                del given[first]
            (tmp_path / f"{form}-tied-{kept}").mkdir()
            save_file(given, tmp_path / f"{form}-tied-{kept}" / "model.safetensors")
    num_ranks, degrees = LAYOUTS[layout]
    run_on_ranks(num_ranks, load_and_export, str(tmp_path), degrees)
    found = digests(tmp_path / "again")
    for name, digest in found.items():
        assert digest == expected[name.replace("-other", "").replace("-both", "")], name
    assert len(found) == 6


def fail_to_load(folder, degrees):
    said = {}
    for source in sorted(Path(folder).iterdir()):
        model = Foreign() if source.stem.startswith("foreign") else Net
        said[source.stem] = said_by(lambda model=model, source=source: make(model, degrees, source_model=source).build())
    return said


def test_what_does_not_fit_is_said_on_every_rank_as_in_one_process(tmp_path):
    """B95, contracts 12, 35: missing, unexpected and mis-shaped names of any stage in one message, and two values of a tied weight."""
    states = {}
    for form, provider in (("own", Net), ("foreign", Foreign())):
        trainer = make(provider, {})
        trainer.export(tmp_path / form)
        trainer.close()
        states[form] = load_file(tmp_path / form / "model.safetensors")
    (given := tmp_path / "given").mkdir()
    own, foreign = states["own"], states["foreign"]
    save_file({n: x for n, x in own.items() if n not in ("embedding.weight", "layers.3.norm.bias")}, given / "missing.safetensors")
    save_file({**own, "layers.4.norm.bias": torch.ones(2), "a": torch.ones(2)}, given / "unexpected.safetensors")
    wrong = {name: torch.ones(3) for name in ("embedding.weight", "layers.0.norm.bias", "head.bias")}
    save_file({**own, **wrong}, given / "shapes.safetensors")
    save_file({**own, "head.weight": own["embedding.weight"] + 1}, given / "contradiction.safetensors")
    save_file({**foreign, "lm_head.weight": foreign["model.embed.weight"] + 1}, given / "foreign.safetensors")
    first, *others = run_on_ranks(4, fail_to_load, str(given), LAYOUTS["zbv x dp_shard 2"][1])
    assert others == [first] * 3
    one = fail_to_load(str(given), {})
    for name in ("missing", "unexpected", "shapes"):
        assert first[name] == one[name]
    assert "2 missing (in the model, not in the files): 'embedding.weight'" in one["missing"] and "'layers.3.norm.bias'" in one["missing"]
    assert "2 unexpected (in the files, used by nothing): 'a', 'layers.4.norm.bias'" in one["unexpected"]
    assert "3 of another shape or dtype" in one["shapes"]
    assert "different values for 'embedding.weight' and 'head.weight', which are one tied weight" in one["contradiction"]
    assert "holds different values for" in first["contradiction"] and "('embedding.weight')" in first["contradiction"]
    assert "different values for the copies of the tied weight 'embedding.weight' in the stages 0, 3" in first["foreign"]


class Everything(Foreign):
    """Forgets that there are stages."""

    def load_mapper(self, ctx):
        return Rename({name: name for name in Net().state_dict() if name != "head.weight"}, out=False)


def load_everything(folder):
    return said_by(make(Everything(), {"pp": 2}, source_model=folder).build)


def test_a_mapper_of_the_whole_model_is_refused_where_that_of_a_stage_is_wanted(tmp_path):
    """Contract 35: the message says for whom the tensors are."""
    trainer = make(Net, {})
    trainer.export(tmp_path)
    trainer.close()
    first, second = run_on_ranks(2, load_everything, str(tmp_path))
    assert first == second and "of another stage than that whose mapper makes them (load_mapper(ctx) is for ctx.stage alone)" in first


class Repeated(Net):
    """Has buffers of one name in the first and in the last stage."""

    def __init__(self, stage: StageInfo) -> None:
        super().__init__(stage)
        if stage.is_first or stage.is_last:
            self.statistics = nn.BatchNorm1d(2, affine=False)


def build_repeated():
    return said_by(make(Repeated, ZBV).build)


def test_a_name_of_two_stages_is_refused_on_one_rank_too():
    """Contract 12: both stages are on rank 0, and one of the buffers would be lost."""
    for text in run_on_ranks(2, build_repeated):
        assert "the stages 0 and 3 both have a tensor 'statistics.running_mean'" in text


# ---- checksums


def frozen_checksum(source, degrees):
    """That of frozen weights of several stages, the tied one among them."""
    frozen = ("embedding", "head.weight", "layers.1.norm", "layers.3")
    trainer = make(lambda stage: Net(stage, frozen=frozen), degrees, checkpoint_trainable_only=True, source_model=source)
    trainer.build()
    identity = trainer._training().state.identity["frozen_weights"]
    trainer.close()
    return identity


def test_the_checksum_of_frozen_weights_is_the_same_on_every_layout(tmp_path):
    """Contract 33: a changed base is noticed on a resume, and another layout is no change."""
    make(Net, {}).export(tmp_path / "a")
    state = load_file(tmp_path / "a" / "model.safetensors")
    state["layers.3.norm.bias"][1] += 1e-6
    save_file(state, tmp_path / "b.safetensors")
    one, changed = (frozen_checksum(path, {}) for path in (tmp_path / "a", tmp_path / "b.safetensors"))
    assert one != changed
    num_ranks, degrees = LAYOUTS["zbv x dp_shard 2"]
    assert run_on_ranks(num_ranks, frozen_checksum, str(tmp_path / "a"), degrees) == [one] * num_ranks


# ---- buffers


def buffers_around_an_export(folder, degrees):
    """The persistent buffers of this rank after a step on other samples than the other data rank, before and after an export."""
    parts = Parts([[t(1, 2), t(3, 5)]], [[t(5, 9), t(0, 1)]])
    trainer = on_mesh(lambda stage: Net(stage, tie=False), MeanOutput(), parts, degrees)
    trainer.fit()
    seen = []
    for _ in range(2):
        seen.append({name: buffer.tolist() for name, buffer in trainer.parameters.buffers.items()})
        trainer.export(folder)
    trainer.close()
    return seen


def test_buffers_that_ranks_changed_become_those_of_the_first_rank_of_their_stage(tmp_path):
    """Running statistics on every stage: what the data ranks of a stage saw differs, and one model is exported."""
    results = run_on_ranks(4, buffers_around_an_export, str(tmp_path), {"pp": 2, "dp_replicate": 2})
    for first in (0, 2):
        (before, after), (other_before, other_after) = results[first : first + 2]
        assert before != other_before and after == other_after == before
    written = {name: tensor.tolist() for name, tensor in load_file(tmp_path / "model.safetensors").items() if ".norm.running" in name}
    assert len(written) == 8 and written == {name: x for rank in (0, 2) for name, x in results[rank][0].items() if "running" in name}
