"""Boxes and lines on rows of time, as SVG. Knows nothing of pipelines.

Everything of one group lies in one element, so that plain CSS can bring it out under the pointer, without scripts, which notebooks and
code hosts strip. All texts are escaped here.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

_ROW, _GAP, _LEFT, _UNIT, _TOP, _FOOT = 26, 22, 64, 26, 58, 34
_COLORS = {
    "forward": (147, 190, 246),
    "backward": (140, 211, 158),
    "backward_input": (122, 208, 203),
    "backward_weight": (246, 196, 120),
}
_STYLE = """
.tkp text { font: 11px sans-serif; fill: #1d2733 }
.tkp .title { font-size: 13px; font-weight: bold }
.tkp .axis { stroke: #c5ccd4; stroke-width: 1 }
.tkp .row { fill: #f3f5f7 }
.tkp rect.box { stroke: #ffffff; stroke-width: 1 }
.tkp text.number { text-anchor: middle; pointer-events: none }
.tkp line.dep { stroke-width: 1; stroke-opacity: .55 }
.tkp .onwards { stroke: #2f6fc4 } .tkp .back { stroke: #2b8a4b; stroke-dasharray: 3 2 }
.tkp .group:hover rect.box { stroke: #d02b2b; stroke-width: 2 }
.tkp .group:hover line.dep { stroke: #d02b2b; stroke-width: 2; stroke-opacity: 1 }
"""


@dataclass(frozen=True)
class Box:
    """A span on a row. color: a name; shade: 0 is the plain color, more is darker; hint: shown under the pointer."""

    row: int
    start: float
    end: float
    color: str
    shade: int
    label: str
    hint: str
    group: int


@dataclass(frozen=True)
class Line:
    """From (row, time) to (row, time). onwards: solid, else dashed."""

    source: tuple[int, float]
    target: tuple[int, float]
    onwards: bool
    group: int


@dataclass(frozen=True)
class Panel:
    """One drawing with its own scale: `unit` is a time that gets a readable width."""

    title: str
    summary: str
    rows: Sequence[str]
    unit: float
    legend: Sequence[tuple[str, str]]
    boxes: Sequence[Box]
    lines: Sequence[Line]

    @property
    def height(self) -> int:
        return _TOP + len(self.rows) * (_ROW + _GAP) + _FOOT

    @property
    def end(self) -> float:
        return max((box.end for box in self.boxes), default=0.0)

    @property
    def width(self) -> float:
        return max(_LEFT + self.end / self.unit * _UNIT + 24, _LEFT + 150 * len(self.legend), 7.0 * max(len(self.title), len(self.summary)))


def render(panels: Sequence[Panel]) -> str:
    """The panels below each other."""
    width = max((panel.width for panel in panels), default=0.0)
    height = sum(panel.height for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tkp" width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
    ]
    top = 0
    for panel in panels:
        parts += [f'<g transform="translate(0 {top})">', *_frame(panel), *_groups(panel), "</g>"]
        top += panel.height
    return "\n".join([*parts, "</svg>"])


def _x(panel: Panel, time: float) -> float:
    return _LEFT + time / panel.unit * _UNIT


def _y(row: int) -> int:
    return _TOP + row * (_ROW + _GAP)


def _frame(panel: Panel) -> list[str]:
    """Title, legend, rows and the axis of time."""
    parts = [
        f'<text class="title" x="8" y="18">{html.escape(panel.title)}</text>',
        f'<text x="8" y="34">{html.escape(panel.summary)}</text>',
    ]
    for place, (color, name) in enumerate(panel.legend):
        x = _LEFT + 150 * place
        parts.append(f'<rect x="{x}" y="41" width="11" height="11" fill="{_fill(color, 0)}"/>')
        parts.append(f'<text x="{x + 16}" y="51">{html.escape(name)}</text>')
    right = _x(panel, panel.end)
    for row, name in enumerate(panel.rows):
        parts.append(f'<rect class="row" x="{_LEFT}" y="{_y(row)}" width="{right - _LEFT:.1f}" height="{_ROW}"/>')
        parts.append(f'<text x="8" y="{_y(row) + 17}">{html.escape(name)}</text>')
    y = _y(len(panel.rows)) - _GAP + 8
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{y}" x2="{right:.1f}" y2="{y}"/>')
    step = _tick(panel.unit)
    for number in range(int(panel.end / step + 1e-9) + 1):
        at = _x(panel, number * step)
        parts.append(f'<line class="axis" x1="{at:.1f}" y1="{y}" x2="{at:.1f}" y2="{y + 4}"/>')
        parts.append(f'<text x="{at:.1f}" y="{y + 16}" text-anchor="middle">{number * step:g}</text>')
    return parts


def _tick(unit: float) -> float:
    """1, 2 or 5 times a power of ten, at least two units."""
    power = 10.0 ** (len(f"{unit:.0f}") - 1 if unit >= 1 else int(f"{unit:e}".split("e")[1]))
    return next(step * power for step in (1, 2, 5, 10, 20, 50) if step * power >= 2 * unit)


def _groups(panel: Panel) -> list[str]:
    """Lines first: boxes of the same group lie over their ends."""
    groups: dict[int, list[str]] = {box.group: [] for box in panel.boxes}
    for line in panel.lines:
        (row, time), (to_row, to_time) = line.source, line.target
        down = to_row > row
        y, to_y = (_y(row) + _ROW, _y(to_row)) if down else (_y(row), _y(to_row) + _ROW)
        way = "onwards" if line.onwards else "back"
        groups[line.group].append(
            f'<line class="dep {way}" x1="{_x(panel, time):.1f}" y1="{y}" x2="{_x(panel, to_time):.1f}" y2="{to_y}"/>'
        )
    for box in panel.boxes:
        x, width = _x(panel, box.start), (box.end - box.start) / panel.unit * _UNIT
        fill = _fill(box.color, box.shade)
        rect = f'<rect class="box" x="{x:.1f}" y="{_y(box.row)}" width="{width:.1f}" height="{_ROW}" fill="{fill}">'
        groups[box.group].append(f"{rect}<title>{html.escape(box.hint)}</title></rect>")
        if width > 6 * len(box.label) + 2:
            groups[box.group].append(f'<text class="number" x="{x + width / 2:.1f}" y="{_y(box.row) + 17}">{html.escape(box.label)}</text>')
    return [f'<g class="group">{"".join(parts)}</g>' for parts in groups.values()]


def _fill(color: str, shade: int) -> str:
    return "#" + "".join(f"{round(part * 0.8**shade):02x}" for part in _COLORS[color])
