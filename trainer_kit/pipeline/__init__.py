"""What runs the microbatches of a pack through the stages."""

from trainer_kit.pipeline.result import PackResult
from trainer_kit.pipeline.sequential import SequentialRunner

__all__ = ["PackResult", "SequentialRunner"]
