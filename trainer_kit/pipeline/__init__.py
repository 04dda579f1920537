"""What runs the microbatches of a pack through the stages."""

from trainer_kit.pipeline.loss_sums import LossSums
from trainer_kit.pipeline.runner import PackRunner
from trainer_kit.pipeline.sequential import SequentialRunner

__all__ = ["LossSums", "PackRunner", "SequentialRunner"]
