"""The provider of AdamW with stochastic rounding, for models whose parameters are bfloat16."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.optim.provider import NamedParameters
from trainer_kit.optim.stochastic_optimizer import StochasticRoundingAdamW
from trainer_kit.optim.torch_optimizers import GroupedSettings, check_betas

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class StochasticAdamW(GroupedSettings):
    """AdamW that computes in fp32 and rounds into bf16 parameters without bias.

    state_dtype: of the moments; "bf16" halves their memory (rounded stochastically too). float64 parameters keep float64 moments
        unless it is "bf16".
    seed: of the rounding noise, which depends on (seed, parameter name, step, place in the whole parameter) alone: on no mesh.
    """

    elementwise: ClassVar[bool] = True
    name: Literal["stochastic_adamw"] = "stochastic_adamw"
    lr: float = Field(default=1e-3, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> StochasticAdamW:
        check_betas(self.betas)
        return self

    def build(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        for name, parameter in parameters:
            if parameter.dtype not in (torch.bfloat16, torch.float32, torch.float64):
                raise ConfigurationError(f"StochasticAdamW takes bfloat16, float32 and float64 parameters; {name!r} is {parameter.dtype}")
        return StochasticRoundingAdamW(
            self.param_groups(parameters), lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay,
            state_dtype=STATE_DTYPES["bf16"] if self.state_dtype == "bf16" else None, seed=self.seed,
        )  # fmt: skip
