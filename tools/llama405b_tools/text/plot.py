"""A curve in a terminal, in dots of Braille: eight to a character. Pure."""

from collections.abc import Callable, Sequence

from llama405b_tools.text.ticks import ticks

LABEL = 8  # columns
BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character, by row and column


def plot(
    curve: Sequence[tuple[float, float]],
    points: Sequence[tuple[float, float]],
    width: int,
    height: int,
    form: Callable[[float], str],
    *,
    plain: bool = False,
) -> list[str]:
    """Return ``height`` lines of at most ``width`` columns, and the axis below: a curve, and points as ``o``."""
    columns, everything = max(8, width - LABEL), [*curve, *points]
    (left, right), (low, high) = (_range([place[i] for place in everything]) for i in (0, 1))
    cells = [[0] * columns for _ in range(height)]

    def where(x: float, y: float) -> tuple[int, int]:
        """Column and row in dots, rows from above."""
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
    """Return the dots of a line from ``a`` to ``b``."""
    n = max(abs(b[0] - a[0]), abs(b[1] - a[1]), 1)
    return [(a[0] + round((b[0] - a[0]) * i / n), a[1] + round((b[1] - a[1]) * i / n)) for i in range(n + 1)]


def _char(cell: int, *, plain: bool) -> str:
    if not cell:
        return " "
    return "*" if plain else chr(BRAILLE + cell)
