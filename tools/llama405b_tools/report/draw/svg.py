"""Charts as SVG, by hand: lines or a stack of areas over time or steps, what was planned, what happened. Pure.

Colors and text styles are classes of the page's style sheet, so that one drawing serves dark and light.
"""

import dataclasses
import html
from collections.abc import Callable, Iterator, Sequence

from llama405b_tools.text.ticks import ticks

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960, 64, 10, 8, 22  # units of the drawing
INNER = WIDTH - LEFT - RIGHT
PLOT = f'data-left="{LEFT}" data-inner="{INNER}"'  # where the page's script finds the values

Place = tuple[float, float]  # on the axes, not on the drawing


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """What lies below a chart."""

    end: float
    ticks: Sequence[tuple[float, str]]
    begin: float = 0.0
    kind: str = "time"  # or "step"
    bands: Sequence[tuple[float, float, str]] = ()  # from, until, style: failures, and what else is no training
    marks: Sequence[tuple[float, str, str]] = ()  # where, style, and words

    def x(self, value: float) -> float:
        """Return where a value is drawn."""
        return LEFT + INNER * (value - self.begin) / ((self.end - self.begin) or 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Values of one kind, in pieces that are not joined."""

    name: str
    style: str
    pieces: Sequence[Sequence[Place]]
    dots: bool = False  # each value is a dot, as there are few


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """What one drawing shows."""

    title: str
    curves: Sequence[Curve]
    form: Callable[[float], str]  # of values
    height: int = 120
    plan: float | None = None
    from_zero: bool = True
    stacked: bool = False  # areas above each other; all have their values at the same places
    ranges: Sequence[Sequence[tuple[float, float, float]]] = ()  # where, lowest, highest: behind the first curve

    def svg(self, axis: Axis) -> str:
        """Draw it."""
        low, high = self._scale()
        inner = self.height - TOP - BOTTOM

        def y(value: float) -> float:
            return TOP + inner * (1 - (min(value, high) - low) / ((high - low) or 1.0))

        parts = [
            *(_band(axis, begin, end, style, inner) for begin, end, style in axis.bands),
            *(_level(self.form(tick), y(tick)) for tick in ticks(low, high, max(2, self.height // 40))),
            *(_range(axis, piece, y) for piece in self.ranges),
            *(self._stack(axis, y) if self.stacked else self._lines(axis, y)),
            *(_mark(axis, at, style, words, inner) for at, style, words in axis.marks),
            *(_tick(axis.x(at), words, self.height) for at, words in axis.ticks),
        ]
        if self.plan is not None:
            parts.append(f'<path class="plan" d="M{LEFT} {y(self.plan):.1f}h{INNER}"/>')
        legend = "".join(f'<span class="key {curve.style}">{html.escape(curve.name)}</span>' for curve in self.curves)
        planned = f'<span class="key plan">plan {html.escape(self.form(self.plan))}</span>' if self.plan else ""
        return (
            f"<figure><figcaption>{html.escape(self.title)} {legend}{planned}</figcaption>"
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{html.escape(self.title)}" tabindex="0" '
            f'data-axis="{axis.kind}" data-begin="{axis.begin:.9g}" data-end="{axis.end:.9g}" {PLOT}>{"".join(parts)}'
            f'<path class="cursor" d="M0 {TOP}v{inner}"/></svg></figure>\n'
        )

    def _scale(self) -> tuple[float, float]:
        values = [value for curve in self.curves for piece in curve.pieces for _, value in piece]
        if self.stacked:
            values = [sum(column) for column in self._columns()]
        values += [value for piece in self.ranges for _, *both in piece for value in both]
        values += [] if self.plan is None else [self.plan]
        if not values:
            return 0.0, 1.0
        low, high = min(values), max(values)
        if self.from_zero:
            return min(0.0, low), 1.05 * high or 1.0
        room = 0.05 * (high - low) or abs(high) or 1.0
        return low - room, high + room

    def _columns(self) -> Iterator[list[float]]:
        for pieces in zip(*(curve.pieces for curve in self.curves), strict=True):
            for places in zip(*pieces, strict=True):
                yield [value for _, value in places]

    def _lines(self, axis: Axis, y: Callable[[float], float]) -> Iterator[str]:
        for curve in self.curves:
            if curve.dots:
                for piece in curve.pieces:
                    for at, value in piece:
                        yield f'<circle class="{curve.style}" cx="{axis.x(at):.1f}" cy="{y(value):.1f}" r="3.5"/>'
                continue
            for piece in curve.pieces:
                if len(piece) == 1:  # a line needs two ends
                    piece = [*piece, piece[0]]
                line = "L".join(f"{axis.x(at):.1f} {y(value):.1f}" for at, value in piece)
                yield f'<path class="line {curve.style}" d="M{line}"/>'

    def _stack(self, axis: Axis, y: Callable[[float], float]) -> Iterator[str]:
        for i in range(len(self.curves[0].pieces)):
            below = [0.0] * len(self.curves[0].pieces[i])
            for curve in self.curves:
                piece = curve.pieces[i]
                above = [low + value for low, (_, value) in zip(below, piece, strict=True)]
                there = [f"{axis.x(at):.1f} {y(value):.1f}" for (at, _), value in zip(piece, above, strict=True)]
                back = [f"{axis.x(at):.1f} {y(value):.1f}" for (at, _), value in zip(piece, below, strict=True)]
                yield f'<path class="area {curve.style}" d="M{"L".join([*there, *reversed(back)])}Z"/>'
                below = above


def _band(axis: Axis, begin: float, end: float, style: str, inner: int) -> str:
    x = axis.x(begin)
    return (
        f'<rect class="band {style}" x="{x:.1f}" y="{TOP}" width="{max(1.0, axis.x(end) - x):.1f}" height="{inner}"/>'
    )


def _mark(axis: Axis, at: float, style: str, words: str, inner: int) -> str:
    title = f"<title>{html.escape(words)}</title>"
    return f'<path class="mark {style}" d="M{axis.x(at):.1f} {TOP}v{inner}">{title}</path>'


def _level(words: str, y: float) -> str:
    line = f'<path class="grid" d="M{LEFT} {y:.1f}h{INNER}"/>'
    return f'{line}<text class="label end" x="{LEFT - 6}" y="{y + 3.5:.1f}">{html.escape(words)}</text>'


def _tick(x: float, words: str, height: int) -> str:
    return f'<text class="label middle" x="{x:.1f}" y="{height - 6}">{html.escape(words)}</text>'


def _range(axis: Axis, piece: Sequence[tuple[float, float, float]], y: Callable[[float], float]) -> str:
    there = [f"{axis.x(at):.1f} {y(high):.1f}" for at, _, high in piece]
    back = [f"{axis.x(at):.1f} {y(low):.1f}" for at, low, _ in reversed(piece)]
    return f'<path class="range" d="M{"L".join([*there, *back])}Z"/>'
