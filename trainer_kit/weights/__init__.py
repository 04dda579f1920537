"""Model states: weights in safetensors files, streamed in and out, with state mappers between layouts.

Not training checkpoints: those hold everything that resuming needs, and live in `checkpoint/`.
"""

from trainer_kit.weights.items import StateItem, items_of
from trainer_kit.weights.loading import load_model_state
from trainer_kit.weights.mapper import IdentityMapper, StateGroup, StateMapper, check_groups
from trainer_kit.weights.mappers import (
    Cast,
    Chunk,
    Concatenate,
    Constant,
    Copy,
    Drop,
    FitReport,
    Function,
    Only,
    Pad,
    Parallel,
    Permute,
    Prefix,
    Rename,
    Reshape,
    Select,
    Sequential,
    Slice,
    Split,
    Squeeze,
    Stack,
    Transpose,
    Unify,
    Unsqueeze,
    Unstack,
    expand,
    for_each,
    half_split_order,
)
from trainer_kit.weights.plan import LoadReport
from trainer_kit.weights.reader import ModelStateReader
from trainer_kit.weights.shards import parse_size
from trainer_kit.weights.writer import write_model_state

__all__ = [
    "Cast",
    "Chunk",
    "Concatenate",
    "Constant",
    "Copy",
    "Drop",
    "FitReport",
    "Function",
    "IdentityMapper",
    "LoadReport",
    "ModelStateReader",
    "Only",
    "Pad",
    "Parallel",
    "Permute",
    "Prefix",
    "Rename",
    "Reshape",
    "Select",
    "Sequential",
    "Slice",
    "Split",
    "Squeeze",
    "Stack",
    "StateGroup",
    "StateItem",
    "StateMapper",
    "Transpose",
    "Unify",
    "Unsqueeze",
    "Unstack",
    "check_groups",
    "expand",
    "for_each",
    "half_split_order",
    "items_of",
    "load_model_state",
    "parse_size",
    "write_model_state",
]
