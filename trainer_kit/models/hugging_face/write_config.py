"""From a `DecoderConfig` to the `config.json` that transformers reads: for models that did not come from Hugging Face."""

from __future__ import annotations

from typing import Any

from trainer_kit.exceptions import UnsupportedError
from trainer_kit.models.config import DecoderConfig
from trainer_kit.models.config_parts import Embedding, Head, MoEConfig, SequenceClassification, TokenClassification
from trainer_kit.models.hugging_face.families import FAMILIES, Family
from trainer_kit.models.hugging_face.rope import write_rope


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The settings of transformers for this model, to be saved as `config.json` beside exported weights.

    They name no special tokens: those are the tokenizer's. `dropout` is left out, since no model of transformers has it there; it changes
    nothing outside of training. UnsupportedError for a model that transformers has no type for.
    """
    family = _family(config)
    return {
        "model_type": family.model_type,
        "architectures": [family.classes + _kind(config.head)],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": write_rope(config.rope_theta, config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        **({"mlp_bias": config.mlp_bias} if family.model_type == "llama" else {"use_sliding_window": False}),
        **(_experts(config.moe) if config.moe is not None else {}),
        **_labels(config.head),
        **{f"{token}_token_id": None for token in ("bos", "eos")},
        "pad_token_id": getattr(config.head, "pad_token_id", None),
    }


def _family(config: DecoderConfig) -> Family:
    """The type that has what the model has."""
    family = FAMILIES["qwen3_moe" if config.moe is not None else "qwen3" if config.qk_norm else "llama"]
    faults = [] if config.qk_norm or config.moe is None else ["qk_norm=False"]
    faults += ["mlp_bias=True"] if config.mlp_bias and family.model_type != "llama" else []
    faults += ["MoEConfig(balance_bias=True)"] if config.moe is not None and config.moe.balance_bias else []
    if faults:
        raise UnsupportedError(
            f"DecoderConfig with {' and '.join(faults)} has no counterpart in transformers, whose nearest type is {family.model_type!r}"
        )
    return family


def _kind(head: Head) -> str:
    if isinstance(head, SequenceClassification):
        return "ForSequenceClassification"
    if isinstance(head, TokenClassification):
        return "ForTokenClassification"
    return "Model" if isinstance(head, Embedding) else "ForCausalLM"


def _experts(moe: MoEConfig) -> dict[str, Any]:
    aux_loss = {"output_router_logits": True, "router_aux_loss_coef": moe.aux_loss_coef} if moe.aux_loss_coef else {}
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.normalize_weights,
        "mlp_only_layers": list(moe.dense_layers),
        "decoder_sparse_step": moe.every,
        **aux_loss,
    }


def _labels(head: Head) -> dict[str, Any]:
    if not isinstance(head, SequenceClassification | TokenClassification):
        return {}
    names = [f"LABEL_{number}" for number in range(head.num_labels)]
    labels: dict[str, Any] = {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
    if isinstance(head, TokenClassification):
        labels |= {"classifier_dropout": head.dropout, "token_classification_bias": head.bias}
    return labels
