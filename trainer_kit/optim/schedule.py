"""Learning rate schedules in pieces: a factor of the base learning rate as a closed formula of the update.

Not a torch LRScheduler: nothing accumulates, so a resumed, extended or jumped run has exactly the rates of a straight one.
A segment of n updates that goes from a to b has its first value one n-th of the way along and b in its last update; the start value
itself is never used, so a warm-up from 0 makes no update with a learning rate of 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field, model_validator

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.optim.curve import Curve, Kind, Piece
from trainer_kit.optim.scheduler import LRSchedulerProvider, PiecewiseScheduler
from trainer_kit.optim.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Segment(Settings):
    """One piece. to: the factor in its last update. Exactly one of `steps`, `percent` (of total_steps) and `rest` gives its length."""

    kind: Kind
    to: float = Field(ge=0)
    steps: int | None = Field(default=None, ge=1)
    percent: float | None = Field(default=None, gt=0, le=100)
    rest: bool = False
    power: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Segment:
        given = [f"steps={self.steps}"] * (self.steps is not None) + [f"percent={self.percent}"] * (self.percent is not None)
        given += ["rest=True"] * self.rest
        if len(given) != 1:
            raise ConfigurationError(
                f"a {self.kind} segment takes one of steps=, percent= and rest=True as its length, found {' and '.join(given) or 'none'}"
            )
        if self.kind == "polynomial" and self.power is None:
            raise ConfigurationError("a polynomial segment needs power=, such as 2.0")
        if self.kind != "polynomial" and self.power is not None:
            raise ConfigurationError(f"power={self.power} has no effect on a {self.kind} segment; use polynomial")
        return self

    def __repr__(self) -> str:
        length = f"steps={self.steps}" if self.steps else f"percent={self.percent:g}" if self.percent else "rest=True"
        power = f", power={self.power:g}" if self.power else ""
        return f".{self.kind}({self.to:g}, {length}{power})"


class Piecewise(Settings, LRSchedulerProvider):
    """`Piecewise().linear(1.0, steps=100).cosine(0.1, rest=True)`: warm up, then fall to a tenth exactly in the last step.

    Each method returns a longer schedule; after the last segment the factor stays. start: the value that the first segment leaves.
    """

    name: Literal["piecewise"] = "piecewise"
    start: float = Field(default=0.0, ge=0)
    segments: tuple[Segment, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Piecewise:
        rests = [index for index, segment in enumerate(self.segments) if segment.rest]
        if len(rests) > 1:
            raise ConfigurationError(
                f"rest=True is used by segments {rests}; only one can take the rest, give the others steps= or percent="
            )
        previous = self.start
        for index, segment in enumerate(self.segments):
            if segment.kind == "exponential" and not (previous > 0 and segment.to > 0):
                raise ConfigurationError(
                    f"segment {index} is exponential from {previous:g} to {segment.to:g}; both must be above 0: "
                    "set start= or put a linear warm-up first"
                )
            previous = segment.to
        return self

    def linear(self, to: float, *, steps: int | None = None, percent: float | None = None, rest: bool = False) -> Piecewise:
        """A straight line to the factor `to`."""
        return self._with(kind="linear", to=to, steps=steps, percent=percent, rest=rest)

    def cosine(self, to: float, *, steps: int | None = None, percent: float | None = None, rest: bool = False) -> Piecewise:
        """Half a period of a cosine to the factor `to`, flat at both ends (https://arxiv.org/abs/1608.03983)."""
        return self._with(kind="cosine", to=to, steps=steps, percent=percent, rest=rest)

    def polynomial(
        self, to: float, *, power: float = 2.0, steps: int | None = None, percent: float | None = None, rest: bool = False
    ) -> Piecewise:
        """to + (from - to) * (1 - t) ** power, with t from 0 to 1."""
        return self._with(kind="polynomial", to=to, steps=steps, percent=percent, rest=rest, power=power)

    def exponential(self, to: float, *, steps: int | None = None, percent: float | None = None, rest: bool = False) -> Piecewise:
        """The same ratio from update to update, to the factor `to`; both ends above 0."""
        return self._with(kind="exponential", to=to, steps=steps, percent=percent, rest=rest)

    def constant(self, to: float | None = None, *, steps: int | None = None, percent: float | None = None, rest: bool = False) -> Piecewise:
        """The factor `to` throughout; by default that of the end of the segment before."""
        if to is None and not self.segments and self.start == 0:
            raise ConfigurationError("constant() as the first segment would hold the factor 0: give it the factor, constant(1.0, ...)")
        previous = self.segments[-1].to if self.segments else self.start
        return self._with(kind="constant", to=previous if to is None else to, steps=steps, percent=percent, rest=rest)

    def _with(self, **segment: Any) -> Piecewise:
        return Piecewise(start=self.start, segments=(*self.segments, Segment(**segment)))

    def __repr__(self) -> str:
        start = f"start={self.start:g}" if self.start else ""
        return f"Piecewise({start})" + "".join(map(repr, self.segments))

    def __str__(self) -> str:
        return repr(self)

    def hparams(self) -> dict[str, Any]:
        """Plain values for the loggers."""
        return self.model_dump(mode="json", exclude_none=True)

    def curve(self, total_steps: int | None = None) -> Curve:
        """The schedule with every length in updates. Raises ConfigurationError if the segments do not fit total_steps."""
        if not self.segments:
            raise ConfigurationError("the schedule Piecewise() has no segment; add one, such as .linear(1.0, steps=100)")
        lengths = [_length(segment, total_steps, f"segment {index} {segment!r}") for index, segment in enumerate(self.segments)]
        taken = sum(length for length in lengths if length is not None)
        if total_steps is not None and taken > total_steps:
            raise ConfigurationError(
                f"the segments of {self!r} take {taken} steps, but total_steps={total_steps}; "
                "shorten them, use percent= or raise total_steps"
            )
        pieces, previous, end = [], self.start, 0
        for segment, length in zip(self.segments, lengths, strict=True):
            length = (total_steps or 0) - taken if length is None else length
            pieces.append(Piece(segment.kind, previous, segment.to, end, end := end + length, segment.power or 1.0))
            previous = segment.to
        return Curve(tuple(pieces))

    def factor(self, update_index: int, total_steps: int | None = None) -> float:
        """The factor of the update with this index, from 0."""
        return self.curve(total_steps).factor(update_index)

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int | None) -> PiecewiseScheduler:
        return PiecewiseScheduler(optimizer, self.curve(total_steps))

    def plot(self, total_steps: int | None = None) -> Figure:
        """The factor of every update, as a figure of matplotlib. Raises ConfigurationError naming the extra if that is not installed."""
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ConfigurationError('plot() needs matplotlib: pip install "trainer_kit[plot]"') from error
        curve = self.curve(total_steps)
        num = max(total_steps or curve.num_updates, 1)
        figure, axes = pyplot.subplots(figsize=(7, 3))
        pyplot.close(figure)  # a notebook would show it twice, and pyplot would keep it alive
        axes.plot(range(1, num + 1), [curve.factor(index) for index in range(num)], drawstyle="steps-pre")
        axes.set(xlabel="step", ylabel="factor of the base learning rate", ylim=(0, None), title=repr(self))
        return figure


def _length(segment: Segment, total_steps: int | None, label: str) -> int | None:
    """Updates of a segment; None for the one that takes the rest. Percentages are rounded down, so that they always fit."""
    if segment.steps is not None:
        return segment.steps
    if total_steps is None:
        asked = "rest=True" if segment.rest else f"percent={segment.percent:g}"
        raise ConfigurationError(f"{label} uses {asked}, which needs the length of the run: set total_steps=, or give the segment steps=")
    if segment.percent is not None:
        return int(segment.percent * total_steps / 100 + 1e-9)
    return None
