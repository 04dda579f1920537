"""The progress bar of a load: bytes, where there is a terminal or a notebook, and only for loads that take a while."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHOWN_AFTER = 2.0  # seconds


@contextmanager
def loading_bar(label: str, num_bytes: int, *, is_shown: bool = True) -> Iterator[Callable[[int], object]]:
    """Gives what is to be told how many bytes were read, each time. is_shown: one rank of a node shows its own part."""
    if not is_shown:
        yield int
        return
    from tqdm.auto import tqdm

    in_notebook = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)
    is_off = not in_notebook and not sys.stderr.isatty()
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc=label, delay=SHOWN_AFTER, leave=False, disable=is_off) as bar:
        yield bar.update
