"""The catalogue: models in plain PyTorch, readable on one page each."""

from trainer_kit.models.config import DecoderConfig, num_flops_per_token
from trainer_kit.models.decoder import Decoder
from trainer_kit.models.generate import generate

__all__ = ["Decoder", "DecoderConfig", "generate", "num_flops_per_token"]
