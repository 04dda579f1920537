"""The table that `StateMapper.explain` gives: layers and experts that are alike share a row, `layers.{0..31}.norm.weight`.

Numbers between dots are what names differ in. Rows are alike if the same is left when these numbers are taken out; they are put together
where the numbers that occur are all combinations, or run side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from trainer_kit.weights.mapper import StateMapper

NUMBER = re.compile(r"(?<![^.\n])\d+(?![^.\n])")
HOLE = re.compile(r"(?<![^.\n])\{\}(?![^.\n])")
Row = tuple[tuple[str, ...], str, tuple[str, ...]]


def table(mapper: StateMapper) -> str:
    """Inputs, operation and outputs of each group, below one line with the counts."""
    groups = list(mapper.groups())
    texts = [mapper.describe(group) for group in groups]
    rows = _merge([(tuple(_collapse(text.inputs)), text.operation, tuple(_collapse(text.outputs))) for text in texts])
    counts = [len(groups), sum(len(group.inputs) for group in groups), sum(len(group.outputs) for group in groups)]
    lines = [("inputs", "operation", "outputs")]
    for inputs, operation, outputs in rows:
        lines += zip_longest(inputs or ("(nothing)",), (operation,), outputs or ("(left out)",), fillvalue="")
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    body = [f"  {one:<{widths[0]}}  {two:<{widths[1]}}  {three}".rstrip() for one, two, three in lines]
    rule = "  " + "  ".join("-" * width for width in (*widths, max(len(line[2]) for line in lines)))
    return "\n".join([f"{counts[0]} groups, {counts[1]} inputs -> {counts[2]} outputs", body[0], rule, *body[1:]])


def _collapse(names: Sequence[str]) -> list[str]:
    """The names of one group, those that differ in numbers as one."""
    found: dict[str, list[list[str]]] = {}
    for name in names:
        found.setdefault(NUMBER.sub("{}", name), []).append(NUMBER.findall(name))
    return [text for skeleton, numbers in found.items() for text in _write(skeleton, numbers)]


def _merge(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows that are alike as one, in the order of the first of each."""
    found: dict[str, list[list[str]]] = {}
    for inputs, operation, outputs in rows:
        text = "\n".join((*inputs, f"\t{operation}\t", *outputs))
        found.setdefault(NUMBER.sub("{}", text), []).append(NUMBER.findall(text))
    for skeleton, numbers in found.items():
        for text in _write(skeleton, numbers):
            first, operation, last = text.split("\t")
            yield tuple(first.split("\n")[:-1]), operation, tuple(last.split("\n")[1:])


def _write(skeleton: str, numbers: Sequence[Sequence[str]]) -> Iterator[str]:
    """The skeleton with ranges in its holes, once if that says exactly which numbers occur, else once per row."""
    columns = list(zip(*numbers, strict=True))
    if len(numbers) > 1 and _are_all_combinations(columns, len(numbers)):
        yield _fill(skeleton, [_range(column) for column in columns])
    else:
        for row in numbers:
            yield _fill(skeleton, row)


def _are_all_combinations(columns: Sequence[Sequence[str]], num_rows: int) -> bool:
    """Columns that determine each other count once."""
    independent: list[Sequence[str]] = []
    count = 1
    for column in columns:
        size = len(set(column))
        if not any(len(set(zip(column, other, strict=True))) == size == len(set(other)) for other in independent):
            independent.append(column)
            count *= size
    return count == num_rows == len(set(zip(*independent, strict=True)))


def _range(column: Sequence[str]) -> str:
    values = sorted(set(map(int, column)))
    if len(values) == 1:
        return column[0]
    if values == list(range(values[0], values[-1] + 1)):
        return f"{{{values[0]}..{values[-1]}}}"
    return f"{{{','.join(map(str, values))}}}"


def _fill(skeleton: str, texts: Sequence[str]) -> str:
    return "".join(part + text for part, text in zip_longest(HOLE.split(skeleton), texts, fillvalue=""))
