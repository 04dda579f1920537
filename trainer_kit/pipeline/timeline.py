"""`Timeline`: when each rank computed what, simulated or measured, and what follows from it: bubble and live activations.

Only computations count as busy; a rank that waits for data, or for its peers to finish the step, is idle. To keep in mind: papers on zero
bubble schedules count the idle time within a rank's own span, others until the last rank is done, so there are two numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from trainer_kit.pipeline.actions import Action, Kind


class Span(NamedTuple):
    """A computation of one rank, from `start` to `end` in any unit of time."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The computations of all ranks, those of each rank in order."""

    spans: tuple[Span, ...]
    num_ranks: int

    @classmethod
    def from_records(cls, records: Iterable[tuple[int, Action, float, float]], num_ranks: int) -> Timeline:
        """Of (rank, action, start, end) in any order, as a runtime records them on clocks that agree; time starts at the first."""
        spans = sorted((Span(*record) for record in records if record[1].kind.is_compute), key=lambda span: (span.rank, span.start))
        first = min((span.start for span in spans), default=0.0)
        return cls(tuple(span._replace(start=span.start - first, end=span.end - first) for span in spans), num_ranks)

    @cached_property
    def by_rank(self) -> tuple[Sequence[Span], ...]:
        found: dict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            found[span.rank].append(span)
        return tuple(found[rank] for rank in range(self.num_ranks))

    @cached_property
    def duration(self) -> float:
        """From the first start to the last end on any rank."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.by_rank)

    @property
    def idle(self) -> tuple[float, ...]:
        """The time that each rank does not compute between the first start and the last end on any rank."""
        return tuple(self.duration - busy for busy in self.busy)

    @property
    def waits(self) -> tuple[float, ...]:
        """The time that each rank does not compute between its own first start and its own last end."""
        spans = [max(span.end for span in spans) - min(span.start for span in spans) if spans else 0.0 for spans in self.by_rank]
        return tuple(span - busy for span, busy in zip(spans, self.busy, strict=True))

    @property
    def bubble_share(self) -> float:
        """The idle share of all ranks' time until the last one is done, 0 to 1."""
        return sum(self.idle) / (self.duration * self.num_ranks) if self.duration else 0.0

    @property
    def wait_share(self) -> float:
        """The largest share of waits in a rank's own span: the bubble rate of papers on zero bubble schedules."""
        shares = [wait / (wait + busy) for wait, busy in zip(self.waits, self.busy, strict=True) if busy]
        return max(shares, default=0.0)

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """For how many (stage, microbatch) each rank keeps what a forward leaves for its backward, at most: from the start of the forward
        to the end of the backward, or of its part for weights. Without backwards nothing is kept."""
        return tuple(map(_peak, self.by_rank))

    def summary(self) -> str:
        """One line."""
        peaks = self.peak_activations
        range_of_peaks = f"{min(peaks)} to {max(peaks)}" if min(peaks) != max(peaks) else f"{max(peaks)}"
        return f"time {self.duration:g}, bubble {self.bubble_share:.1%}, live activations per rank at most {range_of_peaks}"


def _peak(spans: Sequence[Span]) -> int:
    frees = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    kept = {span.action[1:] for span in spans if span.action.kind in frees}
    live = peak = 0
    for span in spans:
        if span.action.kind == Kind.FORWARD and span.action[1:] in kept:
            live += 1
            peak = max(peak, live)
        elif span.action.kind in frees:
            live -= 1
    return peak
