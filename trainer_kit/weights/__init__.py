"""Model states: weights in safetensors files, streamed in and out, with state mappers between layouts.

Not training checkpoints: those hold everything that resuming needs, and live in `checkpoint/`.
"""

from trainer_kit.weights.loading import load_model_state
from trainer_kit.weights.mapper import IdentityMapper, StateGroup, StateMapper, check_groups
from trainer_kit.weights.plan import LoadReport
from trainer_kit.weights.reader import ModelStateReader
from trainer_kit.weights.shards import parse_size
from trainer_kit.weights.writer import StateItem, items_of, write_model_state

__all__ = [
    "IdentityMapper",
    "LoadReport",
    "ModelStateReader",
    "StateGroup",
    "StateItem",
    "StateMapper",
    "check_groups",
    "items_of",
    "load_model_state",
    "parse_size",
    "write_model_state",
]
