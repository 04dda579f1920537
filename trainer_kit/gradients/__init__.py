"""Gradients between the backward pass and the update: one division, the norm, the finite check."""

from trainer_kit.gradients.accumulated import Gradients
from trainer_kit.gradients.guard import NonFiniteGuard

__all__ = ["Gradients", "NonFiniteGuard"]
