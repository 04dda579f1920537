"""`DecoderProvider`: a `Decoder` for each stage, in the context of the run."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from trainer_kit.model.provider import ModelProvider, StageContext
from trainer_kit.models.config import DecoderConfig
from trainer_kit.models.decoder import Decoder


class DecoderProvider(ModelProvider):
    """Builds the stages of a decoder with fresh weights: `Trainer(model_provider=DecoderProvider(config), ...)`."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    def initialize_model_stage(self, ctx: StageContext) -> nn.Module:
        return Decoder(self.config, ctx.stage, ctx.context)

    def hparams(self) -> dict[str, Any]:
        values = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        return {name: value if isinstance(value, (int, float)) else repr(value) for name, value in values.items()}
