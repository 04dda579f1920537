"""From a `config.json` to a `DecoderConfig`, for files of transformers 5 and of older versions.

What would change the model's outputs and is not supported is refused by name; keys that only describe (token ids of a tokenizer, versions,
caches) are passed over. Before editing: transformers writes every setting of a model type, so a default here matters for files by hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.models.config import DecoderConfig
from trainer_kit.models.config_parts import Embedding, Head, LanguageModeling, MoEConfig, SequenceClassification, TokenClassification
from trainer_kit.models.hugging_face.families import FAMILIES, Family
from trainer_kit.models.hugging_face.rope import read_rope
from trainer_kit.storage import Folder

FILE = "config.json"

# Setting -> whether a value is one that a Decoder has, and what is supported.
SUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hidden_act": (lambda value: value in ("silu", "swish"), "'silu'"),
    "attention_dropout": (lambda value: not value, "0; dropout= of a DecoderConfig is that of the residual stream"),
    "use_sliding_window": (lambda value: not value, "false"),
    "layer_types": (lambda value: set(value) <= {"full_attention"}, "'full_attention' for all layers"),
    "quantization_config": (lambda value: not value, "weights that are not quantised; dequantise them first"),
    "is_causal": (bool, "true"),
}


def read_settings(path: str | os.PathLike[str]) -> tuple[Folder, dict[str, Any], str]:
    """The folder, the settings of its `config.json`, and what to call them in messages. path: of the folder or of the file."""
    text = os.fspath(path).rstrip("/")
    name = text.rpartition("/")[2] if text.endswith(".json") else FILE
    folder = Folder(text[: -len(name)] or "." if text.endswith(".json") else text)
    label = folder.path(name)
    if not folder.exists(name):
        raise ConfigurationError(f"{label} does not exist; provider_from_hf(path) was expected to get the folder of a Hugging Face model")
    return folder, folder.read_object(name, ConfigurationError), label


def decoder_config(settings: Mapping[str, Any], label: str = FILE) -> DecoderConfig:
    """The model that the settings describe. UnsupportedError names the setting that a `Decoder` does not have."""
    family = _family(settings, label)
    _check_supported(settings, label)
    read = {name: value for name, value in settings.items() if value is not None}
    read = {name: value for name, value in family.defaults.items() if name not in settings} | read

    def size(name: str) -> int:
        if type(read.get(name)) is not int:
            raise ConfigurationError(f"{label} has {name}={read.get(name)!r}; a whole number was expected")
        return read[name]

    max_seq_len = size("max_position_embeddings")
    theta, scaling = read_rope(settings, max_seq_len, label)
    return DecoderConfig(
        vocab_size=size("vocab_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=size("num_attention_heads"),
        num_kv_heads=read.get("num_key_value_heads", 0),
        head_size=read.get("head_dim", 0),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        max_seq_len=max_seq_len,
        tie_embeddings=read.get("tie_word_embeddings", False),
        attention_bias=read.get("attention_bias", False),
        mlp_bias=read.get("mlp_bias", False) and family.model_type == "llama",
        qk_norm=family.qk_norm,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=read.get("rms_norm_eps", 1e-6),
        init_std=read.get("initializer_range", 0.02),
        moe=_experts(read, size) if family.has_experts else None,
        head=_head(read, family, label),
    )


def _family(settings: Mapping[str, Any], label: str) -> Family:
    """By `model_type`, or by the name of the class where that is absent."""
    model_type, classes = settings.get("model_type"), settings.get("architectures") or []
    if model_type is None:
        named = [family for family in FAMILIES.values() if any(_kind(name, family) is not None for name in classes)]
        model_type = named[0].model_type if named else None
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    known = ", ".join(map(repr, FAMILIES))
    raise UnsupportedError(f"{label} has model_type={model_type!r} and architectures={classes!r}; known are the model types {known}")


def _check_supported(settings: Mapping[str, Any], label: str) -> None:
    for name, (is_supported, expected) in SUPPORTED.items():
        value = settings.get(name)
        if value is not None and not is_supported(value):
            raise UnsupportedError(f"{label} has {name}={value!r}, which is not supported; expected {expected}")


def _experts(read: Mapping[str, Any], size: Callable[[str], int]) -> MoEConfig | None:
    num_experts = size("num_local_experts" if "num_local_experts" in read else "num_experts")  # the former since transformers 5
    if num_experts == 0:
        return None
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_token=size("num_experts_per_tok"),
        intermediate_size=size("moe_intermediate_size"),
        normalize_weights=read.get("norm_topk_prob", False),
        dense_layers=tuple(read.get("mlp_only_layers", ())),
        every=read.get("decoder_sparse_step", 1),
        aux_loss_coef=read.get("router_aux_loss_coef", 0.001) if read.get("output_router_logits", False) else 0.0,
    )


def _head(read: Mapping[str, Any], family: Family, label: str) -> Head:
    """That of the first architecture; language modelling where none is named."""
    classes = read.get("architectures") or []
    if not classes:
        return LanguageModeling()
    num_labels = len(read["id2label"]) if read.get("id2label") else read.get("num_labels", 2)
    match _kind(classes[0], family):
        case "ForCausalLM":
            return LanguageModeling()
        case "Model":
            return Embedding(pad_token_id=read.get("pad_token_id"))
        case "ForSequenceClassification":
            return SequenceClassification(num_labels=num_labels, pad_token_id=read.get("pad_token_id"))
        case "ForTokenClassification":
            dropout = read.get("classifier_dropout", read.get("hidden_dropout", 0.1))
            return TokenClassification(num_labels=num_labels, dropout=dropout, bias=read.get("token_classification_bias", True))
    expected = ", ".join(family.classes + kind for kind in KINDS)
    raise UnsupportedError(f"{label} has the architecture {classes[0]!r}; known are {expected}")


KINDS = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "Model")


def _kind(name: str, family: Family) -> str | None:
    kind = name.removeprefix(family.classes)
    return kind if kind in KINDS and kind != name else None
