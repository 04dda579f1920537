"""Train and eval modes: what `fit` sets, and what an evaluation gives back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


def set_train_modes(stages: Sequence[nn.Module]) -> None:
    """Bring a model that is wholly in eval mode, as loaders give it, into train mode; frozen parts stay in eval mode.

    A model with any module in train mode is left as the user set it.
    """
    modules = [module for stage in stages for module in stage.modules()]
    if any(module.training for module in modules):
        return
    for stage in stages:
        _train_unless_frozen(stage)


def _train_unless_frozen(module: nn.Module) -> None:
    parameters = list(module.parameters())
    if parameters and not any(p.requires_grad for p in parameters):
        return
    module.training = True
    for child in module.children():
        _train_unless_frozen(child)


@contextmanager
def eval_modes(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Eval mode for the block; afterwards every module is in the mode it had."""
    before = [(module, module.training) for stage in stages for module in stage.modules()]
    for stage in stages:
        stage.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
