"""`Drawing`: timelines as text, and as an image in notebooks. It draws measured timelines as it draws simulated ones.

Here is what both forms share (what is shown, labels, dependencies) and the text; `svg.py` has the image. Large timelines are cut to their
beginning, which is said, because nobody reads a hundred thousand boxes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer_kit.mesh.stages import StageLayout
from trainer_kit.pipeline.actions import NAMES, Action, Kind
from trainer_kit.pipeline.svg import Box, Line, Panel, render
from trainer_kit.pipeline.timeline import Span, Timeline

LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}
_TURNS = "abcdefghijklmnopqrstuvwxyz"
_MAX_BOXES, _MAX_COLUMNS = 4000, 1000


@dataclass(frozen=True)
class Drawing:
    """One or several timelines of one layout, by title; each has its own scale."""

    timelines: Mapping[str, Timeline]
    layout: StageLayout

    def text(self) -> str:
        """A row per rank; a box is its letter, its microbatch and, with several stages per rank, a letter for the stage."""
        return "\n\n".join(self._text_of(title, timeline) for title, timeline in self.timelines.items())

    def svg(self) -> str:
        """The timelines below each other, with the transfers between ranks as lines; the pointer on a box shows its microbatch's way."""
        return render([self._panel(title, timeline) for title, timeline in self.timelines.items()])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the image (`.svg`), or the text (any other name)."""
        path = Path(path)
        path.write_text(self.svg() if path.suffix == ".svg" else str(self) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Drawing of {', '.join(self.timelines)}>"

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x: auto">{self.svg()}</div>'

    def _text_of(self, title: str, timeline: Timeline) -> str:
        label_width = max((len(self.label(span.action)) for span in timeline.spans), default=1)
        per_time = (label_width + 1) / _unit(timeline)
        rows = []
        for rank, spans in enumerate(timeline.by_rank):
            row = ""
            for span in spans:
                start, end = round(span.start * per_time), round(span.end * per_time)
                row = row.ljust(start) + self.label(span.action).ljust(end - start - 1, "-")[: max(1, end - start - 1)]
            rows.append(f"rank {rank:<3} |{row if len(row) <= _MAX_COLUMNS else row[:_MAX_COLUMNS] + ' ...'}")
        return "\n".join([title, timeline.summary(), *rows, self._legend(timeline)])

    def _legend(self, timeline: Timeline) -> str:
        kinds = sorted({span.action.kind for span in timeline.spans})
        turns = range(self.layout.stages_per_rank)
        stages = f"; {', '.join(_TURNS[turn % 26] for turn in turns)}: the stages of a rank in order" if len(turns) > 1 else ""
        return ", ".join(f"{LETTERS[kind]} {NAMES[kind]}" for kind in kinds) + stages

    def label(self, action: Action) -> str:
        turn = self.turn(action.stage)
        return f"{LETTERS[action.kind]}{action.microbatch}" + (_TURNS[turn % 26] if self.layout.stages_per_rank > 1 else "")

    def turn(self, stage: int) -> int:
        """The place of a stage among those of its rank."""
        return stage // self.layout.num_ranks

    def _panel(self, title: str, timeline: Timeline) -> Panel:
        spans = sorted(timeline.spans, key=lambda span: (span.start, span.rank))
        shown, summary = spans[:_MAX_BOXES], timeline.summary()
        if len(shown) < len(spans):
            summary += f"; the first {len(shown)} of {len(spans)} computations"
        several = self.layout.stages_per_rank > 1
        if several:
            summary += "; darker: later stages of a rank"
        return Panel(
            title=title,
            summary=summary,
            rows=[f"rank {rank}" for rank in range(timeline.num_ranks)],
            unit=_unit(timeline),
            legend=[(kind.name.lower(), NAMES[kind]) for kind in sorted({span.action.kind for span in shown})],
            boxes=[
                Box(
                    row=span.rank,
                    start=span.start,
                    end=span.end,
                    color=span.action.kind.name.lower(),
                    shade=self.turn(span.action.stage),
                    label=str(span.action.microbatch),
                    hint=f"rank {span.rank}: {span.action.text(with_stage=several)}, {span.start:g} to {span.end:g}",
                    group=span.action.microbatch,
                )
                for span in shown
            ],
            lines=[
                Line((source.rank, source.end), (target.rank, target.start), target.action.kind == Kind.FORWARD, target.action.microbatch)
                for source, target in dependencies(shown)
            ],
        )


def dependencies(spans: list[Span]) -> Iterator[tuple[Span, Span]]:
    """The pairs of computations on two ranks of which the second needs what the first one made."""
    made: dict[tuple[bool, int, int], Span] = {}
    for span in spans:
        if span.action.kind != Kind.BACKWARD_WEIGHT:
            made[span.action.kind == Kind.FORWARD, span.action.stage, span.action.microbatch] = span
    for (forward, stage, microbatch), target in made.items():
        source = made.get((forward, stage - 1 if forward else stage + 1, microbatch))
        if source is not None and source.rank != target.rank:
            yield source, target


def _unit(timeline: Timeline) -> float:
    """A time that most computations take at least, so that most labels fit."""
    times = sorted(span.end - span.start for span in timeline.spans if span.end > span.start)
    return times[len(times) // 10] if times else 1.0
