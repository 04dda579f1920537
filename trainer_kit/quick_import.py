"""Importing without the garbage collector in between.

An import makes many objects and no garbage. By the time torch is imported, one full collection takes longer than half of our own
import, and it would find nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection in the block; afterwards the collector is as it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
