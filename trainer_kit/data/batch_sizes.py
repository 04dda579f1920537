"""The batch arithmetic of `AutoDataProvider`: sizes that fit each other, the data ranks and the dataset, or an error with all numbers.

The one thing to know before editing: nothing is rounded; a size that does not divide is refused.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from trainer_kit.exceptions import ConfigurationError


def count(name: str, value: Any, at_least: int = 1) -> int:
    """`value` as an int, or an error that names the argument."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < at_least:
        raise ConfigurationError(f"{name}= is {value!r}, expected an integer of at least {at_least}")
    return number


@dataclass
class BatchSizes:
    """global_batch_size: samples per step over all data ranks; microbatch_size: per forward pass and rank, None: all at once."""

    global_batch_size: int
    microbatch_size: int | None

    def __post_init__(self) -> None:
        self.global_batch_size = count("global_batch_size", self.global_batch_size)
        if self.microbatch_size is not None:
            self.microbatch_size = count("microbatch_size", self.microbatch_size)
            self.microbatch_on(1)

    def microbatch_on(self, num_data_ranks: int) -> int:
        """The microbatch size on so many data ranks."""
        size, ranks = self.global_batch_size, num_data_ranks
        micro = self.microbatch_size if self.microbatch_size is not None else max(1, size // ranks)
        if size % (micro * ranks):
            given = "" if self.microbatch_size is None else f"microbatch_size={micro} x "
            raise ConfigurationError(
                f"global_batch_size={size} is not a multiple of {given}{ranks} data rank{'s' if ranks > 1 else ''} = {micro * ranks}; "
                f"change global_batch_size= to a multiple of {micro * ranks}"
                + ("" if self.microbatch_size is None else f", or microbatch_size= to a divisor of {max(1, size // ranks)}")
            )
        return micro

    def check_dataset_size(self, num_samples: int, drop_last: bool) -> None:
        """Refuse a dataset that gives no step."""
        if num_samples == 0:
            raise ConfigurationError("dataset= is empty: it has 0 samples, expected at least one")
        if drop_last and num_samples < self.global_batch_size:
            raise ConfigurationError(
                f"dataset= has {num_samples} samples, fewer than global_batch_size={self.global_batch_size}, and drop_last=True leaves "
                "out the only batch; set drop_last=False or a smaller global_batch_size="
            )

    def usable(self, num_samples: int, start: int, drop_last: bool) -> int:
        """Where the last pack of an epoch ends that is read from `start` on."""
        return num_samples - (num_samples - start) % self.global_batch_size if drop_last else num_samples
