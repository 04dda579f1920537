"""The run's random streams: python's, torch's and the device's (and numpy's, where it is in use).

They belong to the run, not to the process: `enter` puts them in place of the caller's, `leave` gives those back. Initial weights
and the order of samples do not come from here; they are functions of the seed. On several data ranks each has streams of its own, in a
pipeline each of its ranks too; tensor peers share them: they draw the same numbers as long as all of them draw.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def derive_seed(*key: object) -> int:
    """A 63-bit seed that is a function of the key, the same in every process and version."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def capture(device: torch.device) -> dict[str, Any]:
    """The state of every stream, as tensors and plain values."""
    state: dict[str, Any] = {"python": list(random.getstate()[1]), "python_gauss": random.getstate()[2], "torch": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        state["numpy"] = {"kind": kind, "keys": [int(k) for k in keys], "position": position, "has_gauss": has_gauss, "gauss": gauss}
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `capture` gave. A stream the state does not hold stays as it is."""
    random.setstate((3, tuple(state["python"]), state["python_gauss"]))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)
    if "numpy" in state and "numpy" in sys.modules:
        numpy, kept = sys.modules["numpy"], state["numpy"]
        keys = numpy.array(kept["keys"], dtype=numpy.uint32)
        numpy.random.set_state((kept["kind"], keys, kept["position"], kept["has_gauss"], kept["gauss"]))


def seed_all(seed: int, device: torch.device) -> None:
    """Start every stream from one seed. (`torch.manual_seed` also asks each back-end that is not there, which takes a millisecond.)"""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Whatever the block draws, the streams go on as if it had not run."""
    before = capture(device)
    try:
        yield
    finally:
        restore(before, device)


class RandomStreams:
    """The streams of one run on one rank, kept aside while the run does not step.

    rank: which of `num_ranks` different ones they are, see `DistributedContext.random_rank`.
    """

    def __init__(self, seed: int, device: torch.device, rank: int = 0, num_ranks: int = 1) -> None:
        self._device = device
        self._key: tuple[object, ...] = (seed, "run", rank) if num_ranks > 1 else (seed, "run")
        self._ours: dict[str, Any] | None = None
        self._callers: dict[str, Any] | None = None

    def enter(self) -> None:
        """Put the run's streams in place, seeded at the first time."""
        self._callers = capture(self._device)
        if self._ours is None:
            seed_all(derive_seed(*self._key), self._device)
        else:
            restore(self._ours, self._device)

    def leave(self) -> None:
        """Keep the run's streams, and give the caller's back."""
        if self._callers is not None:
            self._ours = capture(self._device)
            restore(self._callers, self._device)
            self._callers = None

    def state_dict(self) -> dict[str, Any]:
        """The streams as they are now; empty before the run ever stepped."""
        return capture(self._device) if self._callers is not None else dict(self._ours or {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved streams of this rank; empty: start from the seed."""
        self._ours = dict(state) or None
        if self._callers is not None and self._ours is not None:
            restore(self._ours, self._device)

    def start_anew(self, step: int) -> None:
        """Streams that are a function of the seed, the rank and `step` alone: for a run that goes on with other ranks than those whose
        streams were saved."""
        with forked(self._device):
            seed_all(derive_seed(*self._key, "from step", step), self._device)
            state = capture(self._device)
        self.load_state_dict(state)
