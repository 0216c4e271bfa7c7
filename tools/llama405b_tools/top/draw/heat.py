"""Cells of heat: every GPU (else rank) now, and over time. Pure.

A cell is a bar whose height is the magnitude, so it reads without color too; with colors, the ramp fills it.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.text import Text

from llama405b_tools.text.figures import BARS, middle
from llama405b_tools.top.draw.blocks import rule, runs
from llama405b_tools.top.draw.chart import LABEL, Axis, time_axis
from llama405b_tools.top.draw.marks import ODD, OLD, style_of
from llama405b_tools.top.state.picture import GpuCell, HostRow
from llama405b_tools.top.state.quantities import QUANTITIES, Quantity, n_units
from llama405b_tools.top.state.series import UNKNOWN
from llama405b_tools.top.state.trends import Layout, Trends

NO_VALUE = ("·", OLD)
NAME = 14  # columns of a row's name
Cell = tuple[str, str]  # character, style
CELLS: list[Cell] = [(char, f"heat.{level}") for level, char in enumerate(BARS)]
LEVELS = len(BARS) - 1  # the hottest


class Scaled(NamedTuple):
    """A quantity, and its coldest and hottest value now."""

    quantity: Quantity
    low: float
    high: float

    def level(self, value: float | None) -> int | None:
        """Return 0 (cold) to 7 (hot)."""
        if value is None or value == UNKNOWN:
            return None
        if self.high <= self.low or value <= self.low:
            return 0
        return LEVELS if value >= self.high else int(len(BARS) * (value - self.low) / (self.high - self.low))

    def cell(self, value: float | None) -> Cell:
        """Return the cell of a value."""
        level = self.level(value)
        return NO_VALUE if level is None else CELLS[level]


def scaled(index: int, rows: Sequence[HostRow]) -> Scaled:
    """Return a quantity on the scale of all hosts' values."""
    quantity = QUANTITIES[index]
    values = [quantity.of(row, i) for row in rows for i in range(n_units(row))]
    return Scaled(quantity, *quantity.scale([value for value in values if value is not None]))


def cells(row: HostRow, by: Scaled, n_columns: int = 1) -> Text:
    """Draw one cell per GPU (else rank) of a host, of so many columns; what stands out has a sign instead of a bar."""
    drawn = [by.cell(by.quantity.of(row, i)) for i in range(n_units(row))]
    for i, gpu in enumerate(row.gpus):
        if gpu.odd and row.is_heard:
            drawn[i] = ("!", _odd_style(row, gpu))
    if not row.is_heard:
        drawn = [(char, OLD) for char, _ in drawn]
    return runs((char * n_columns, style) for char, style in drawn)


def numbers(row: HostRow, by: Scaled) -> Text:
    """Draw a number per GPU, four columns wide, on its color; ``!`` marks what stands out."""
    line = Text()
    for i, gpu in enumerate(row.gpus):
        value = by.quantity.of(row, i)
        level = by.level(value)
        style = OLD if level is None or not row.is_heard else f"cell.{level}"
        if gpu.odd and row.is_heard:
            style = _odd_style(row, gpu)
        line.append(f"{three(value)}{'!' if gpu.odd else ' '}", style)
    return line


def _odd_style(row: HostRow, gpu: GpuCell) -> str:
    style = style_of(row, odd=bool(gpu.odd))
    return {ODD: "heat.odd", "warn": "heat.odd", "bad": "heat.bad"}.get(style, style)


def three(value: float | None) -> str:
    """Write a number in three columns."""
    if value is None:
        return "  —"
    if value < 9.95:
        return f"{value:3.1f}"
    return f"{value:3.0f}" if value < 999.5 else f"{value / 1000:2.0f}k"


class Row(NamedTuple):
    """Some GPUs that share a line of the map."""

    name: str
    hosts: Sequence[str]
    begin: int  # of all GPUs in the order of the layout
    end: int
    first: int = 0  # of the host's, if there is one host


def rows_of(layout: Layout, n_lines: int) -> list[Row]:
    """Divide the GPUs among at most so many lines: several per host, else several hosts each."""
    begins = list(itertools.accumulate((n for _, n in layout), initial=0))
    for per_line in range(1, 17):
        if sum(-(-n // per_line) for _, n in layout) <= n_lines:
            return [*_parts(layout, begins, per_line)]
    each = -(-len(layout) // max(1, n_lines))
    found = []
    for i in range(0, len(layout), each):
        names = [name for name, _ in layout[i : i + each]]
        words = names[0] if len(names) == 1 else f"{names[0]}…{names[-1]}"
        found.append(Row(words, names, begins[i], begins[min(i + each, len(layout))]))
    return found


def _parts(layout: Layout, begins: Sequence[int], per_line: int) -> Iterator[Row]:
    for (name, n), begin in zip(layout, begins, strict=False):
        for i in range(0, n, per_line):
            end = min(n, i + per_line)
            words = f"{name} {i}" if end == i + 1 else f"{name} {i}-{end - 1}"
            yield Row(name if n <= per_line else words, [name], begin + i, begin + end, i)


def heat_map(
    hosts: Sequence[HostRow], trends: Trends, index: int, window: int, axis: Axis, width: int, height: int
) -> list[Text]:
    """Draw a quantity of every GPU (else rank) over time: a sick GPU is a line, a slow switch a block."""
    quantity = QUANTITIES[index]
    groups = rows_of(trends.layout, height - 2)
    n = width - NAME - 2
    columns = trends.heat(index, window, axis.begin, axis.end, n)
    by = Scaled(quantity, *quantity.scale(_scaled_by(quantity, columns)))
    most = max((group.end - group.begin for group in groups), default=1)
    each = f", {quantity.worst_name} of {most}" if most > 1 else ""
    title = (
        f"every {'GPU' if any(row.gpus for row in hosts) else 'rank'} over time: {quantity.name}, {quantity.unit}{each}"
    )
    legend = _legend(by)
    lines = [rule(title, width - legend.cell_len).append_text(legend)]
    shown = {row.name: row for row in hosts}
    for group in groups:
        line = _name(group, [shown[name] for name in group.hosts if name in shown])
        values = [_worst(quantity, column[group.begin : group.end]) if column else None for column in columns]
        lines.append(line.append_text(runs(map(by.cell, values))))
    axis_line = time_axis(axis, n)
    return [*lines, Text(" " * (NAME + 2)).append_text(axis_line[LABEL:])]


def _shows(row: HostRow, group: Row) -> bool:
    """Whether what stands out on a host is in this line: its GPUs that do so, if there are any."""
    indices = [i for i, gpu in enumerate(row.gpus) if gpu.odd]
    return (
        not indices
        or len(group.hosts) > 1
        or any(group.first <= i < group.first + group.end - group.begin for i in indices)
    )


def _worst(quantity: Quantity, values: Sequence[float]) -> float | None:
    if UNKNOWN in values:
        values = [value for value in values if value != UNKNOWN]
    return quantity.worst(values) if values else None


def _legend(by: Scaled) -> Text:
    """Draw what the colors mean, from the coldest to the hottest value."""
    words = [f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}" for value in (by.low, by.high)]
    return Text().append(f" {words[0]} ", "title").append_text(runs(CELLS)).append(f" {words[1]}  m: other ", "title")


def _scaled_by(quantity: Quantity, columns: Sequence[Sequence[float] | None]) -> list[float]:
    """Return the values that the scale of a map is made of: the highest ever, or all that are known now."""
    known = [column for column in columns if column]
    if quantity.around:
        return [value for column in known[-1:] for value in column if value != UNKNOWN]
    return [most for column in known if (most := max(column)) != UNKNOWN]


def _name(group: Row, hosts: Sequence[HostRow]) -> Text:
    """Begin a line of the map with its sign and name: that of the host, or of its GPUs that stand out."""
    sign, style = " ", ""
    odd = [row for row in hosts if (row.notes or row.severity or row.is_culprit) and _shows(row, group)]
    if any(row.is_culprit for row in odd):
        sign, style = "✖", "bad"
    elif odd:
        sign, style = "!", "warn"
    return Text().append(sign, style).append(f"{middle(group.name, NAME):{NAME}} ", style or "title")
