"""Draw headings, gauges and graphs over time, and choose the styles of values. Pure.

Unusual values are marked; values of hosts that no longer report are dim.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.text import Text

from llama405b_tools.text.figures import BARS, format_clock, format_duration
from llama405b_tools.top.state.picture import HostRow, HostState
from llama405b_tools.top.state.trends import Bucket

EIGHTHS = " ▏▎▍▌▋▊▉█"
GAP_COLUMNS = 1  # columns between panes


def draw_heading(title: str, width: int, *, right: str = "", focused: bool = False) -> Text:
    """Return a heading as wide as its pane; ``right`` is omitted if there is no room."""
    style = "focus" if focused else "title"
    line = Text().append(f"── {title} ", style)
    room = width - line.cell_len - len(right) - 2
    if right and room < 0:
        right, room = "", width - line.cell_len
    line.append("─" * max(0, room if right else width - line.cell_len), style)
    return line.append(f" {right} " if right else "", style)


def fit_width(line: Text, width: int) -> Text:
    """Cut or pad a line to exactly this width."""
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


def fit_height(lines: Sequence[Text], height: int) -> list[Text]:
    """Cut or pad to exactly this many lines."""
    return [*lines[:height], *(Text() for _ in range(height - len(lines)))]


def side_by_side(panes: Sequence[tuple[Sequence[Text], int]]) -> list[Text]:
    """Join panes, each with its width, side by side."""
    lines_out = []
    for row in itertools.zip_longest(*(lines for lines, _ in panes)):
        line = Text()
        for (_, width), cell in zip(panes, row, strict=True):
            line.append_text(fit_width(cell.copy() if cell else Text(), width)).append(" " * GAP_COLUMNS)
        line.right_crop(GAP_COLUMNS)
        lines_out.append(line)
    return lines_out


def split_width(width: int, n: int) -> list[int]:
    """Divide a width among n panes with gaps between them."""
    room = width - GAP_COLUMNS * (n - 1)
    return [room * (i + 1) // n - room * i // n for i in range(n)]


def gauge(share: float | None, width: int) -> str:
    """Draw a share (0 to 1) as a bar of this many columns, in eighths of a column."""
    if share is None:
        return "·" * width
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    full, remainder = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[remainder] if remainder else "")).ljust(width, "░")


def join_styled(cells: Iterable[tuple[str, str]]) -> Text:
    """Join styled characters into a text, merging neighbors of equal style."""
    pieces: list[tuple[str, str]] = []
    for char, style in cells:
        if pieces and pieces[-1][1] == style:
            pieces[-1] = (pieces[-1][0] + char, style)
        else:
            pieces.append((char, style))
    return Text.assemble(*pieces)


LABEL_COLUMNS = 7  # columns of the value axis
PLAN_CELLS = {" ": "plan", BARS[-1]: "plan.on"}  # characters that the dotted plan line may replace, and its style there
MIN_CHART_LINES = 3  # of a graph, including its title and time axis


class TimeAxis(NamedTuple):
    """The time span that graphs show."""

    begin: float
    end: float
    marks: Sequence[tuple[float, str]] = ()  # time and letter of each event
    end_name: str = "now"

    def column(self, time: float, n: int) -> int:
        """Return the column of a moment; outside ``range(n)`` if it is not shown."""
        return math.floor((time - self.begin) / (self.end - self.begin) * n)


class Scale(NamedTuple):
    """The value axis of a graph."""

    low: float
    high: float
    format_value: Callable[[float], str]

    def level(self, value: float, n: int) -> int:
        """Return the height of a value in eighths of ``n`` lines; at least one if above the lowest."""
        share = (value - self.low) / (self.high - self.low)
        eighths = round(8 * n * min(1.0, max(0.0, share)))
        return max(eighths, int(value > self.low))


def scale_from_zero(values: Iterable[float], format_value: Callable[[float], str]) -> Scale:
    """Return a scale from 0 to a round number at or above all values."""
    max_value = max(values, default=0.0)
    if max_value <= 0:
        return Scale(0.0, 1.0, format_value)
    unit = 10.0 ** math.floor(math.log10(max_value))
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    return Scale(0.0, next(step * unit for step in steps if step * unit >= 0.999 * max_value), format_value)


def scale_around(values: Sequence[float], format_value: Callable[[float], str]) -> Scale:
    """Return a scale from just below the lowest value to the highest."""
    if not values:
        return Scale(0.0, 1.0, format_value)
    low, high = min(values), max(values)
    margin = (high - low) or abs(high) or 1.0
    return Scale(low - 0.25 * margin, high, format_value)


def draw_chart(
    title: str,
    right: str,
    columns: Sequence[Bucket | None],
    scale: Scale,
    axis: TimeAxis,
    height: int,
    *,
    plan: float | None = None,
    style: str = "chart",
) -> list[Text]:
    """Draw a graph of ``height`` lines: its title, the values as a filled area, and the axis of time.

    ``columns``: a bucket per column, None draws nothing. ``plan``: a dotted line. ``style``: of the area.
    """
    n, width = height - 2, len(columns) + LABEL_COLUMNS
    levels = [None if bucket is None else scale.level(bucket.mean, n) for bucket in columns]
    plan_line = None if plan is None or not scale.low <= plan <= scale.high else (scale.level(plan, n) - 1) // 8
    lines = [draw_heading(title, width, right=right)]
    for i in reversed(range(n)):
        line = Text().append(_label(scale, i, n), "title")
        area = [(_cell(level, i), style) for level in levels]
        if i == plan_line:
            area = [("┄", PLAN_CELLS[char]) if char in PLAN_CELLS else (char, style) for char, style in area]
        lines.append(line.append_text(join_styled(area)))
    return [*lines, draw_time_axis(axis, len(columns))]


def _label(scale: Scale, i: int, n: int) -> str:
    """Return the label of line ``i``: the highest, middle and lowest lines have one."""
    labels = {n - 1: scale.high, 0: scale.low}
    if n >= 5:
        labels[n // 2] = (scale.low + scale.high) / 2
    words = scale.format_value(labels[i]) if i in labels and n > 1 else ""
    return f"{words[: LABEL_COLUMNS - 2]:>{LABEL_COLUMNS - 2}} {'┤' if words else '│'}"


def _cell(level: int | None, i: int) -> str:
    """Return a column's character in line ``i``, counted from the bottom."""
    eighths = 0 if level is None else level - 8 * i
    if eighths <= 0:
        return " "
    return BARS[min(8, eighths) - 1]


def draw_time_axis(axis: TimeAxis, width: int) -> Text:
    """Draw the time axis below a graph: how long ago, and the letters of events."""
    cells = ["─"] * width
    length_s = axis.end - axis.begin
    words = [
        (0, f"-{format_duration(length_s)}"),
        (width // 2, f"-{format_duration(length_s / 2)}"),
        (width, axis.end_name),
    ]
    if length_s > 12 * 3600:
        words = [(width * i // 2, format_clock(axis.begin + length_s * i / 2, "%a %H:%M")) for i in range(3)]
    for column, text in words if width >= 24 else [words[0], words[2]]:
        begin = min(max(0, column - len(text) // 2), width - len(text))
        cells[begin : begin + len(text)] = text
    for time, letter in axis.marks:
        column = axis.column(time, width)
        while 0 <= column < width and not (
            cells[column] == letter or cells[column : column + 2] == ["─", "─"]
        ):  # apart from words
            column -= 1
        if 0 <= column < width:
            cells[column] = letter
    return Text().append(" " * (LABEL_COLUMNS - 1) + "└" + "".join(cells[:width]), "title")


def bucket_means(columns: Iterable[Bucket | None]) -> Iterator[float]:
    """Yield the means of the columns that have values."""
    return (bucket.mean for bucket in columns if bucket)


SEVERITY_STYLES = {0: "", 1: "warn", 2: "bad"}  # by severity
ODD_STYLE, STALE_STYLE = "odd", "old"


def is_victim(row: HostRow) -> bool:
    """Return whether the run failed on this host because another host failed, or the origin is unknown."""
    return row.state is HostState.FAILED and not row.is_culprit


def host_style(row: HostRow) -> str:
    """Return the style of a host's state and its reason."""
    return STALE_STYLE if is_victim(row) else SEVERITY_STYLES[row.severity]


def value_style(row: HostRow, *, odd: bool) -> str:
    """Return the style of a value: marked if ``odd``; dim if its host is silent or a victim."""
    if not row.is_heard or is_victim(row):
        return STALE_STYLE
    return (SEVERITY_STYLES[row.severity] or ODD_STYLE) if odd else ""


def join_fields(row: HostRow, pieces: Iterable[tuple[str, str]], odd_in: Collection[str]) -> Text:
    """Join pieces of text, each with the field it shows ('': none), styled by that field."""
    line = Text()
    for text, field in pieces:
        line.append(text, value_style(row, odd=field in odd_in))
    return line
