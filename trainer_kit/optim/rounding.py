"""Stochastic rounding of float32 to bfloat16, and the noise it uses.

A value moves up with the probability of its distance from the lower neighbour, so it is right on average, where rounding to nearest
loses every update smaller than half a step. The noise depends on (seed, parameter name, step) alone: not on other parameters, on
the mesh, or on the global generators, so a resumed run and tied copies of a parameter draw the same.
"""

from __future__ import annotations

import hashlib

import torch

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def noise_key(seed: int, name: str) -> int:
    """64 bits from the seed and a name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def mix(key: int, step: int) -> int:
    """A seed for one step: the splitmix64 finaliser (Steele, Lea, Flood 2014), as neighbouring seeds give related streams."""
    x = (key + step * _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def draw_noise(num: int, generator: torch.Generator) -> torch.Tensor:
    """`num` integers, uniform over the 65,536 values of int16: each 64-bit draw gives four."""
    draws = torch.empty((num + 3) // 4, dtype=torch.int64, device=generator.device)
    return draws.random_(-(2**63), None, generator=generator).view(torch.int16)[:num]


def round_stochastically(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Float32 numbers that bfloat16 holds exactly, each one of the two neighbours of a value; inf and nan stay. Shapes: both (N,).

    bfloat16 is the upper half of float32, and the bits of neighbours differ by one there: a uniform number in [0, 65536) added to the
    lower half carries over with exactly the probability wanted.
    """
    bits = values.view(torch.int32) + noise
    bits.add_(0x8000).bitwise_and_(-0x10000)  # the noise is signed: shift it to start from zero
    return torch.where(values.isnan(), values, bits.view(torch.float32))  # a nan of all ones would carry over into -0
