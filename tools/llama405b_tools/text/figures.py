"""Format numbers, durations, tables, axis ticks and terminal plots. Pure.

Unknown values (None) become a dash. Plots use Braille characters, each with eight dots.
"""

import datetime
import math
from collections.abc import Callable, Sequence

from llama405b_tools.text.words import mask_controls

BARS = "▁▂▃▄▅▆▇█"
DASH = "—"
WIDE_COLUMNS = 100  # columns needed for lines with all their numbers


def fmt_or_dash(value: float | None, spec: str) -> str:
    """Format a number by ``spec``; a dash if it is None."""
    return DASH if value is None else format(value, spec)


def format_number(value: float) -> str:
    """Format a number with four digits and never an exponent; tiny values become ``0.00``."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 0.01 or not value else f"{value:.2f}"


def percent_of(part: float | None, total: float | None) -> float | None:
    """Return ``part`` of ``total`` in percent; None if either is unknown."""
    return 100 * part / total if part is not None and total else None


def first_not_none(*values: float | None) -> float | None:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def bar_char(percent: float | None) -> str:
    """Return a bar character of one of eight heights; a dash if unknown."""
    if percent is None:
        return DASH
    return BARS[min(7, max(0, int(percent / 12.5)))]


def sparkline(values: Sequence[float], width: int, max_value: float | None = None) -> str:
    """Draw values over time in ``width`` columns, scaled from minimum to maximum (with ``max_value``: from 0 to it)."""
    if not values or width < 1:
        return ""
    columns = min(width, len(values))
    means = []
    for i in range(columns):
        part = values[i * len(values) // columns : (i + 1) * len(values) // columns]
        means.append(sum(part) / len(part))
    low, high = (0.0, max_value) if max_value is not None else (min(means), max(means))
    return "".join(bar_char(100 * (value - low) / (high - low) if high > low else 0) for value in means)


def format_clock(moment: float, pattern: str = "%H:%M:%S") -> str:
    """Format a timestamp in this machine's time zone."""
    return datetime.datetime.fromtimestamp(moment).astimezone().strftime(pattern)


def format_stopwatch(seconds: float) -> str:
    """Format a duration as minutes and seconds: ``0:08``, ``3:20``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def hour_unit(has_gpus: bool) -> str:
    """Return the unit of an hour of one rank."""
    return "GPU-h" if has_gpus else "rank-h"


def format_duration(seconds: float | None) -> str:
    """Format a duration: ``0.8s``, ``12s``, ``3m``, ``5h02m``, ``1d7h``."""
    if seconds is None:
        return DASH
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f}s"
    if seconds < 120:
        return f"{seconds:.0f}s"
    minutes = int(seconds / 60)
    if minutes < 60:
        return f"{minutes}m"
    hours = minutes // 60
    return f"{hours}h{minutes % 60:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24}h"


def format_amount(value: float | None) -> str:
    """Format a number with an SI prefix: ``8.7k``."""
    if value is None:
        return DASH
    for limit, scale, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= limit:
            return f"{value / scale:.1f}{unit}"
    return f"{value:.0f}"


def format_gbit(bytes_per_s: float | None) -> str:
    """Format a rate in gigabits per second."""
    if bytes_per_s is None:
        return DASH
    value = bytes_per_s * 8 / 1e9
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def format_gib(n_bytes: int | None) -> str:
    """Format a size in whole GiB."""
    return DASH if n_bytes is None else f"{n_bytes / (1 << 30):,.0f}"


def shorten_middle(name: str, width: int) -> str:
    """Shorten a long name in the middle; its end distinguishes hosts."""
    return name if len(name) <= width else f"{name[: width // 3]}…{name[len(name) - (width - width // 3 - 1) :]}"


def format_columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as columns, each as wide as it needs to be."""
    lines = [headings, *(list(map(mask_controls, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


TIMES_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)


def round_ticks(low: float, high: float, n: int) -> list[float]:
    """Return about ``n`` round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    rough = (high - low) / n
    unit = 10.0 ** math.floor(math.log10(rough))
    return _multiples(low, high, next(step * unit for step in (1, 2, 2.5, 5, 10) if step * unit >= 0.999 * rough))


def round_time_ticks(length_s: float, n: int) -> list[float]:
    """Return at most about ``n`` round durations up to ``length_s``."""
    step = next((step for step in TIMES_S if step * n >= length_s), TIMES_S[-1] * math.ceil(length_s / TIMES_S[-1] / n))
    return _multiples(0.0, length_s, step)


def _multiples(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


LABEL_COLUMNS = 8  # columns
BRAILLE = 0x2800
DOTS = (
    (0x01, 0x08),
    (0x02, 0x10),
    (0x04, 0x20),
    (0x40, 0x80),
)  # bits of a Braille character, by row and column (Unicode block U+2800)


def plot(
    curve: Sequence[tuple[float, float]],
    points: Sequence[tuple[float, float]],
    width: int,
    height: int,
    format_value: Callable[[float], str],
    *,
    plain: bool = False,
) -> list[str]:
    """Plot a curve, and points as ``o``: ``height`` lines of at most ``width`` columns, then the axis."""
    columns, all_points = max(8, width - LABEL_COLUMNS), [*curve, *points]
    (left, right), (low, high) = (_padded_range([place[i] for place in all_points]) for i in (0, 1))
    cells = [[0] * columns for _ in range(height)]

    def to_dot(x: float, y: float) -> tuple[int, int]:
        """Return column and row in dots; rows count from the top."""
        x_share = (x - left) / (right - left) * (2 * columns - 1)
        return round(x_share), round((high - y) / (high - low) * (4 * height - 1))

    previous: tuple[int, int] | None = None
    for x, y in curve:
        column, row = to_dot(x, y)
        for i, j in _line_dots(previous or (column, row), (column, row)):
            cells[j // 4][i // 2] |= DOTS[j % 4][i % 2]
        previous = column, row
    char_rows = [[_braille_char(cell, plain=plain) for cell in line] for line in cells]
    for x, y in points:
        column, row = to_dot(x, y)
        char_rows[row // 4][column // 2] = "o"
    labels = {to_dot(left, tick)[1] // 4: format_value(tick) for tick in round_ticks(low, high, max(2, height // 4))}
    body = [
        f"{labels.get(i, '')[: LABEL_COLUMNS - 2]:>{LABEL_COLUMNS - 2}} {'┤' if i in labels else '│'}{''.join(line).rstrip()}"
        for i, line in enumerate(char_rows)
    ]
    axis = ["─"] * columns
    for tick in round_ticks(left, right, max(2, columns // 16)):
        label = f"{tick:,.0f}"
        begin = min(max(0, to_dot(tick, low)[0] // 2 - len(label) // 2), columns - len(label))
        axis[begin : begin + len(label)] = label
    return [*body, " " * (LABEL_COLUMNS - 1) + "└" + "".join(axis)]


def _padded_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _line_dots(a: tuple[int, int], b: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots on a line from ``a`` to ``b``."""
    n = max(abs(b[0] - a[0]), abs(b[1] - a[1]), 1)
    return [(a[0] + round((b[0] - a[0]) * i / n), a[1] + round((b[1] - a[1]) * i / n)) for i in range(n + 1)]


def _braille_char(cell: int, *, plain: bool) -> str:
    if not cell:
        return " "
    return "*" if plain else chr(BRAILLE + cell)
