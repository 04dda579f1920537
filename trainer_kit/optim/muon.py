"""The provider of Muon: Muon for the matrices of the hidden layers, an AdamW for everything else.

Which matrices are embeddings and heads is told by name: no shape says it. Check `param_groups` if your names are unusual.
"""

from __future__ import annotations

from collections.abc import Set
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.optim.combined import CombinedOptimizer
from trainer_kit.optim.groups import matching
from trainer_kit.optim.kernels import check_dtypes
from trainer_kit.optim.provider import NamedParameters
from trainer_kit.optim.stochastic import StochasticAdamW
from trainer_kit.optim.torch_optimizers import AdamW, GroupedSettings
from trainer_kit.optim.wide_muon import WideMuon

# Module names of common models: an embedding anywhere in the path, a head as its first or last module ("output" in between is a
# part of an attention block in some).
EMBEDDINGS = ("*embed*", "wte", "wpe")
HEADS = ("head", "*_head", "classifier", "output")


class Muon(GroupedSettings):
    """Muon (Jordan, https://kellerjordan.github.io/posts/muon/) for matrices, `rest` for all other parameters.

    orthogonalise_in: "fp32", or wider where the parameters are; or "bf16", which is `torch.optim.Muon` and faster on accelerators. In
    bf16 the update keeps two or three digits, so runs on different meshes drift apart.

    rest: the optimizer of vectors, of everything that is not two-dimensional, of embeddings and heads (by name), and of `rest_patterns`.
    rest_patterns: further parameters for `rest`, by name pattern.
    adjust_lr: "original" scales by sqrt(max(1, rows/columns)); "match_rms_adamw" makes a learning rate of AdamW fit.
    groups, no_decay: for the matrices of Muon; those of the others are set in `rest`.
    """

    elementwise: ClassVar[bool] = False
    name: Literal["muon"] = "muon"
    lr: float = Field(default=1e-3, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    nesterov: bool = True
    num_newton_schulz: int = Field(default=5, ge=1, lt=100)
    eps: float = Field(default=1e-7, gt=0)
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"
    orthogonalise_in: Literal["fp32", "bf16"] = "fp32"
    rest: Annotated[AdamW | StochasticAdamW, Field(discriminator="name")] = Field(default_factory=AdamW)
    rest_patterns: tuple[str, ...] = ()

    def build(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        matrices, others = self._split(parameters)
        check_dtypes("Muon", matrices)
        made = WideMuon if self.orthogonalise_in == "fp32" else torch.optim.Muon
        muon = made(
            self.param_groups(matrices), lr=self.lr, weight_decay=self.weight_decay, momentum=self.momentum, nesterov=self.nesterov,
            eps=self.eps, ns_steps=self.num_newton_schulz, adjust_lr_fn=self.adjust_lr,
        )  # fmt: skip
        if not others:
            return muon
        rest = self.rest.build(others)
        for group in rest.param_groups:
            group["name"] = f"rest/{group['name']}"
        return CombinedOptimizer([muon, rest])

    def whole_parameters(self, parameters: NamedParameters) -> Set[str]:
        return {name for name, _ in self._split(parameters)[0]}

    def _split(self, parameters: NamedParameters) -> tuple[NamedParameters, NamedParameters]:
        names = [name for name, _ in parameters]
        excluded = set().union(*(matching(pattern, names, "rest_patterns") for pattern in self.rest_patterns))
        chosen = {
            name for name, parameter in parameters if parameter.ndim == 2 and name not in excluded and not _is_embedding_or_head(name)
        }
        if not chosen:
            raise ConfigurationError(
                f"Muon updates matrices, and none of the {len(names)} parameters is one (embeddings and heads aside); "
                "use optimizer=AdamW(...)"
            )
        return [pair for pair in parameters if pair[0] in chosen], [pair for pair in parameters if pair[0] not in chosen]


def _is_embedding_or_head(name: str) -> bool:
    modules = name.lower().split(".")[:-1] or [name.lower()]
    places = [(module, EMBEDDINGS) for module in modules] + [(module, HEADS) for module in (modules[0], modules[-1])]
    return any(fnmatchcase(module, pattern) for module, patterns in places for pattern in patterns)
