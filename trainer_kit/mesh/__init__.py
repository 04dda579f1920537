"""Which ranks there are and how they are arranged. Knows nothing of models or training."""

from trainer_kit.mesh.context import DistributedContext
from trainer_kit.mesh.strategy import MeshStrategy

__all__ = ["DistributedContext", "MeshStrategy"]
