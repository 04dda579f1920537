"""Tiny random models of transformers and ours with the same weights, copied by hand: an independent way around the mappers."""

import contextlib
import warnings

import torch

from trainer_kit.models import DecoderConfig, MoEConfig

SIZES = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True}


def theirs(name, **options):
    """A model of transformers with random weights, norms and biases too, and its config."""
    import transformers

    family = name.removesuffix("Model").partition("For")[0]
    if family == "Qwen3Moe":
        options = EXPERTS | options
    if family != "Llama":
        options = {"head_dim": 12} | options
    with quiet():
        config = getattr(transformers, f"{family}Config")(**(SIZES | options))
        config._attn_implementation = config._experts_implementation = "eager"
        torch.manual_seed(0)
        model = getattr(transformers, name)(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def our_config(config, **options):
    """The same sizes in our words."""
    has_experts = config.model_type == "qwen3_moe"
    moe = MoEConfig(
        num_experts=config.num_experts,
        num_experts_per_token=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normalize_weights=config.norm_topk_prob,
        dense_layers=tuple(config.mlp_only_layers),
        every=config.decoder_sparse_step,
    ) if has_experts else None  # fmt: skip
    return DecoderConfig(**{
        "vocab_size": config.vocab_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "hidden_size": config.hidden_size,
        "head_size": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_seq_len": config.max_position_embeddings,
        "tie_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": getattr(config, "mlp_bias", False),
        "qk_norm": config.model_type != "llama",
        "rope_theta": config.rope_parameters["rope_theta"],
        "norm_eps": config.rms_norm_eps,
        "moe": moe,
    } | options)  # fmt: skip


RENAMED = {
    "model.embed_tokens.": "embedding.", "embed_tokens.": "embedding.", "lm_head.": "head.", "score.": "head.score.",
    ".self_attn.": ".attention.", ".mlp.gate.": ".feed_forward.router.", ".mlp.": ".feed_forward.",
    ".input_layernorm.": ".attention_norm.", ".post_attention_layernorm.": ".feed_forward_norm.",
}  # fmt: skip


def our_state(model):
    """The weights of a model of transformers under our names."""
    found = {}
    for name, value in model.state_dict().items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        name = name.removeprefix("model.")
        if name.endswith("gate_up_proj"):
            found[name.replace("gate_up", "gate")], found[name.replace("gate_up", "up")] = value.chunk(2, dim=1)
        else:
            found[name] = value
    return found
