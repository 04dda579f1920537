"""From a model provider to a model on its device with initial values, and how a model is called."""

from trainer_kit.model.build import build_stage
from trainer_kit.model.call import ModelCaller
from trainer_kit.model.provider import ModelProvider, StageContext, StageInfo, as_model_provider
from trainer_kit.model.stage_layers import distribute_layers
from trainer_kit.names import alias_table

__all__ = [
    "ModelCaller",
    "ModelProvider",
    "StageContext",
    "StageInfo",
    "alias_table",
    "as_model_provider",
    "build_stage",
    "distribute_layers",
]
