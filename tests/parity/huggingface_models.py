"""The side of transformers of `huggingface.py`: random models, what they compute, and whether it reads what we wrote."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from tests.parity.huggingface_runs import NUM_SAMPLES, SEQ_LEN, Job
from trainer_kit.models import hf_config, provider_from_hf

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 2.0}


@dataclass(frozen=True)
class Model:
    """A random model: its settings, how its experts are stored, and how we are to export them (None: as they are stored)."""

    name: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    stored: str = "list"
    exported: str | None = None

    @property
    def is_tied(self) -> bool:
        return self.settings.get("tie_word_embeddings", False)


MODELS = [
    Model("llama, llama3 rope", "llama", {"rope_parameters": dict(LLAMA3, rope_theta=5e5)}),
    Model(
        "llama, tied, biases, linear rope",
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_parameters": dict(LINEAR, rope_theta=1e4)},
    ),
    Model("qwen3, yarn rope", "qwen3", {"head_dim": 16, "rope_parameters": dict(YARN, rope_theta=1e6)}),
    Model("qwen3, tied", "qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    Model("qwen3_moe, list", "qwen3_moe", dict(EXPERTS, norm_topk_prob=True)),
    Model("qwen3_moe, list -> fused, tied", "qwen3_moe", dict(EXPERTS, tie_word_embeddings=True), exported="fused"),
    Model("qwen3_moe, fused, dense layer", "qwen3_moe", dict(EXPERTS, mlp_only_layers=[1]), stored="fused"),
    Model(
        "qwen3_moe, fused -> list, tied",
        "qwen3_moe",
        dict(EXPERTS, tie_word_embeddings=True, norm_topk_prob=True, decoder_sparse_step=2),
        stored="fused",
        exported="list",
    ),
]


def be_quiet() -> None:
    """No bars and no advice."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


def prepare(model: Model, folder: Path) -> Job:
    """Make the model and compute its logits and gradients, under our names, into the folder."""
    torch.manual_seed(len(model.name))
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(model.model_type, **SIZES, **model.settings))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    tokens = torch.randint(0, VOCAB, (NUM_SAMPLES, SEQ_LEN))
    tokens[:, 1] = torch.arange(NUM_SAMPLES)
    logits = network(tokens).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    reference = {"tokens": tokens, "logits": logits.detach(), "gradients": under_our_names(gradients)}
    save(network, folder / "source", model.stored)
    save(network, folder / "expected", model.exported or model.stored)
    network.to(torch.bfloat16)
    save(network, folder / "source-bf16", model.stored)
    save(network, folder / "expected-bf16", model.exported or model.stored)
    torch.save(reference, folder / "reference.pt")
    return Job(folder, model.exported)


def save(network: Any, folder: Path, experts: str) -> None:
    """As transformers does."""
    network.save_pretrained(folder, save_original_format=experts == "list")


def under_our_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of a model in memory, written out by hand: not with the mapper that is put to the test."""
    found = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").replace("self_attn", "attention").replace("mlp", "feed_forward")
        name = name.replace("input_layernorm", "attention_norm").replace("post_attention_layernorm", "feed_forward_norm")
        name = name.replace("embed_tokens", "embedding").replace("lm_head", "head").replace("feed_forward.gate.", "feed_forward.router.")
        if name.endswith("gate_up_proj"):
            width = tensor.shape[1] // 2
            found[name.replace("gate_up", "gate")], found[name.replace("gate_up", "up")] = tensor[:, :width], tensor[:, width:]
        else:
            found[name] = tensor
    return found


def faults(model: Model, folder: Path, mesh: str) -> list[str]:
    """What is wrong with the exports of a mesh: their tensors, or what transformers makes of them."""
    found = []
    for suffix in ("", "-bf16"):
        expected, written = (load_file(folder / f"{name}{suffix}" / "model.safetensors") for name in ("expected", mesh))
        if expected.keys() != written.keys():
            found.append(f"the export{suffix} has other names: {sorted(expected.keys() ^ written.keys())[:6]}")
        found += [
            f"{name} of the export{suffix} differs"
            for name in expected.keys() & written.keys()
            if expected[name].dtype != written[name].dtype or not torch.equal(expected[name], written[name])
        ]
        settings = hf_config(provider_from_hf(folder / "source").config)
        (folder / f"{mesh}{suffix}" / "config.json").write_text(json.dumps(settings))
        found += differences_in_transformers(folder / f"source{suffix}", folder / f"{mesh}{suffix}")
    return found


def differences_in_transformers(source: Path, written: Path) -> list[str]:
    """Between two folders that transformers reads: settings are ours in the second one."""
    ours, report = AutoModelForCausalLM.from_pretrained(written, output_loading_info=True)
    theirs = AutoModelForCausalLM.from_pretrained(source)
    found = [f"from_pretrained({written.name}): {kind}: {names}" for kind, names in report.items() if names]
    weights = theirs.state_dict()
    found += [f"{name} differs in transformers" for name, tensor in ours.state_dict().items() if not torch.equal(tensor, weights[name])]
    tokens = torch.arange(SEQ_LEN).unsqueeze(0)
    with torch.no_grad():
        if not torch.equal(ours(tokens).logits, theirs(tokens).logits):
            found.append(f"transformers gives other logits for {written.name}, with the settings of hf_config")
    return found
