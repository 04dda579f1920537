"""The catalogue: models in plain PyTorch, readable on one page each."""

from trainer_kit.models.config import DecoderConfig, num_flops_per_token
from trainer_kit.models.config_parts import Embedding, LanguageModeling, MoEConfig, SequenceClassification, TokenClassification
from trainer_kit.models.decoder import Decoder
from trainer_kit.models.generate import generate
from trainer_kit.models.hugging_face import HuggingFaceProvider, hf_config, provider_from_hf
from trainer_kit.models.provider import DecoderProvider
from trainer_kit.models.rotary_scaling import LinearScaling, Llama3Scaling, NTKScaling, YaRNScaling
from trainer_kit.models.router_bias import RouterBias

__all__ = [
    "Decoder",
    "DecoderConfig",
    "DecoderProvider",
    "Embedding",
    "HuggingFaceProvider",
    "LanguageModeling",
    "LinearScaling",
    "Llama3Scaling",
    "MoEConfig",
    "NTKScaling",
    "RouterBias",
    "SequenceClassification",
    "TokenClassification",
    "YaRNScaling",
    "generate",
    "hf_config",
    "num_flops_per_token",
    "provider_from_hf",
]
