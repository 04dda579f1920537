"""Providers for the element-wise optimizers of torch: AdamW, Adam and SGD.

Only settings live here; grouping is in `groups.py`, kernels in `kernels.py`. The update itself is torch's.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.optim.groups import ParameterGroup, build_groups
from trainer_kit.optim.kernels import Kernel, check_dtypes, kernel_arguments
from trainer_kit.optim.provider import NamedParameters, OptimizerProvider
from trainer_kit.optim.settings import Settings


class GroupedSettings(Settings, OptimizerProvider):
    """What all optimizers of this folder share: base values, groups by name pattern, and the rule for weight decay.

    no_decay: name patterns without weight decay, besides everything with fewer than two dims (norms, biases).
    decay_vectors: weight decay for those too.
    groups: own values by name pattern; the first match wins.
    """

    name: str
    lr: float = Field(ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    no_decay: tuple[str, ...] = ()
    decay_vectors: bool = False
    groups: tuple[ParameterGroup, ...] = ()

    @model_validator(mode="after")
    def _check_decay(self) -> Self:
        if self.weight_decay == 0 and (self.no_decay or self.decay_vectors):
            setting = "no_decay" if self.no_decay else "decay_vectors"
            raise ConfigurationError(f"{setting}= has no effect with weight_decay=0; set weight_decay= or leave it out")
        return self

    def param_groups(self, parameters: NamedParameters) -> list[dict[str, Any]]:
        """The parameters in torch's groups, each with its name, lr and weight decay."""
        return build_groups(
            parameters,
            lr=self.lr,
            weight_decay=self.weight_decay,
            no_decay=self.no_decay,
            decay_vectors=self.decay_vectors,
            groups=self.groups,
        )

    def hparams(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


class AdamSettings(GroupedSettings):
    """What Adam and AdamW share; `made` is the optimizer of torch."""

    elementwise: ClassVar[bool] = True
    made: ClassVar[type[torch.optim.Adam]]
    lr: float = Field(default=1e-3, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, ge=0)
    amsgrad: bool = False
    kernel: Kernel = "auto"

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_betas(self.betas)
        return self

    def build(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        check_dtypes(type(self).__name__, parameters)
        arguments: dict[str, Any] = kernel_arguments(self.kernel, self.made, parameters)
        groups = self.param_groups(parameters)
        return self.made(
            groups, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, amsgrad=self.amsgrad, **arguments
        )


class AdamW(AdamSettings):
    """torch.optim.AdamW (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101)."""

    made: ClassVar[type[torch.optim.Adam]] = torch.optim.AdamW
    name: Literal["adamw"] = "adamw"
    weight_decay: float = Field(default=0.01, ge=0)


class Adam(AdamSettings):
    """torch.optim.Adam (Kingma and Ba, https://arxiv.org/abs/1412.6980); its weight decay is added to the gradient."""

    made: ClassVar[type[torch.optim.Adam]] = torch.optim.Adam
    name: Literal["adam"] = "adam"


class SGD(GroupedSettings):
    """torch.optim.SGD, with momentum if asked for; its weight decay is added to the gradient."""

    elementwise: ClassVar[bool] = True
    name: Literal["sgd"] = "sgd"
    lr: float = Field(default=1e-2, ge=0)
    momentum: float = Field(default=0.0, ge=0)
    dampening: float = 0.0
    nesterov: bool = False
    kernel: Kernel = "auto"

    @model_validator(mode="after")
    def _check(self) -> SGD:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ConfigurationError(f"nesterov=True needs momentum > 0 and dampening 0, found {self.momentum} and {self.dampening}")
        if self.dampening and not self.momentum:
            raise ConfigurationError(f"dampening={self.dampening} has no effect without momentum; set momentum= too")
        return self

    def build(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        check_dtypes("SGD", parameters)
        arguments: dict[str, Any] = kernel_arguments(self.kernel, torch.optim.SGD, parameters)
        return torch.optim.SGD(
            self.param_groups(parameters), lr=self.lr, momentum=self.momentum, dampening=self.dampening, nesterov=self.nesterov,
            weight_decay=self.weight_decay, **arguments,
        )  # fmt: skip


def check_betas(betas: tuple[float, float]) -> None:
    """Raises ConfigurationError unless both are in [0, 1)."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigurationError(f"betas={betas} must lie in [0, 1), such as (0.9, 0.999)")
