"""What runs the microbatches of a pack through the stages."""

from trainer_kit.pipeline.sequential import PackResult, SequentialRunner

__all__ = ["PackResult", "SequentialRunner"]
