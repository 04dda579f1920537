"""`RouterBias`: the callback that moves the biases of routers, so that experts get equally many tokens without a loss that asks for it.

Know before editing: all ranks that hold the same layers take part in one sum per step, whatever they have seen.
"""

# ruff: noqa: N806  (shape suffixes are upper case: L routers, X experts)
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainer_kit.callback import Callback
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.models.experts import Router

if TYPE_CHECKING:
    from trainer_kit.events import BuildEnd, OptimizerStep


class RouterBias(Callback):
    """After each update, `balance_bias += rate * sign(mean load - load)`, for every router of a model with `MoEConfig(balance_bias=True)`.

    Section 2.1.2 of DeepSeek-V3 (arXiv:2412.19437), where `rate` is 0.001 for most of the training and 0 at its end. The load of an expert
    is the number of tokens sent to it in this step, over all data. A step that is skipped counts with the next one.
    """

    def __init__(self, rate: float = 0.001) -> None:
        if not 0.0 <= rate <= 1.0:  # probabilities are added to it
            raise ConfigurationError(f"RouterBias(rate={rate!r}): expected 0 to 1")
        self.rate = rate
        self._routers: list[Router] = []

    def describe(self) -> str:
        return f"RouterBias(rate={self.rate})"

    def on_build_end(self, event: BuildEnd) -> None:
        modules = [module for stage in event.trainer.stages for module in stage.modules()]
        self._routers = [module for module in modules if isinstance(module, Router) and module.balance_bias is not None]
        if not self._routers and event.trainer.context.num_pipeline_ranks == 1:  # stages of another rank may have some
            raise ConfigurationError("RouterBias found no router with a bias; set MoEConfig(balance_bias=True), or leave the callback out")

    @torch.no_grad()
    def on_optimizer_step(self, event: OptimizerStep) -> None:
        if not self._routers:
            return
        load_LX = torch.stack([router.num_routed for router in self._routers if router.num_routed is not None])
        group = event.trainer.context.stage_group
        if group is not None:
            torch.distributed.all_reduce(load_LX, group=group)
        # In whole numbers, mean and load are compared exactly.
        too_few_LX = load_LX.sum(-1, keepdim=True) - load_LX * load_LX.shape[-1]
        for router, too_few_X in zip(self._routers, too_few_LX, strict=True):
            assert router.balance_bias is not None and router.num_routed is not None
            router.balance_bias += self.rate * too_few_X.sign()
            router.num_routed.zero_()

    def close(self) -> None:
        self._routers = []
