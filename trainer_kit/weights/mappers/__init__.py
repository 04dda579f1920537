"""The state mappers: leaves, which turn few tensors into few, and compositions of mappers. Their interface is in `mapper.py`.

Every one of them takes input names, then output names, then settings by keyword, and says all it will do when it is built.
"""

from trainer_kit.weights.mappers.dims import Rename, Squeeze, Transpose, Unsqueeze
from trainer_kit.weights.mappers.fit import FitReport
from trainer_kit.weights.mappers.parallel import Parallel
from trainer_kit.weights.mappers.parts import Chunk, Concatenate, Split, Stack, Unstack
from trainer_kit.weights.mappers.reshape import Reshape
from trainer_kit.weights.mappers.rows import Pad, Permute, Select, Slice, half_split_order
from trainer_kit.weights.mappers.scope import Prefix, expand, for_each
from trainer_kit.weights.mappers.sequential import Sequential
from trainer_kit.weights.mappers.subset import Only
from trainer_kit.weights.mappers.values import Cast, Constant, Copy, Drop, Function, Unify

__all__ = [
    "Cast",
    "Chunk",
    "Concatenate",
    "Constant",
    "Copy",
    "Drop",
    "FitReport",
    "Function",
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
    "Transpose",
    "Unify",
    "Unsqueeze",
    "Unstack",
    "expand",
    "for_each",
    "half_split_order",
]
