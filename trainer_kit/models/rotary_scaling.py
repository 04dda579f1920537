"""How rotary positions are stretched, so that a model goes on with longer sequences than it was first trained with.

Each kind changes the frequencies theta^(-2e/E), and YaRN the size of queries and keys too. Not here: the rotation (`rotary.py`). Before
editing: all is in float64, and the tests compare it with transformers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from trainer_kit.models.config_parts import check


def frequencies(head_size: int, theta: float) -> torch.Tensor:
    """The angle by which each pair of a head turns per position, (E / 2,) in float64, on the default device."""
    half = head_size // 2
    return theta ** -(torch.arange(half, dtype=torch.float64) / half)


class RotaryScaling(ABC):
    """Another set of frequencies, and a factor for cosines and sines."""

    __slots__ = ()

    @abstractmethod
    def frequencies(self, head_size: int, theta: float) -> torch.Tensor:
        """What takes the place of `frequencies(head_size, theta)`."""

    @property
    def attention_scale(self) -> float:
        """The factor of cosines and sines; scores get its square."""
        return 1.0


@dataclass(frozen=True, slots=True)
class LinearScaling(RotaryScaling):
    """Positions are divided by `factor` (Chen et al. 2023, position interpolation, arXiv:2306.15595)."""

    factor: float

    def __post_init__(self) -> None:
        check(self, "factor", self.factor >= 1.0, "at least 1")

    def frequencies(self, head_size: int, theta: float) -> torch.Tensor:
        return frequencies(head_size, theta) / self.factor


@dataclass(frozen=True, slots=True)
class NTKScaling(RotaryScaling):
    """The slowest pair is slowed by `factor` and the fastest not at all: theta is multiplied by factor^(E / (E - 2)).

    The "NTK-aware" scaling that section 3.1 of YaRN (arXiv:2309.00071) describes, by a fixed factor.
    """

    factor: float

    def __post_init__(self) -> None:
        check(self, "factor", self.factor >= 1.0, "at least 1")

    def frequencies(self, head_size: int, theta: float) -> torch.Tensor:
        return frequencies(head_size, theta * self.factor ** (head_size / max(head_size - 2, 1)))


@dataclass(frozen=True, slots=True)
class Llama3Scaling(RotaryScaling):
    """Pairs with long wavelengths are slowed by `factor`, those with short ones not, and between the two it goes over smoothly.

    `apply_scaling` of Meta's llama-models. Long and short: longer than `original_max_seq_len / low_freq_factor` positions per turn, and
    shorter than `original_max_seq_len / high_freq_factor`.
    """

    factor: float
    original_max_seq_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        check(self, "factor", self.factor >= 1.0, "at least 1")
        check(self, "original_max_seq_len", self.original_max_seq_len >= 1, "at least 1")
        is_wide = self.high_freq_factor > self.low_freq_factor > 0
        check(self, "high_freq_factor", is_wide, f"more than low_freq_factor={self.low_freq_factor}, which is above 0")

    def frequencies(self, head_size: int, theta: float) -> torch.Tensor:
        plain = frequencies(head_size, theta)
        num_turns = self.original_max_seq_len * plain / (2 * math.pi)  # of a pair over the original length
        kept = ((num_turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, slots=True)
class YaRNScaling(RotaryScaling):
    """As `Llama3Scaling`, with a ramp over the pairs' numbers, and a temperature of the scores (Peng et al. 2023, arXiv:2309.00071).

    beta_fast, beta_slow: pairs with more than `beta_fast` turns over the original length stay, those with fewer than `beta_slow` are slowed
    by `factor`. truncate: the ends of the ramp are whole numbers. attention_factor: the factor of cosines and sines; None: `0.1 ln(factor)
    + 1`, equation 22, or, with both `mscale` and `mscale_all_dim`, the quotient of DeepSeek (arXiv:2405.04434).
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check(self, "factor", self.factor >= 1.0, "at least 1")
        check(self, "original_max_seq_len", self.original_max_seq_len >= 1, "at least 1")
        check(self, "beta_fast", self.beta_fast >= self.beta_slow > 0, f"at least beta_slow={self.beta_slow}, which is above 0")

    @property
    def attention_scale(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0

    def frequencies(self, head_size: int, theta: float) -> torch.Tensor:
        plain = frequencies(head_size, theta)
        first, last = (self._pair(num_turns, head_size, theta) for num_turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_size - 1)
        last = last if last != first else first + 0.001  # a ramp of one pair
        slowed = ((torch.arange(head_size // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
        return plain * (1 - slowed + slowed / self.factor)

    def _pair(self, num_turns: float, head_size: int, theta: float) -> float:
        """The number of the pair that makes so many turns over the original length, as a real number."""
        return head_size * math.log(self.original_max_seq_len / (num_turns * 2 * math.pi)) / (2 * math.log(theta))
