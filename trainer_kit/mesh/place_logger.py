"""The logger of a rank: what it says begins with where it comes from, such as `[rank 3: dp 1, tp 1]`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any


class PlaceLogger(logging.LoggerAdapter[logging.Logger]):
    """The logger "trainer_kit" with a rank's coordinates in front."""

    def __init__(self, rank: int, coordinates: Mapping[str, int]) -> None:
        super().__init__(logging.getLogger("trainer_kit"))
        places = ", ".join(f"{dim} {place}" for dim, place in coordinates.items())
        self.prefix = f"[rank {rank}: {places}]" if places else f"[rank {rank}]"

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the prefix before the message; a `%` in it would be taken for a format, so there is none."""
        return f"{self.prefix} {msg}", kwargs
