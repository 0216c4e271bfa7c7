"""Format a report as one HTML page that needs no network, or as lines for a terminal. Pure.

Charts are hand-written SVG: lines or stacked areas over time or steps, with the plan and the events of the run. Colors are
classes of the page's style sheet, so the same drawing serves dark and light screens. The script shows values at the pointer.
"""

import dataclasses
import datetime
import html
import itertools
import json
from collections.abc import Callable, Iterator, Sequence

from llama405b.contract.accounting import Use
from llama405b.contract.errors import counted, given
from llama405b.contract.records import EventKind, Sample
from llama405b_tools.agent.reports import Point
from llama405b_tools.report.summary import (
    USES,
    Happened,
    Summary,
    by_attempt,
    happened,
    idle_words,
    spent,
    state_words,
    step_words,
)
from llama405b_tools.run.query import account_line, incident_line, incident_words, started_words
from llama405b_tools.text.figures import amount, number, plot, reading, span, ticks, time_ticks
from llama405b_tools.text.words import fold_names

STYLE = """
:root { color-scheme: light dark; --back: #fff; --panel: #f6f7f9; --text: #1c2128; --soft: #667080; --grid: #e3e6ea;
  --a: #2563c9; --b: #c2570c; --c: #0f8a6d; --d: #8a4fc7; --e: #a3aab5; --bad: #d1242f; --warn: #b7791f; --good:
  #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --back: #0f1318; --panel: #171c23; --text: #e4e8ee; --soft: #939dab;
  --grid: #29303a; --a: #6aa5ff; --b: #f0883e; --c: #3fc9a4; --d: #bf8cff; --e: #626d7c; --bad: #ff6b6b; --warn:
  #e0af4f; --good: #57c46b; } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 20px; max-width: 1020px; background: var(--back); color: var(--text); font: 14px/1.45
  system-ui, sans-serif }
h1 { font-size: 22px; margin: 0 }
h2 { font-size: 15px; margin: 28px 0 8px }
p { margin: 4px 0 }
.soft, figcaption { color: var(--soft) }
figure { margin: 0 0 6px }
figcaption { font-size: 12px; padding-left: 64px }
svg { width: 100%; height: auto; display: block }
.label { font-size: 11px; fill: var(--soft) }
.end { text-anchor: end }
.middle { text-anchor: middle }
.grid { stroke: var(--grid) }
.line { fill: none; stroke-width: 1.4; stroke-linecap: round; stroke-linejoin: round }
.area { stroke: none; opacity: .8 }
.range { fill: var(--a); opacity: .18 }
path.plan { stroke: var(--soft); stroke-dasharray: 5 4; fill: none }
.a { --color: var(--a) }
.b { --color: var(--b) }
.c { --color: var(--c) }
.d { --color: var(--d) }
.e { --color: var(--e) }
.bad { --color: var(--bad) }
.warn { --color: var(--warn) }
.good { --color: var(--good) }
path.line { stroke: var(--color) }
path.thin { opacity: .35; stroke-width: 1 }
path.area, circle, rect.band { fill: var(--color) }
rect.band { opacity: .16 }
.mark { stroke: var(--color); stroke-width: 1.2; opacity: .8 }
.cursor { stroke: var(--text); opacity: 0 }
.key { margin-left: 10px; white-space: nowrap }
.key::before { content: ""; display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 4px;
  background: var(--color) }
.key.plan::before { height: 0; width: 14px; border-top: 2px dashed var(--soft); background: none; vertical-align: 3px
  }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 14px 0 }
.tile { background: var(--panel); border-radius: 8px; padding: 8px 14px; min-width: 104px }
.tile b { display: block; font-size: 19px; font-weight: 600 }
.tile span { color: var(--soft); font-size: 12px }
.bar { display: flex; height: 18px; border-radius: 5px; overflow: hidden; margin: 8px 0 }
.bar i { background: var(--color) }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--grid); vertical-align: top;
  font-weight: normal }
th { color: var(--soft) }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
pre { background: var(--panel); padding: 10px 14px; border-radius: 8px; overflow-x: auto; font-size: 12px }
summary { cursor: pointer; color: var(--soft) }
#at { position: sticky; top: 0; background: var(--back); min-height: 22px; padding: 2px 0; font-variant-numeric:
  tabular-nums; z-index: 1 }
.note { border-left: 3px solid var(--warn); padding: 2px 10px; margin: 8px 0 }
"""

SCRIPT = """
let here = -1;  // the row that is shown
const rows = JSON.parse(document.getElementById("rows").textContent), at = document.getElementById("at"), idle = at.textContent;
const charts = [...document.querySelectorAll("svg[data-axis]")];
function nearest(column, value) {
  let best = 0;
  for (let i = 1; i < rows.length; i++) if (Math.abs(rows[i][column] - value) < Math.abs(rows[best][column] - value)) best = i;
  return best;
}
function show(i) {
  const row = rows[here = Math.min(rows.length - 1, Math.max(0, i))];
  for (const chart of charts) {
    const { axis, begin, end, left, inner } = chart.dataset, value = row[axis === "time" ? 0 : 1];
    const cursor = chart.querySelector(".cursor");
    cursor.setAttribute("transform", `translate(${+left + inner * (value - begin) / (end - begin || 1)} 0)`);
    cursor.style.opacity = 0.6;
  }
  at.textContent = row[2];
}
for (const chart of charts) {
  chart.addEventListener("pointermove", event => {
    const box = chart.getBoundingClientRect(), { axis, begin, end, left, inner } = chart.dataset;
    const x = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    if (rows.length) show(nearest(axis === "time" ? 0 : 1, +begin + (x - left) / inner * (end - begin)));
  });
  for (const leaving of ["pointerleave", "blur"]) chart.addEventListener(leaving, () => {
    at.textContent = idle;
    charts.forEach(each => each.querySelector(".cursor").style.opacity = 0);
  });
  chart.addEventListener("keydown", event => {
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, PageUp: here - 50, PageDown: here + 50, Home: 0,
      End: rows.length }[event.key];
    if (to === undefined || !rows.length) return;
    event.preventDefault();
    show(to);
  });
}
"""


WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960, 64, 10, 8, 22  # units of the drawing
INNER = WIDTH - LEFT - RIGHT
PLOT = f'data-left="{LEFT}" data-inner="{INNER}"'  # where the page's script finds the values

Place = tuple[float, float]  # on the axes, not on the drawing


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """The horizontal axis of a chart, with its ticks, bands and marks."""

    end: float
    ticks: Sequence[tuple[float, str]]
    begin: float = 0.0
    kind: str = "time"  # or "step"
    bands: Sequence[tuple[float, float, str]] = ()  # begin, end, style: failures and other time without training
    marks: Sequence[tuple[float, str, str]] = ()  # position, style, text

    def x(self, value: float) -> float:
        """Return the x coordinate of a value in the drawing."""
        return LEFT + INNER * (value - self.begin) / ((self.end - self.begin) or 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Values of one kind, in pieces that are drawn separately."""

    name: str
    style: str
    pieces: Sequence[Sequence[Place]]
    dots: bool = False  # draw each value as a dot: there are few


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """The content of one drawing."""

    title: str
    curves: Sequence[Curve]
    form: Callable[[float], str]  # of values
    height: int = 120
    plan: float | None = None
    from_zero: bool = True
    stacked: bool = False  # stacked areas; all curves have values at the same x
    ranges: Sequence[Sequence[tuple[float, float, float]]] = ()  # x, lowest, highest: drawn behind the first curve

    def svg(self, axis: Axis) -> str:
        """Return the chart as an SVG figure."""
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
                if len(piece) == 1:  # a line needs two points
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


STYLES = {
    Use.TRAINING: "a", Use.STARTING: "e", Use.SAVING: "c", Use.PAUSES: "d", Use.SLOW: "warn", Use.FAILURES: "bad",
    Use.RESTARTS: "b", Use.WAITING: "warn",
}  # fmt: skip
PARTS = (
    ("data", "data_s", "e"),
    ("forward", "forward_s", "a"),
    ("backward", "backward_s", "d"),
    ("optimizer", "optimizer_s", "c"),
)
MARKED = {
    EventKind.SAVED: "good",
    EventKind.NOT_SAVED: "bad",
    EventKind.NOT_WRITTEN: "warn",
    EventKind.RESUMED: "b",
    EventKind.SPIKE: "warn",
    EventKind.NOT_FINITE: "bad",
    EventKind.STOPPED: "b",
    Use.SLOW: "warn",
    "failed": "bad",
}
SHOWN_SAVES = 10
MOST_OWN = 12  # curves from the user's own module
SMOOTH = 40  # the moving average spans 1/40 of a curve to each side
GIB = 1 << 30


def page(found: Summary) -> str:
    """Return a run's report as an HTML page."""
    title = html.escape(f"run {found.run}")
    rows = [[point.time - found.began, point.step, _values(found, point)] for point in found.reply.points]
    data = json.dumps(rows).replace("<", "\\u003c")
    body = "\n".join([
        f"<h1>{title}</h1>",
        *(f'<p class="soft">{html.escape(line)}</p>' for line in _about(found)),
        '<div class="tiles">' + "".join(f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
            for name, value in _tiles(found)) + "</div>",
        *(f'<p class="note">{html.escape(line)}</p>' for line in notes(found)),
        '<div id="at" class="soft" aria-live="polite">Point at a curve to read its values, or select it with Tab and press ← or →.</div>',
        *(_charts(found) if found.reply.points or found.reply.evaluations else ["<p>No steps yet.</p>"]),
        *_samples(found.reply.samples),
        *_time(found),
        *_happened(happened(found), found.began),
        *_facts(found),
    ])  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>\n{body}\n'
        f'<script type="application/json" id="rows">{data}</script><script>{SCRIPT}</script>\n</body></html>\n'
    )


def notes(found: Summary) -> Iterator[str]:
    """Yield notes that a reader needs to interpret the report."""
    if line := idle_words(found):
        yield line
    resumed = any(event.kind is EventKind.RESUMED for event in found.reply.events)
    if found.trackers and resumed:
        names = " and ".join(found.trackers)
        yield f"for steps repeated after a resume, {names} has the first values; this report has the last"


def _about(found: Summary) -> Iterator[str]:
    reply = found.reply
    hosts = ", ".join(
        f"{fold_names(name for name, each in reply.hosts if each == ranks)}, {counted(ranks, 'rank')} each"
        for ranks in dict.fromkeys(each for _, each in reply.hosts)
    )
    mesh = reply.mesh.told if reply.mesh else ""
    gpus = given(" x {}", reply.gpu)
    yield f"{state_words(found)}; attempt {reply.attempt}, launched by {reply.owner}; as of {_clock(reply.now)}"
    yield f"{found.world}{gpus or ' ranks'} on {hosts}{given('; ranks as {}', mesh)}"


def _tiles(found: Summary) -> Iterator[tuple[str, str]]:
    """Yield the headline figures: name and value."""
    reply, account = found.reply, found.reply.account
    if reply.points:
        yield (
            f"loss of the last {counted(found.last_steps, 'step')}, from {reply.points[0].loss:.3f}",
            f"{found.last('loss'):.4f}",
        )
    if reply.evaluations:
        best = min(loss for *_, loss in reply.evaluations)
        yield f"evaluation, best {best:.4f}", f"{reply.evaluations[-1][2]:.4f}"
    if reply.last:
        rate, planned = found.last("rate"), found.planned_tokens_per_s
        yield f"tokens/s{given(', planned {}', planned and amount(planned))}", amount(rate)
        if mfu := found.mfu(rate):
            yield f"MFU{given(', planned {:.1f}%', found.mfu(planned))}", f"{mfu:.1f}%"
        yield "tokens trained on", amount(reply.last.tokens)
    if account:
        total_s = sum(account.seconds.values())
        yield f"goodput of {span(total_s)}", f"{100 * (account.goodput or 0.0):.1f}%"
        yield found.unit, f"{account.rank_hours(total_s):,.2f}"
        if cost := found.cost(total_s):
            yield f"cost, at {found.price:g} a {found.unit}", f"{cost:,.2f}"


def _charts(found: Summary) -> Iterator[str]:
    points, began = found.reply.points, found.began
    pieces = list(by_attempt(points))

    timed = [part for piece in pieces for part in _timed(found, piece)]

    def curve(name: str, style: str, value: Callable[[Point], float]) -> Curve:
        return Curve(name, style, [[(time - began, value(point)) for time, point in part] for part in timed])

    yield "<h2>Loss by step</h2>"
    yield _loss(found, pieces)
    keys = (("saved", "good"), ("resumed or stopped", "b"), ("spike or slow step", "warn"), ("failure", "bad"))
    legend = "".join(f'<span class="key {style}">{name}</span>' for name, style in keys)
    yield f"<h2>By time since the launch</h2><figcaption>{legend}</figcaption>"
    axis = _time_axis(found)
    evaluated = [[(time - began, loss)] for _, time, loss in found.reply.evaluations]
    losses = [curve("loss", "a", lambda point: point.loss)] if points else []
    yield Chart(
        "loss, nats per target token",
        [*losses, Curve("evaluation", "b", evaluated, dots=True)],
        reading,
        from_zero=False,
    ).svg(axis)
    if not points:
        return
    yield Chart(
        "gradient norm, before clipping", [curve("highest", "a", lambda point: point.grad_norm_high)], reading
    ).svg(axis)
    yield Chart(
        "tokens per second",
        [curve("all ranks", "a", lambda point: point.rate)],
        amount,
        plan=found.planned_tokens_per_s,
    ).svg(axis)
    if found.mfu(points[-1].rate):
        yield Chart(
            "model FLOPs utilization", [curve("MFU", "a", lambda point: found.mfu(point.rate) or 0.0)],
            lambda value: f"{value:.0f}%", plan=found.mfu(found.planned_tokens_per_s),
        ).svg(axis)  # fmt: skip
    parts = [curve(name, style, lambda point, field=field: getattr(point, field)) for name, field, style in PARTS]  # type: ignore[misc]
    planned = found.reply.expected_step_s or None
    yield Chart("a step, seconds", parts, reading, stacked=True, plan=planned).svg(axis)
    yield _memory(points, curve).svg(axis)
    for chart in _own(pieces, began):
        yield chart.svg(axis)
    yield Chart(
        "learning rate", [curve("of the first group", "a", lambda point: point.lr)], "{:.1e}".format, height=90
    ).svg(axis)


def _timed(found: Summary, piece: Sequence[Point]) -> Iterator[list[tuple[float, Point]]]:
    """Yield an attempt's points by time; a step that hung is its own piece, drawn over the time it took."""
    began = {point.time: point.began for point, _ in found.slow}
    for hung, alike in itertools.groupby(piece, lambda point: began.get(point.time)):
        places = [(point.time, point) for point in alike]
        yield places if hung is None else [(hung, places[0][1]), *places]


def _memory(points: Sequence[Point], curve: Callable[[str, str, Callable[[Point], float]], Curve]) -> Chart:
    on_gpu = any(point.allocated_bytes for point in points)
    curves = [curve("reserved by the allocator" if on_gpu else "held", "a", lambda point: point.peak_bytes / GIB)]
    if on_gpu:
        curves.append(curve("tensors", "c", lambda point: point.allocated_bytes / GIB))
    return Chart("peak memory of rank 0, GiB", curves, reading)


def _own(pieces: Sequence[Sequence[Point]], began: float) -> Iterator[Chart]:
    """Yield a chart for each metric that the user's module adds."""
    names = dict.fromkeys(name for piece in pieces for point in piece for name in point.own)
    for name in list(names)[:MOST_OWN]:
        own = [[(point.time - began, point.own[name]) for point in piece if name in point.own] for piece in pieces]
        yield Chart(f"own: {name}", [Curve(name, "a", list(filter(None, own)))], reading, from_zero=False)


def _loss(found: Summary, pieces: Sequence[Sequence[Point]]) -> str:
    """Return the chart of the loss by step, with a range where one point stands for several steps."""
    points = found.reply.points
    each = [[(point.step, point.loss) for point in piece] for piece in pieces]
    curves = [Curve("loss", "a", each)] if points else []
    if half := len(points) // SMOOTH:
        smooth = iter(_smooth([place for piece in each for place in piece], half))
        smoothed = [list(itertools.islice(smooth, len(piece))) for piece in each]
        curves = [Curve("loss", "a thin", each), Curve("smoothed", "a", smoothed)]
    evaluated = Curve("evaluation", "b", [[(step, loss)] for step, _, loss in found.reply.evaluations], dots=True)
    ranges = [
        [(point.step, point.loss_low, point.loss_high) for point in piece] for piece in pieces if piece[0].steps > 1
    ]
    shown = [*(point.step for point in points), *(step for step, *_ in found.reply.evaluations)]
    begin, end = min(shown), max(shown)
    marks = [(float(step), f"{step:,.0f}") for step in ticks(begin, end, 8) if step == int(step)]
    axis = Axis(end, marks, begin=begin, kind="step")
    return Chart("nats per target token", [*curves, evaluated], reading, 260, from_zero=False, ranges=ranges).svg(axis)


def _smooth(places: Sequence[Place], half: int) -> list[Place]:
    """Return the moving average of the values."""
    around = [places[max(0, i - half) : i + half + 1] for i in range(len(places))]
    return [(at, sum(value for _, value in near) / len(near)) for (at, _), near in zip(places, around, strict=True)]


def _time_axis(found: Summary) -> Axis:
    reply, began = found.reply, found.began
    end = max([reply.now if reply.alive else 0.0, *(point.time for point in reply.points), *(each.time for each in happened(found)),
        *(time for _, time, _ in reply.evaluations)]) - began  # fmt: skip
    account = reply.account
    bands = [
        (each.began - began, min(end, (each.resumed or each.failed) - began), "bad")
        for each in (account.incidents if account else ())
    ] + [(point.began - began, point.time - began, "warn") for point, _ in found.slow]
    marks = [(each.time - began, MARKED[each.kind], each.words) for each in happened(found) if each.kind in MARKED]
    return Axis(end, [(at, span(at) if at else "0") for at in time_ticks(end, 8)], bands=bands, marks=marks)


def _values(found: Summary, point: Point) -> str:
    """Return the values of a point as one line."""
    mfu = given("  MFU {:.1f}%", found.mfu(point.rate))
    return (
        f"{step_words(point)}  {span(point.time - found.began)}  loss {point.loss:.4f}  grad {point.grad_norm:.3f}  "
        f"{amount(point.rate)} tokens/s{mfu}  {point.step_s:.2f} s  lr {point.lr:.2e}"
    )


def _time(found: Summary) -> Iterator[str]:
    account = found.reply.account
    if not account:
        return
    total_s = sum(account.seconds.values())
    uses = list(spent(account))
    yield "<h2>What the time went into</h2>"
    bars = (f'<i class="{STYLES[use]}" style="width:{100 * seconds / total_s:.2f}%"></i>' for use, seconds in uses)
    yield f'<div class="bar">{"".join(bars)}</div>'
    rows = [
        [f'<span class="key {STYLES[use]}">{use}</span>', USES[use], *_figures(found, seconds, total_s)]
        for use, seconds in uses
    ]
    total = "since the first launch, excluding the time it was stopped"
    rows.append(["<span class='key'></span>all", total, *_figures(found, total_s, total_s)])
    yield _table(["", "", "time", found.unit, "share", *(["cost"] if found.price else [])], rows, numeric=2)
    if account.incidents:
        yield "<h2>Failures</h2>"
        rows = [
            [_clock(each.failed), str(each.attempt), html.escape(incident_words(each)),
             span(each.resumed - each.began) if each.resumed else started_words(each),
             f"{account.rank_hours((each.resumed or each.failed) - each.began):,.2f}"]
            for each in account.incidents
        ]  # fmt: skip
        yield _table(["when", "attempt", "why", "until the next step", found.unit], rows)


def _figures(found: Summary, seconds: float, total_s: float) -> list[str]:
    hours = f"{seconds * found.world / 3600:,.2f}"
    cost = [number(found.cost(seconds), ",.2f")] if found.price else []
    return [span(seconds), hours, f"{100 * seconds / total_s:.1f}%", *cost]


def _happened(all_of: Sequence[Happened], began: float) -> Iterator[str]:
    saves = [each for each in all_of if each.kind == EventKind.SAVED]
    shown = [each for each in all_of if each.kind != EventKind.SAVED or each in saves[-SHOWN_SAVES:]]
    rows = [[_clock(each.time), span(each.time - began), html.escape(each.words)] for each in shown]
    if not rows:
        return
    yield "<h2>What happened</h2>"
    if len(saves) > SHOWN_SAVES:
        yield f'<p class="soft">Of {len(saves)} saves, the last {SHOWN_SAVES}.</p>'
    yield _table(["when", "after", ""], rows)


def _samples(samples: Sequence[Sample]) -> Iterator[str]:
    """Yield the prompts' continuations: those of the last evaluation, then all."""
    if not samples:
        return

    def rows(shown: Sequence[Sample]) -> list[list[str]]:
        return [[f"{each.step}", html.escape(each.prompt), html.escape(each.text)] for each in shown]

    last = [each for each in samples if each.step == samples[-1].step]
    yield "<h2>Prompts, continued</h2>" + _table(["step", "prompt", "continuation"], rows(last))
    if len(last) < len(samples):
        ordered = sorted(samples, key=lambda each: (each.prompt, each.step))
        table = _table(["step", "prompt", "continuation"], rows(ordered))
        yield f"<details><summary>all {len(samples)}</summary>{table}</details>"


def _facts(found: Summary) -> Iterator[str]:
    reply = found.reply
    yield "<h2>What ran</h2>"
    versions = ", ".join(f"{name} {version}" for name, version in sorted(reply.versions.items()))
    yield f"<p>{html.escape(versions or 'Package versions are known once a checkpoint is saved.')}</p>"
    if learns := reply.learns:
        yield f"<p>model: {html.escape(learns.model)}; data: {html.escape(learns.data)}</p>"
    if reply.checkpoint:
        yield f"<p>newest checkpoint: {html.escape(reply.checkpoint)}</p>"
    yield '<p class="soft">A run\'s files do not record power or energy; cluster-top shows them during training.</p>'
    yield f"<details><summary>settings (config.toml)</summary><pre>{html.escape(reply.settings)}</pre></details>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], numeric: int = 99) -> str:
    """Return an HTML table; cells are HTML already, and columns from ``numeric`` on hold numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        classes = [' class="n"' if i >= numeric else "" for i in range(len(cells))]
        return (
            "<tr>"
            + "".join(f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in zip(cells, classes, strict=True))
            + "</tr>"
        )

    return "<table>" + row(headings, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


def _clock(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def lines_of(found: Summary, width: int, height: int, *, plain: bool) -> Iterator[str]:
    """Yield the report's lines for a terminal. ``plain``: use ASCII only."""
    reply, points = found.reply, found.reply.points
    yield f"run {found.run}: {state_words(found)}"
    losses = [(float(point.step), point.loss) for point in points]
    evaluated = [(float(step), loss) for step, _, loss in reply.evaluations]
    if losses or evaluated:
        yield "loss by step" + given("; o evaluations", len(evaluated))
        yield from plot(losses, evaluated, width, height, reading, plain=plain)
    if points:
        many = counted(found.last_steps, "step")
        yield f"loss {points[0].loss:.4f} -> {found.last('loss'):.4f} (mean of the last {many}), {_rate(found)}"
    if evaluated:
        best = min(reply.evaluations, key=lambda each: each[2])
        yield f"evaluation {evaluated[0][1]:.4f} -> {evaluated[-1][1]:.4f}, lowest {best[2]:.4f} at step {best[0]}"
    if account := reply.account:
        yield account_line(account, found.unit)
        if cost := found.cost(sum(account.seconds.values())):
            yield f"cost {cost:,.2f} at {found.price:g} a {found.unit}"
        for incident in account.incidents:
            yield f"  {incident_line(account, incident, found.unit)}"
    yield from notes(found)


def _rate(found: Summary) -> str:
    rate = found.last("rate")
    mfu = given(", MFU {:.1f}%", found.mfu(rate))
    planned = given(" (planned {})", found.reply.expected_step_s and span(found.reply.expected_step_s))
    return f"{amount(rate)} tokens/s{mfu}, {found.last('step_s'):.2f} s per step{planned}"
