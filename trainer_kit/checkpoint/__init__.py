"""Training checkpoints: what is needed to resume a run, as data.

A checkpoint is a folder `step-00000100` with one safetensors file per rank and `manifest.json`, written last. Not here: model
states for exchange with other tools (`trainer_kit.weights`). Importing this package does not import torch.distributed.checkpoint.
"""

from trainer_kit.checkpoint.checksum import check_checksums, check_sizes
from trainer_kit.checkpoint.folder import CheckpointFolder, SavedStep, newest_path
from trainer_kit.checkpoint.identity import check_identity, parameter_digest
from trainer_kit.checkpoint.loader import load
from trainer_kit.checkpoint.manifest import Manifest, read_manifest
from trainer_kit.checkpoint.saver import CheckpointSaver
from trainer_kit.checkpoint.tree import flatten_state, unflatten_state

__all__ = [
    "CheckpointFolder",
    "CheckpointSaver",
    "Manifest",
    "SavedStep",
    "check_checksums",
    "check_identity",
    "check_sizes",
    "flatten_state",
    "load",
    "newest_path",
    "parameter_digest",
    "read_manifest",
    "unflatten_state",
]
