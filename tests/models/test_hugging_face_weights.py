"""Weights in the layout of Hugging Face, there and back: prefixes, heads that differ, ties, expert layouts, stages.

No transformers here: that it reads and writes the same is for `tests/parity/huggingface.py`.
"""

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import MeanTask, quiet_trainer
from trainer_kit import CausalLMTask, MeshStrategy
from trainer_kit.exceptions import CheckpointError
from trainer_kit.mesh import DistributedContext
from trainer_kit.model import StageInfo
from trainer_kit.model.provider import StageContext
from trainer_kit.models import (
    Decoder,
    DecoderConfig,
    Embedding,
    HuggingFaceProvider,
    LanguageModeling,
    MoEConfig,
    SequenceClassification,
    TokenClassification,
    hf_config,
    provider_from_hf,
)
from trainer_kit.names import state_names

DENSE = DecoderConfig(vocab_size=12, num_layers=2, num_heads=2, hidden_size=8, intermediate_size=16, max_seq_len=8)
EXPERTS = MoEConfig(num_experts=3, num_experts_per_token=2, intermediate_size=6, dense_layers=(0,))
MIXED = replace(DENSE, moe=EXPERTS, qk_norm=True)
CONTEXT = DistributedContext(MeshStrategy(), torch.device("cpu"))
ROWS = [torch.arange(8).unsqueeze(0)]


def stored(config, folder, *, rename=lambda name: name, **more):
    """A folder of Hugging Face with random weights for this model, as our own export writes them; and the tensors."""
    trainer = quiet_trainer(HuggingFaceProvider(config), CausalLMTask(), ROWS)
    trainer.export(folder)
    trainer.close()
    tensors = {rename(name): torch.randn(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()} | more
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    return tensors


def loaded(folder, path=None, **options):
    """A built trainer of the folder's model."""
    trainer = quiet_trainer(provider_from_hf(folder, **options), MeanTask(), ROWS, source_model=path or folder)
    trainer.build()
    return trainer


def weights(trainer):
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def exported(trainer, folder):
    trainer.export(folder)
    trainer.close()
    return load_file(folder / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    "config",
    [
        DENSE,
        replace(DENSE, tie_embeddings=True, attention_bias=True, mlp_bias=True),
        MIXED,
        replace(DENSE, head=Embedding(), qk_norm=True),
        replace(MIXED, head=SequenceClassification(num_labels=3), tie_embeddings=True),
        replace(DENSE, head=TokenClassification(num_labels=3)),
        replace(DENSE, head=TokenClassification(num_labels=3, bias=False)),
    ],
)
def test_weights_go_there_and_back(config, tmp_path):
    """Contracts 36 and 38."""
    tensors = stored(config, tmp_path / "in")
    assert same(exported(loaded(tmp_path / "in"), tmp_path / "out"), tensors)


def test_names_that_are_written(tmp_path):
    """B89: of a tied weight the name of the embedding; no biases of routers."""
    names = stored(replace(MIXED, tie_embeddings=True, num_layers=2), tmp_path).keys()
    assert {name for name in names if "layers" not in name} == {"model.embed_tokens.weight", "model.norm.weight"}
    assert {name.removeprefix("model.layers.1.mlp.") for name in names if "layers.1.mlp" in name} == {"gate.weight"} | {
        f"experts.{number}.{name}_proj.weight" for number in range(3) for name in ("gate", "up", "down")
    }
    assert "model.layers.0.mlp.gate_proj.weight" in names and "model.layers.1.self_attn.q_norm.weight" in names


@pytest.mark.parametrize("layout", ["list", "fused"])
def test_both_layouts_of_experts_are_the_same_model(layout, tmp_path):
    """Contract 38. Rows of gate come before those of up."""
    tensors = stored(MIXED, tmp_path / "list")
    trainer = loaded(tmp_path / "list", expert_layout="fused")
    expected = weights(trainer)
    fused = exported(trainer, tmp_path / "fused")
    experts = "model.layers.1.mlp.experts"
    assert fused[f"{experts}.gate_up_proj"].shape == (3, 12, 8) and fused[f"{experts}.down_proj"].shape == (3, 8, 6)
    both = [tensors[f"{experts}.2.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(fused[f"{experts}.gate_up_proj"][2], torch.cat(both))

    (tmp_path / "fused" / "config.json").write_text(json.dumps(hf_config(MIXED)))
    trainer = loaded(tmp_path / "fused", expert_layout=layout)
    assert same(weights(trainer), expected)
    assert same(exported(trainer, tmp_path / "again"), tensors if layout == "list" else fused)
    assert same(exported(loaded(tmp_path / "fused"), tmp_path / "kept"), fused)


def test_weights_may_lie_elsewhere_than_the_config(tmp_path):
    tensors = stored(MIXED, tmp_path / "list")
    fused = exported(loaded(tmp_path / "list", expert_layout="fused"), tmp_path / "fused")
    trainer = loaded(tmp_path / "list", tmp_path / "fused" / "model.safetensors", source_model=tmp_path / "fused" / "model.safetensors")
    assert same(exported(trainer, tmp_path / "out"), fused)
    (tmp_path / "list" / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "weights.safetensors")
    assert same(exported(loaded(tmp_path / "list", tmp_path / "weights.safetensors"), tmp_path / "out"), tensors)


def test_the_layout_of_several_files_is_that_of_their_index(tmp_path):
    stored(MIXED, tmp_path / "list")
    trainer = loaded(tmp_path / "list", expert_layout="fused")
    expected = weights(trainer)
    assert len(trainer.export(tmp_path / "fused", max_shard_size=2000, companions=tmp_path / "list")) > 3
    assert same(weights(loaded(tmp_path / "fused")), expected)


@pytest.mark.parametrize("kept", ["embedding", "head", "both"])
@pytest.mark.parametrize("ties", [True, False])
def test_a_tied_weight_is_found_under_either_name(kept, ties, tmp_path):
    """B89: a file with one of the names or both, into a model that ties and into one that does not."""
    table = torch.randn(12, 8)
    names = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
    kept_names = names.values() if kept == "both" else [names[kept]]
    more = {"model.embed_tokens.weight": None} | {name: table.clone() for name in kept_names}
    stored(replace(DENSE, tie_embeddings=True), tmp_path, **more)
    if kept == "head" and not ties:
        with pytest.raises(CheckpointError, match=r"'embedding.weight' \(made from 'model.embed_tokens.weight'\)"):
            loaded(tmp_path, tie_embeddings=False)
        return
    found = weights(loaded(tmp_path, tie_embeddings=ties))
    assert torch.equal(found["embedding.weight"], table) and torch.equal(found["head.weight"], table)


def test_a_tied_weight_with_two_values_is_an_error(tmp_path):
    stored(replace(DENSE, tie_embeddings=True), tmp_path, **{"lm_head.weight": torch.zeros(12, 8)})
    with pytest.raises(CheckpointError, match="different values for 'embedding.weight' and 'head.weight'"):
        loaded(tmp_path)


def test_base_models_are_stored_without_a_prefix(tmp_path):
    """As `AutoModel.save_pretrained` does, and files that name another architecture in spite of it."""
    tensors = stored(replace(DENSE, head=Embedding()), tmp_path / "base")
    assert "embed_tokens.weight" in tensors and "layers.1.self_attn.q_proj.weight" in tensors
    settings = hf_config(DENSE)
    (tmp_path / "base" / "config.json").write_text(json.dumps(settings))
    trainer = loaded(tmp_path / "base", head=Embedding())
    assert torch.equal(weights(trainer)["embedding.weight"], tensors["embed_tokens.weight"])
    assert same(exported(trainer, tmp_path / "out"), tensors)


HEADS = [LanguageModeling(), Embedding(), SequenceClassification(num_labels=3), TokenClassification(num_labels=3)]


@pytest.mark.parametrize("theirs", [*HEADS, SequenceClassification(num_labels=2)], ids=repr)
@pytest.mark.parametrize("ours", HEADS, ids=repr)
def test_another_head_begins_with_fresh_values(ours, theirs, tmp_path, caplog):
    """B95: the base model is loaded; a head that is unlike the stored one is fresh, which is told, and the stored one has no use."""
    tensors = stored(replace(DENSE, head=theirs), tmp_path)
    with caplog.at_level(logging.INFO, "trainer_kit"):
        found = weights(loaded(tmp_path, head=ours))
    prefix = "" if isinstance(theirs, Embedding) else "model."
    assert torch.equal(found["layers.1.attention.o_proj.weight"], tensors[f"{prefix}layers.1.self_attn.o_proj.weight"])
    heads = [name for name in found if name.startswith("head.")]
    told = [record.message for record in caplog.records if "allowed by the model provider" in record.message]
    if ours == theirs:
        assert not told
    else:
        assert all(name in told[0].split(" keep ")[0] for name in heads)
        assert all(name in told[0].split(" keep ")[1] for name in tensors if "lm_head" in name or "score" in name)
    for name in heads:
        stored_head = tensors.get({"head.weight": "lm_head.weight"}.get(name, name.removeprefix("head.")))
        assert (stored_head is not None and torch.equal(found[name], stored_head)) == (ours == theirs)


def test_a_tied_head_is_not_fresh(tmp_path):
    tensors = stored(replace(DENSE, head=SequenceClassification(num_labels=3), tie_embeddings=True), tmp_path)
    found = weights(loaded(tmp_path, head=LanguageModeling()))
    assert torch.equal(found["head.weight"], tensors["model.embed_tokens.weight"])


def test_a_missing_head_of_the_same_kind_is_an_error(tmp_path):
    """B95: only a head that was asked for in place of another one may be fresh."""
    stored(DENSE, tmp_path, **{"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"1 missing .*'head.weight' \(made from 'lm_head.weight'\)"):
        loaded(tmp_path)


def test_surplus_tensors_are_an_error_and_old_rotary_buffers_are_none(tmp_path):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    stored(DENSE, tmp_path / "old", **buffer)
    loaded(tmp_path / "old").close()
    stored(DENSE, tmp_path / "surplus", **{"model.layers.0.self_attn.q_proj.bias": torch.ones(8)})
    with pytest.raises(CheckpointError, match=r"1 unexpected .*self_attn.q_proj.bias"):
        loaded(tmp_path / "surplus")


def test_balance_biases_stay_with_us(tmp_path, caplog):
    """Hugging Face has no place for them: they keep their initial values, are not exported, and that is told."""
    tensors = stored(MIXED, tmp_path / "in")
    trainer = loaded(tmp_path / "in", moe=replace(EXPERTS, balance_bias=True))
    assert not weights(trainer)["layers.1.feed_forward.router.balance_bias"].any()
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        assert same(exported(trainer, tmp_path / "out"), tensors)
    assert "balance biases of the routers are not exported" in caplog.text


@pytest.mark.parametrize("config", [MIXED, replace(MIXED, tie_embeddings=True)])
@pytest.mark.parametrize("layout", ["list", "fused"])
def test_the_stages_share_the_names_of_the_whole(config, layout):
    """Each stage maps its own layers alone; together they are the whole model."""
    config = replace(config, num_layers=5)
    provider = HuggingFaceProvider(config, expert_layout=layout)
    whole = provider.export_mapper(StageContext(CONTEXT, StageInfo()))
    stages = [provider.export_mapper(StageContext(CONTEXT, StageInfo(index, 3))) for index in range(3)]
    names = [name for mapper in stages for group in mapper.groups() for name in group.outputs]
    assert len(names) == len(set(names)) and set(names) == {name for group in whole.groups() for name in group.outputs}
    of_last = {name for group in stages[2].groups() for name in group.outputs}
    assert "model.norm.weight" in of_last and "model.embed_tokens.weight" not in of_last


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_mapper_of_a_stage_is_for_the_layers_that_the_stage_has(num_stages):
    """Contract 35: layers with experts cost more or less than dense ones, so stages have different numbers of layers."""
    config = replace(MIXED, num_layers=6, intermediate_size=256, moe=replace(EXPERTS, balance_bias=True))
    for index in range(num_stages):
        stage = StageInfo(index, num_stages)
        ctx = StageContext(CONTEXT, stage, Decoder(config, stage, CONTEXT))
        provider = HuggingFaceProvider(config)
        made = {name for group in provider.load_mapper(ctx).groups() for name in group.outputs}
        taken = {name for group in provider.export_mapper(ctx).groups() for name in group.inputs}
        assert made.union(provider.may_be_missing(ctx)) == taken == set(state_names(ctx.built()))


def test_the_layout_is_read_straight_into_the_parameters():
    """Contract 34: every tensor is put together of boxes of the stored ones, so each rank reads only its own part."""
    for layout in ("list", "fused"):
        provider = HuggingFaceProvider(MIXED, expert_layout=layout)
        mapper = provider.export_mapper(StageContext(CONTEXT, StageInfo()))
        shapes = {f"layers.1.feed_forward.experts.{name}_proj": (3, 6, 8) for name in ("gate", "up")}
        groups = [group for group in mapper.inverse().groups() if group.outputs & shapes.keys()]
        assert groups
        for group in groups:
            given = dict.fromkeys(group.inputs, (3, 12, 8) if layout == "fused" else (6, 8))
            assert mapper.inverse().pieces(given).keys() == group.outputs
