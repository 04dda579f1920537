"""`LoRA` and `FullTuning`: what a fine-tuning trains, as plain descriptions. How they change a model is `inject.py`.

Patterns are those of `fnmatch`, on names with global layer numbers: `*` matches dots too, so `"*.q_proj"` means all layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_kit.exceptions import ConfigurationError


@dataclass(frozen=True, slots=True)
class LoRA:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): W + scale * B @ A with a frozen W, A of `rank` rows, B zero at first.

    targets: patterns of names of Linear and Embedding layers, or of a module of experts or one of its weights.
    alpha: scale = alpha / rank; None: alpha = rank, a scale of 1. rslora: scale = alpha / sqrt(rank) (Kalajdzievski 2023,
    arXiv:2312.03732). dropout: on the inputs of A, not for embeddings.
    dtype: of A and B, such as torch.float32 over a bf16 model; None: that in which the layer was built.
    """

    rank: int
    alpha: float | None = None
    targets: Sequence[str] = field(kw_only=True)
    dropout: float = field(default=0.0, kw_only=True)
    rslora: bool = field(default=False, kw_only=True)
    dtype: torch.dtype | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", _patterns("LoRA(targets=...)", self.targets))
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigurationError(f"LoRA(rank={self.rank!r}): expected an integer of at least 1")
        if self.alpha is not None and not (isinstance(self.alpha, (int, float)) and math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigurationError(f"LoRA(alpha={self.alpha!r}): expected a positive number; the scale is alpha / rank")
        if not 0 <= self.dropout < 1:
            raise ConfigurationError(f"LoRA(dropout={self.dropout!r}): expected a probability of at least 0 and below 1")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ConfigurationError(f"LoRA(dtype={self.dtype}): expected a floating-point dtype")

    @property
    def scale(self) -> float:
        """The factor of B @ A."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def patterns(self) -> Sequence[str]:
        """Those that must match something."""
        return self.targets


@dataclass(frozen=True, slots=True)
class FullTuning:
    """Parameters that are trained as they are, beside adapters or alone; all others are frozen.

    patterns: of names of parameters, or of modules, whose parameters are all meant.
    """

    patterns: Sequence[str]

    def __init__(self, *patterns: str) -> None:
        object.__setattr__(self, "patterns", _patterns("FullTuning(...)", patterns))


Method = LoRA | FullTuning


def describe(methods: Sequence[Method]) -> dict[str, Any]:
    """Plain values for the loggers."""
    found: dict[str, Any] = {}
    for index, method in enumerate(methods):
        name = f"peft/{index}/{type(method).__name__}"
        found[f"{name}/patterns"] = ", ".join(method.patterns)
        if isinstance(method, LoRA):
            found |= {f"{name}/rank": method.rank, f"{name}/scale": method.scale, f"{name}/dropout": method.dropout}
    return found


def _patterns(where: str, given: Any) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given)
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ConfigurationError(f'{where} got {given!r}, expected patterns of names, such as ["*.q_proj", "*.v_proj"]')
    return patterns
