"""Adapter files against the peft library: it computes what we do with the files that we wrote, and we what it does with its own."""

import errno
import json

import pytest
import torch
from torch import nn

from tests.peft.common import stack, tensors, tokens, trainer
from trainer_kit import peft
from trainer_kit.exceptions import CheckpointError, ConfigurationError, UnsupportedError
from trainer_kit.models import provider_from_hf
from trainer_kit.storage import write_all
from trainer_kit.weights import IdentityMapper, Parallel, Split

library = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # those libraries warn of each other

SIZES = {
    "vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "initializer_range": 0.2,
}  # fmt: skip
METHODS = (
    peft.LoRA(4, 8, targets=["*.[qk]_proj", "embedding", "head"]),
    peft.LoRA(2, 6, targets=["*.down_proj", "layers.1.attention.v_proj"], dropout=0.1),
    peft.FullTuning("*norm"),
)


@pytest.fixture
def base(tmp_path):
    """A folder as transformers writes it; the projections of the attention have biases."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=False))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def reference(base):
    return transformers.LlamaForCausalLM.from_pretrained(base).eval()


def ours(base, *methods):
    return trainer(stack(*methods, base=provider_from_hf(base)), source_model=base)


@torch.no_grad()
def logits(model):
    found = model.eval()(tokens())
    return getattr(found, "logits", found)


@pytest.mark.parametrize("is_rslora", [False, True])
def test_the_library_computes_the_same_with_our_files(base, tmp_path, is_rslora):
    """Issue 5: two ranks, two scales, a bias, an embedding, the head, layers in full; adapters of some layers of a name only."""
    methods = METHODS
    if is_rslora:
        methods = (peft.LoRA(4, 8, targets=["*.[qk]_proj", "embedding"], rslora=True), METHODS[1])
    run = ours(base, *methods)
    run.fit()
    assert peft.export_adapters(run, tmp_path / "adapters") == ["adapter_model.safetensors", "adapter_config.json"]
    theirs = library.PeftModel.from_pretrained(reference(base), tmp_path / "adapters")
    torch.testing.assert_close(logits(theirs), logits(run.model), rtol=1e-5, atol=1e-5)
    assert (logits(theirs) - logits(reference(base))).abs().max() > 0.01
    run.export(tmp_path / "merged")
    merged = theirs.merge_and_unload().state_dict()
    for name, tensor in tensors(tmp_path / "merged").items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_rslora", [False, True])
def test_we_compute_the_same_with_the_files_of_the_library(base, tmp_path, is_rslora):
    config = library.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj", "embed_tokens", "lm_head"], modules_to_save=["model.norm"],
        use_rslora=is_rslora, rank_pattern={"down_proj": 2}, alpha_pattern={"layers.1.mlp.down_proj": 3},
    )  # fmt: skip
    theirs = library.get_peft_model(reference(base), config)
    for name, parameter in theirs.named_parameters():
        if "lora" in name or "modules_to_save" in name:
            nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path / "adapters")
    run = ours(
        base,
        peft.LoRA(4, 8, targets=["*.q_proj", "embedding", "head"], rslora=is_rslora),
        peft.LoRA(2, 8, targets=["layers.0.*.down_proj"], rslora=is_rslora),
        peft.LoRA(2, 3, targets=["layers.1.*.down_proj"], rslora=is_rslora),
        peft.FullTuning("norm"),
    )
    peft.load_adapters(run, tmp_path / "adapters")
    torch.testing.assert_close(logits(run.model), logits(theirs), rtol=1e-5, atol=1e-4)
    assert (logits(theirs) - logits(reference(base))).abs().max() > 0.1
    run.fit()


def test_our_files_load_back_with_every_bit(base, tmp_path):
    run = ours(base, *METHODS)
    run.fit()
    peft.export_adapters(run, tmp_path / "one")
    again = ours(base, *METHODS)
    peft.load_adapters(again, tmp_path / "one")
    peft.export_adapters(again, tmp_path / "two")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert torch.equal(logits(again.model), logits(run.model))


def test_a_full_disk_leaves_nothing_and_the_old_files_stay(base, tmp_path, monkeypatch):
    """Issue 5, bad input: the folder takes the next attempt."""
    run = ours(base, *METHODS)

    def full(file, data):
        if bytes(data[:1]) != b"{":  # the weights fit, their config does not
            return write_all(file, data)
        raise OSError(errno.ENOSPC, "No space left on device")

    def refused(folder):
        with monkeypatch.context() as patch:
            patch.setattr("trainer_kit.weights.publish.write_all", full)
            with pytest.raises(CheckpointError, match=r"adapters.*No space left on device"):
                peft.export_adapters(run, folder)

    refused(tmp_path / "adapters")
    assert list((tmp_path / "adapters").iterdir()) == []
    peft.export_adapters(run, tmp_path / "adapters")
    before = {path.name: path.read_bytes() for path in (tmp_path / "adapters").iterdir()}
    run.fit()
    refused(tmp_path / "adapters")
    assert {path.name: path.read_bytes() for path in (tmp_path / "adapters").iterdir()} == before
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "adapter_model.safetensors.tmp").touch()
    peft.export_adapters(run, tmp_path / "killed")


def change(folder, **values):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | values))


def test_files_that_mean_something_else_are_refused(base, tmp_path):
    """Issue 5, bad input: what differs is named, and nothing is read."""
    run = ours(base, peft.LoRA(4, 8, targets=["*.q_proj"]))
    folder = tmp_path / "adapters"
    with pytest.raises(CheckpointError, match="adapter_config.json and adapter_model.safetensors were expected"):
        peft.load_adapters(run, folder)
    peft.export_adapters(run, folder)
    for values, text in [
        ({"r": 2}, "LoRA(rank=2, alpha=8, rslora=False)"),
        ({"use_rslora": True}, "LoRA(rank=4, alpha=8, rslora=True)"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"peft_type": "IA3"}, "'IA3'"),
    ]:
        before = (folder / "adapter_config.json").read_text()
        change(folder, **values)
        with pytest.raises(CheckpointError) as error:
            peft.load_adapters(run, folder)
        assert text in str(error.value)
        (folder / "adapter_config.json").write_text(before)
    more = ours(base, peft.LoRA(4, 8, targets=["*.[qv]_proj"]))
    with pytest.raises(CheckpointError, match=r"v_proj\.lora_A\.weight"):
        peft.load_adapters(more, folder)
    fewer = ours(base, peft.LoRA(4, 8, targets=["layers.0.*.q_proj"]))
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj\.lora_A\.weight"):
        peft.load_adapters(fewer, folder)


def test_what_the_library_has_no_place_for_is_refused(base, tmp_path):
    with pytest.raises(UnsupportedError, match="has an adapter and parameters that are tuned in full"):
        peft.export_adapters(ours(base, peft.LoRA(2, targets="*.q_proj"), peft.FullTuning("*.q_proj.bias")), tmp_path / "a")
    with pytest.raises(UnsupportedError, match="no adapters"):
        peft.export_adapters(ours(base, peft.FullTuning("*.q_proj.bias")), tmp_path / "a")
    with pytest.raises(ConfigurationError, match="expected trainer_kit.peft.adapt"):
        peft.export_adapters(trainer(provider_from_hf(base)), tmp_path / "a")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        peft.export_adapters(ours(base, peft.LoRA(2, targets="*.q_proj")), tmp_path / "foreign")


class Fused(nn.Module):
    """Two layers that lie in one tensor in the files."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(13, 4, bias=False), nn.Linear(13, 4, bias=False)


def test_a_weight_that_is_a_part_of_a_stored_one_is_exported_merged(tmp_path):
    """A fused tensor has no layer of its own in the base model; the merged export puts it together."""

    class Provider(type(stack().base).__mro__[1]):
        def initialize_model_stage(self, ctx):
            return Fused()

        def load_mapper(self, ctx):
            return Parallel([Split("qk", ["q.weight", "k.weight"], sizes=[4, 4]), IdentityMapper([])])

    run = trainer(stack(peft.LoRA(1, 2, targets=["q"]), base=Provider()))
    with pytest.raises(UnsupportedError, match=r"trainer\.export"):
        peft.export_adapters(run, tmp_path / "adapters")
    q, k = run.model.q, run.model.k
    nn.init.normal_(q.lora.B)
    run.export(tmp_path / "merged")
    expected = torch.cat([q.weight + 2 * q.lora.B @ q.lora.A, k.weight]).detach()
    torch.testing.assert_close(tensors(tmp_path / "merged")["qk"], expected)


def test_adapted_experts_are_exported_merged(tmp_path):
    """transformers loads the merged export of an adapted mixture of experts with equal logits."""
    sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).save_pretrained(tmp_path / "base")
    run = ours(tmp_path / "base", peft.LoRA(2, 8, targets=["*.experts", "*.q_proj"]))
    run.fit()
    with pytest.raises(UnsupportedError, match=r"experts\.gate_proj.*trainer\.export"):
        peft.export_adapters(run, tmp_path / "adapters")
    run.export(tmp_path / "merged")
    (tmp_path / "merged/config.json").write_bytes((tmp_path / "base/config.json").read_bytes())
    theirs = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(theirs), logits(run.model), rtol=1e-5, atol=1e-5)
