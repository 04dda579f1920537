"""Random numbers of the data: a block of code gets streams of its own, keyed by what it fetches.

Not the running streams of the training run. The one thing to know before editing: only host streams are switched (python's,
torch's CPU generator, numpy's where it is loaded), since data is made on the host; saving and restoring them costs about
0.1 ms with numpy, so nothing here belongs on a path that draws nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer_kit.random_state import derive_seed


def seed_host(seed: int) -> None:
    """Start the host streams from a seed. Devices are left alone, so that a worker process never touches one."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def fork_random(*key: object) -> Iterator[None]:
    """What the block draws is a function of `key`; afterwards the host streams go on as if it had not run.

    numpy counts if it was imported before the block begins.
    """
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    seed_host(derive_seed(*key))
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
