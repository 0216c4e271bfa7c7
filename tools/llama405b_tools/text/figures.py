"""Numbers for a terminal, short and with a dash for unknown values; and tables. Pure."""

import datetime
from collections.abc import Sequence

from llama405b_tools.text.clean import printable

BARS = "▁▂▃▄▅▆▇█"
DASH = "—"
WIDE = 100  # columns needed for lines with all their numbers


def number(value: float | None, form: str) -> str:
    """Format a number; a dash if unknown."""
    return DASH if value is None else format(value, form)


def reading(value: float) -> str:
    """Format a number with four digits, and never with an exponent: next to nothing is ``0.00``."""
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
    """Draw a bar of one of eight heights; a dash if unknown."""
    if percent is None:
        return DASH
    return BARS[min(7, max(0, int(percent / 12.5)))]


def sparkline(values: Sequence[float], width: int, top: float | None = None) -> str:
    """Draw values over time in ``width`` columns, from their minimum to their maximum (with ``top``: from 0 to it)."""
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
    """Format a moment as a clock on the wall here shows it."""
    return datetime.datetime.fromtimestamp(moment).astimezone().strftime(form)


def stopwatch(seconds: float) -> str:
    """Format a duration of minutes to the second: ``0:08``, ``3:20``."""
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
    """Format a number with a unit prefix: ``8.7k``."""
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
    """Shorten a long name in the middle, because its end tells hosts apart."""
    return name if len(name) <= width else f"{name[: width // 3]}…{name[len(name) - (width - width // 3 - 1) :]}"


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as columns, each as wide as it needs to be."""
    lines = [headings, *(list(map(printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
