"""Format numbers, durations, tables, axis ticks and terminal plots. Pure.

Unknown values (None) become a dash. Plots use Braille characters, each with eight dots.
"""

import datetime
import math
from collections.abc import Callable, Sequence

from llama405b_tools.text.words import printable

BARS = "▁▂▃▄▅▆▇█"
DASH = "—"
WIDE = 100  # columns needed for lines with all their numbers


def number(value: float | None, form: str) -> str:
    """Format a number by ``form``; a dash if it is None."""
    return DASH if value is None else format(value, form)


def reading(value: float) -> str:
    """Format a number with four digits and never an exponent; tiny values become ``0.00``."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 0.01 or not value else f"{value:.2f}"


def share(part: float | None, whole: float | None) -> float | None:
    """Return ``part`` of ``whole`` in percent; None if either is unknown."""
    return 100 * part / whole if part is not None and whole else None


def first_known(*values: float | None) -> float | None:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def bar(percent: float | None) -> str:
    """Return a bar character of one of eight heights; a dash if unknown."""
    if percent is None:
        return DASH
    return BARS[min(7, max(0, int(percent / 12.5)))]


def sparkline(values: Sequence[float], width: int, top: float | None = None) -> str:
    """Draw values over time in ``width`` columns, scaled from minimum to maximum (with ``top``: from 0 to it)."""
    if not values or width < 1:
        return ""
    columns = min(width, len(values))
    means = []
    for i in range(columns):
        part = values[i * len(values) // columns : (i + 1) * len(values) // columns]
        means.append(sum(part) / len(part))
    low, high = (0.0, top) if top is not None else (min(means), max(means))
    return "".join(bar(100 * (value - low) / (high - low) if high > low else 0) for value in means)


def local_time(moment: float, form: str = "%H:%M:%S") -> str:
    """Format a timestamp in this machine's time zone."""
    return datetime.datetime.fromtimestamp(moment).astimezone().strftime(form)


def stopwatch(seconds: float) -> str:
    """Format a duration as minutes and seconds: ``0:08``, ``3:20``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def span(seconds: float | None) -> str:
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


def amount(value: float | None) -> str:
    """Format a number with an SI prefix: ``8.7k``."""
    if value is None:
        return DASH
    for limit, scale, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= limit:
            return f"{value / scale:.1f}{unit}"
    return f"{value:.0f}"


def gbit(bytes_per_s: float | None) -> str:
    """Format a rate in gigabits per second."""
    if bytes_per_s is None:
        return DASH
    value = bytes_per_s * 8 / 1e9
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def gib(n_bytes: int | None) -> str:
    """Format a size in whole GiB."""
    return DASH if n_bytes is None else f"{n_bytes / (1 << 30):,.0f}"


def middle(name: str, width: int) -> str:
    """Shorten a long name in the middle; its end distinguishes hosts."""
    return name if len(name) <= width else f"{name[: width // 3]}…{name[len(name) - (width - width // 3 - 1) :]}"


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as columns, each as wide as it needs to be."""
    lines = [headings, *(list(map(printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


TIMES_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)


def ticks(low: float, high: float, n: int) -> list[float]:
    """Return about ``n`` round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    rough = (high - low) / n
    unit = 10.0 ** math.floor(math.log10(rough))
    return _multiples(low, high, next(step * unit for step in (1, 2, 2.5, 5, 10) if step * unit >= 0.999 * rough))


def time_ticks(length_s: float, n: int) -> list[float]:
    """Return at most about ``n`` round durations up to ``length_s``."""
    step = next((step for step in TIMES_S if step * n >= length_s), TIMES_S[-1] * math.ceil(length_s / TIMES_S[-1] / n))
    return _multiples(0.0, length_s, step)


def _multiples(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


LABEL = 8  # columns
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
    form: Callable[[float], str],
    *,
    plain: bool = False,
) -> list[str]:
    """Plot a curve, and points as ``o``: ``height`` lines of at most ``width`` columns, then the axis."""
    columns, everything = max(8, width - LABEL), [*curve, *points]
    (left, right), (low, high) = (_range([place[i] for place in everything]) for i in (0, 1))
    cells = [[0] * columns for _ in range(height)]

    def where(x: float, y: float) -> tuple[int, int]:
        """Return column and row in dots; rows count from the top."""
        across = (x - left) / (right - left) * (2 * columns - 1)
        return round(across), round((high - y) / (high - low) * (4 * height - 1))

    before: tuple[int, int] | None = None
    for x, y in curve:
        column, row = where(x, y)
        for i, j in _between(before or (column, row), (column, row)):
            cells[j // 4][i // 2] |= DOTS[j % 4][i % 2]
        before = column, row
    drawn = [[_char(cell, plain=plain) for cell in line] for line in cells]
    for x, y in points:
        column, row = where(x, y)
        drawn[row // 4][column // 2] = "o"
    labels = {where(left, tick)[1] // 4: form(tick) for tick in ticks(low, high, max(2, height // 4))}
    body = [
        f"{labels.get(i, '')[: LABEL - 2]:>{LABEL - 2}} {'┤' if i in labels else '│'}{''.join(line).rstrip()}"
        for i, line in enumerate(drawn)
    ]
    axis = ["─"] * columns
    for tick in ticks(left, right, max(2, columns // 16)):
        words = f"{tick:,.0f}"
        at = min(max(0, where(tick, low)[0] // 2 - len(words) // 2), columns - len(words))
        axis[at : at + len(words)] = words
    return [*body, " " * (LABEL - 1) + "└" + "".join(axis)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _between(a: tuple[int, int], b: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots on a line from ``a`` to ``b``."""
    n = max(abs(b[0] - a[0]), abs(b[1] - a[1]), 1)
    return [(a[0] + round((b[0] - a[0]) * i / n), a[1] + round((b[1] - a[1]) * i / n)) for i in range(n + 1)]


def _char(cell: int, *, plain: bool) -> str:
    if not cell:
        return " "
    return "*" if plain else chr(BRAILLE + cell)
