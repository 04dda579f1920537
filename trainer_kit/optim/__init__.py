"""Optimizers and learning rate schedules: settings that build them, and what a checkpoint needs of them.

Light: torch and pydantic only.
"""

from trainer_kit.optim.combined import CombinedOptimizer
from trainer_kit.optim.config import OptimizerConfig, parse_optimizer
from trainer_kit.optim.group_values import group_values, load_group_values
from trainer_kit.optim.groups import ParameterGroup
from trainer_kit.optim.materialize import materialize_state
from trainer_kit.optim.muon import Muon
from trainer_kit.optim.provider import OptimizerProvider, as_optimizer_provider, build_optimizer
from trainer_kit.optim.schedule import Piecewise, Segment
from trainer_kit.optim.scheduler import LRSchedulerProvider, as_lr_scheduler_provider
from trainer_kit.optim.state import (
    check_optimizer_state,
    load_optimizer_state,
    merge_optimizer_values,
    optimizer_templates,
    optimizer_tensors,
    optimizer_values,
)
from trainer_kit.optim.stochastic import StochasticAdamW
from trainer_kit.optim.stochastic_optimizer import StochasticRoundingAdamW
from trainer_kit.optim.torch_optimizers import SGD, Adam, AdamW
from trainer_kit.optim.update import Update, build_update

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "CombinedOptimizer",
    "LRSchedulerProvider",
    "Muon",
    "OptimizerConfig",
    "OptimizerProvider",
    "ParameterGroup",
    "Piecewise",
    "Segment",
    "StochasticAdamW",
    "StochasticRoundingAdamW",
    "Update",
    "as_lr_scheduler_provider",
    "as_optimizer_provider",
    "build_optimizer",
    "build_update",
    "check_optimizer_state",
    "group_values",
    "load_group_values",
    "load_optimizer_state",
    "materialize_state",
    "merge_optimizer_values",
    "optimizer_templates",
    "optimizer_tensors",
    "optimizer_values",
    "parse_optimizer",
]
