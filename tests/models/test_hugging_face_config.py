"""`config.json` to `DecoderConfig` and back: both forms of the rotary settings, heads, and what is refused. No transformers here."""

import json

import fsspec
import pytest

from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.models import (
    DecoderConfig,
    Embedding,
    LanguageModeling,
    LinearScaling,
    Llama3Scaling,
    MoEConfig,
    NTKScaling,
    SequenceClassification,
    TokenClassification,
    YaRNScaling,
    hf_config,
    provider_from_hf,
)
from trainer_kit.models.hugging_face.read_config import decoder_config

# As files on the hub have it: transformers 4 for Llama 3.1 and Qwen3-MoE, 5 for Qwen3.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072, "layer_types": ["full_attention"] * 28,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def test_llama_3_1_as_transformers_4_wrote_it():
    config = decoder_config(LLAMA)
    assert config == DecoderConfig(
        vocab_size=128256, num_layers=32, num_heads=32, num_kv_heads=8, hidden_size=4096, intermediate_size=14336, max_seq_len=131072,
        rope_theta=500000.0, rope_scaling=Llama3Scaling(8.0, 8192, 1.0, 4.0), norm_eps=1e-5,
    )  # fmt: skip
    assert config.num_parameters == 8_030_261_248  # as the model card says


def test_qwen3_as_transformers_5_writes_it():
    config = decoder_config(QWEN)
    assert config == DecoderConfig(
        vocab_size=151936, num_layers=28, num_heads=16, num_kv_heads=8, head_size=128, hidden_size=1024, intermediate_size=3072,
        max_seq_len=40960, tie_embeddings=True, qk_norm=True, rope_theta=1e6,
    )  # fmt: skip


def test_qwen3_moe_and_the_name_of_its_experts_since_transformers_5():
    config = decoder_config(MOE)
    assert config.moe == MoEConfig(num_experts=128, num_experts_per_token=8, intermediate_size=768, normalize_weights=True)
    assert config.qk_norm and config.head_size == 128 and config.num_parameters == 30_532_122_624
    renamed = {name: value for name, value in MOE.items() if name != "num_experts"} | {"num_local_experts": 128}
    assert decoder_config(renamed) == config
    balanced = decoder_config(MOE | {"output_router_logits": True, "mlp_only_layers": [1], "decoder_sparse_step": 2})
    assert balanced.moe.aux_loss_coef == 0.001 and balanced.moe.dense_layers == (1,) and balanced.moe.every == 2


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, LinearScaling(2.0)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 7.0}}, LinearScaling(2.0)),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, None),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 10240}}, YaRNScaling(4.0, 10240)),
        ({"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 10240}}, YaRNScaling(4.0, 10240)),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 30, "truncate": False}}, YaRNScaling(4, 40960, 30, truncate=False)),
    ],
)
def test_rotary_settings_of_both_forms(settings, scaling):
    config = decoder_config({name: value for name, value in QWEN.items() if name != "rope_parameters"} | {"rope_theta": 7.0} | settings)
    assert (config.rope_theta, config.rope_scaling) == (7.0, scaling)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "gemma3"}, "model_type='gemma3'.*known are the model types 'llama', 'qwen3', 'qwen3_moe'"),
        ({"model_type": None, "architectures": ["MistralForCausalLM"]}, "architectures=\\['MistralForCausalLM'\\].*known are"),
        ({"architectures": ["Qwen3ForQuestionAnswering"]}, "Qwen3ForQuestionAnswering.*known are Qwen3ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*'full_attention' for all layers"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*fp8"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "type 'longrope'.*known are default, linear"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "for each kind of layer"),
    ],
)
def test_what_a_decoder_does_not_have_is_refused_by_name(settings, words):
    """Contract 45: never ignored."""
    with pytest.raises(UnsupportedError, match=words):
        decoder_config(QWEN | settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"vocab_size": "many"}, "vocab_size='many'; a whole number was expected"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"rope_parameters": {"rope_type": "linear"}}, "type 'linear' without 'factor'"),
        ({"rope_parameters": [1.0]}, "rope_parameters=\\[1.0\\]; an object was expected"),
    ],
)
def test_a_file_that_is_not_whole_is_an_error(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        decoder_config(QWEN | settings)


@pytest.mark.parametrize(
    ("settings", "head"),
    [
        ({}, LanguageModeling()),
        ({"architectures": None}, LanguageModeling()),
        ({"architectures": ["Qwen3Model"], "pad_token_id": 3}, Embedding(pad_token_id=3)),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, SequenceClassification(num_labels=2)),
        (
            {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}, "pad_token_id": 0},
            SequenceClassification(num_labels=3, pad_token_id=0),
        ),
        ({"architectures": ["Qwen3ForTokenClassification"], "num_labels": 5}, TokenClassification(num_labels=5)),
        (
            {"architectures": ["Qwen3ForTokenClassification"], "classifier_dropout": 0.3, "token_classification_bias": False},
            TokenClassification(num_labels=2, dropout=0.3, bias=False),
        ),
    ],
)
def test_the_head_is_that_of_the_architecture(settings, head):
    assert decoder_config(QWEN | settings).head == head


def test_the_type_may_follow_from_the_architecture():
    assert decoder_config({name: value for name, value in MOE.items() if name != "model_type"}) == decoder_config(MOE)


@pytest.mark.parametrize("settings", [LLAMA, QWEN, MOE])
@pytest.mark.parametrize("head", ["ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "Model"])
@pytest.mark.parametrize("scaling", [None, LinearScaling(2.0), Llama3Scaling(8.0, 64), YaRNScaling(4.0, 64, mscale=1, mscale_all_dim=0.5)])
def test_what_is_written_is_read_as_the_same_model(settings, head, scaling):
    name = settings["architectures"][0].removesuffix("ForCausalLM") + head
    config = decoder_config(settings | {"architectures": [name], "pad_token_id": 1})
    config = DecoderConfig(**{name: getattr(config, name) for name in config.__dataclass_fields__} | {"rope_scaling": scaling})
    assert decoder_config(json.loads(json.dumps(hf_config(config)))) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": NTKScaling(2.0)}, "no name for rope_scaling=NTKScaling"),
        ({"moe": MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=8)}, "qk_norm=False has no counterpart"),
        ({"qk_norm": True, "mlp_bias": True}, "mlp_bias=True has no counterpart.*'qwen3'"),
        (
            {"qk_norm": True, "moe": MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=8, balance_bias=True)},
            "balance_bias=True",
        ),
    ],
)
def test_a_model_that_transformers_does_not_have_gets_no_config(changes, words):
    config = DecoderConfig(vocab_size=8, num_layers=1, num_heads=2, hidden_size=8, **changes)
    with pytest.raises(UnsupportedError, match=words):
        hf_config(config)


def test_a_folder_a_file_and_a_url_give_the_same_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    fsspec.filesystem("memory").pipe("/qwen/config.json", json.dumps(QWEN).encode())
    for path in (tmp_path, str(tmp_path), tmp_path / "config.json", "memory://qwen", "memory://qwen/config.json"):
        assert provider_from_hf(path).config == decoder_config(QWEN)
    changed = provider_from_hf(tmp_path, head=Embedding(), max_seq_len=64, dropout=0.1).config
    assert (changed.head, changed.max_seq_len, changed.dropout) == (Embedding(), 64, 0.1)


def test_paths_and_arguments_that_are_none_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"config\.json does not exist; .*folder of a Hugging Face model"):
        provider_from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"config\.json is no JSON"):
        provider_from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="holds a list"):
        provider_from_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    with pytest.raises(ConfigurationError, match="got num_head; expected fields of DecoderConfig"):
        provider_from_hf(tmp_path, num_head=3)
    with pytest.raises(ConfigurationError, match="expert_layout='fuse'"):
        provider_from_hf(tmp_path, expert_layout="fuse")
