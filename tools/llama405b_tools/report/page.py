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

from llama405b.contract.accounting import TimeUse
from llama405b.contract.errors import fmt_if, pluralize
from llama405b.contract.records import DocumentPreview, EventKind, PromptSample, SequencePreview
from llama405b_tools.agent.reports import CurvePoint
from llama405b_tools.report.summary import (
    GIB,
    USE_LABELS,
    ReportEvent,
    Summary,
    describe_idle,
    format_run_state,
    format_steps,
    list_events,
    split_by_attempt,
    time_by_use,
)
from llama405b_tools.run.query import account_line, incident_line, incident_words, started_words
from llama405b_tools.text.figures import (
    fmt_or_dash,
    format_amount,
    format_duration,
    format_number,
    plot,
    round_ticks,
    round_time_ticks,
)
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
.text { white-space: pre-wrap }
mark { background: color-mix(in srgb, var(--good) 25%, transparent); color: inherit }
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

DataPoint = tuple[float, float]  # on the axes, not on the drawing


@dataclasses.dataclass(frozen=True, slots=True)
class ChartAxis:
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
    pieces: Sequence[Sequence[DataPoint]]
    dots: bool = False  # draw each value as a dot: there are few


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """The content of one drawing."""

    title: str
    curves: Sequence[Curve]
    format_value: Callable[[float], str]  # of values
    height: int = 120
    plan: float | None = None
    from_zero: bool = True
    stacked: bool = False  # stacked areas; all curves have values at the same x
    ranges: Sequence[Sequence[tuple[float, float, float]]] = ()  # x, lowest, highest: drawn behind the first curve

    def to_svg(self, axis: ChartAxis) -> str:
        """Return the chart as an SVG figure."""
        low, high = self._value_range()
        inner = self.height - TOP - BOTTOM

        def y(value: float) -> float:
            return TOP + inner * (1 - (min(value, high) - low) / ((high - low) or 1.0))

        parts = [
            *(_band_svg(axis, begin, end, style, inner) for begin, end, style in axis.bands),
            *(
                _gridline_svg(self.format_value(tick), y(tick))
                for tick in round_ticks(low, high, max(2, self.height // 40))
            ),
            *(_range_svg(axis, piece, y) for piece in self.ranges),
            *(self._area_paths(axis, y) if self.stacked else self._line_paths(axis, y)),
            *(_mark_svg(axis, at, style, words, inner) for at, style, words in axis.marks),
            *(_tick_svg(axis.x(at), words, self.height) for at, words in axis.ticks),
        ]
        if self.plan is not None:
            parts.append(f'<path class="plan" d="M{LEFT} {y(self.plan):.1f}h{INNER}"/>')
        legend = "".join(f'<span class="key {curve.style}">{html.escape(curve.name)}</span>' for curve in self.curves)
        plan_legend = (
            f'<span class="key plan">plan {html.escape(self.format_value(self.plan))}</span>' if self.plan else ""
        )
        return (
            f"<figure><figcaption>{html.escape(self.title)} {legend}{plan_legend}</figcaption>"
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{html.escape(self.title)}" tabindex="0" '
            f'data-axis="{axis.kind}" data-begin="{axis.begin:.9g}" data-end="{axis.end:.9g}" {PLOT}>{"".join(parts)}'
            f'<path class="cursor" d="M0 {TOP}v{inner}"/></svg></figure>\n'
        )

    def _value_range(self) -> tuple[float, float]:
        values = [value for curve in self.curves for piece in curve.pieces for _, value in piece]
        if self.stacked:
            values = [sum(column) for column in self._stacked_columns()]
        values += [value for piece in self.ranges for _, *bounds in piece for value in bounds]
        values += [] if self.plan is None else [self.plan]
        if not values:
            return 0.0, 1.0
        low, high = min(values), max(values)
        if self.from_zero:
            return min(0.0, low), 1.05 * high or 1.0
        margin = 0.05 * (high - low) or abs(high) or 1.0
        return low - margin, high + margin

    def _stacked_columns(self) -> Iterator[list[float]]:
        for pieces in zip(*(curve.pieces for curve in self.curves), strict=True):
            for places in zip(*pieces, strict=True):
                yield [value for _, value in places]

    def _line_paths(self, axis: ChartAxis, y: Callable[[float], float]) -> Iterator[str]:
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

    def _area_paths(self, axis: ChartAxis, y: Callable[[float], float]) -> Iterator[str]:
        for i in range(len(self.curves[0].pieces)):
            lower = [0.0] * len(self.curves[0].pieces[i])
            for curve in self.curves:
                piece = curve.pieces[i]
                upper = [low + value for low, (_, value) in zip(lower, piece, strict=True)]
                upper_path = [f"{axis.x(at):.1f} {y(value):.1f}" for (at, _), value in zip(piece, upper, strict=True)]
                lower_path = [f"{axis.x(at):.1f} {y(value):.1f}" for (at, _), value in zip(piece, lower, strict=True)]
                yield f'<path class="area {curve.style}" d="M{"L".join([*upper_path, *reversed(lower_path)])}Z"/>'
                lower = upper


def _band_svg(axis: ChartAxis, begin: float, end: float, style: str, inner: int) -> str:
    x = axis.x(begin)
    return (
        f'<rect class="band {style}" x="{x:.1f}" y="{TOP}" width="{max(1.0, axis.x(end) - x):.1f}" height="{inner}"/>'
    )


def _mark_svg(axis: ChartAxis, at: float, style: str, words: str, inner: int) -> str:
    title = f"<title>{html.escape(words)}</title>"
    return f'<path class="mark {style}" d="M{axis.x(at):.1f} {TOP}v{inner}">{title}</path>'


def _gridline_svg(words: str, y: float) -> str:
    line = f'<path class="grid" d="M{LEFT} {y:.1f}h{INNER}"/>'
    return f'{line}<text class="label end" x="{LEFT - 6}" y="{y + 3.5:.1f}">{html.escape(words)}</text>'


def _tick_svg(x: float, words: str, height: int) -> str:
    return f'<text class="label middle" x="{x:.1f}" y="{height - 6}">{html.escape(words)}</text>'


def _range_svg(axis: ChartAxis, piece: Sequence[tuple[float, float, float]], y: Callable[[float], float]) -> str:
    upper_path = [f"{axis.x(at):.1f} {y(high):.1f}" for at, _, high in piece]
    lower_path = [f"{axis.x(at):.1f} {y(low):.1f}" for at, low, _ in reversed(piece)]
    return f'<path class="range" d="M{"L".join([*upper_path, *lower_path])}Z"/>'


USE_STYLES = {
    TimeUse.TRAINING: "a", TimeUse.STARTING: "e", TimeUse.SAVING: "c", TimeUse.PAUSES: "d", TimeUse.SLOW: "warn", TimeUse.FAILURES: "bad",
    TimeUse.RESTARTS: "b", TimeUse.WAITING: "warn",
}  # fmt: skip
STEP_PARTS = (
    ("data", "data_s", "e"),
    ("forward", "forward_s", "a"),
    ("backward", "backward_s", "d"),
    ("optimizer", "optimizer_s", "c"),
)
EVENT_STYLES = {
    EventKind.SAVED: "good",
    EventKind.NOT_SAVED: "bad",
    EventKind.NOT_WRITTEN: "warn",
    EventKind.RESUMED: "b",
    EventKind.SPIKE: "warn",
    EventKind.NOT_FINITE: "bad",
    EventKind.STOPPED: "b",
    TimeUse.SLOW: "warn",
    "failed": "bad",
}
MAX_SHOWN_SAVES = 10
MAX_USER_CURVES = 12  # curves from the user's own module
SMOOTHING_DIVISOR = 40  # the moving average spans 1/40 of a curve to each side


def render_page(summary: Summary) -> str:
    """Return a run's report as an HTML page."""
    title = html.escape(f"run {summary.run}")
    rows = [
        [point.time - summary.start_time, point.step, _hover_text(summary, point)] for point in summary.reply.points
    ]
    data = json.dumps(rows).replace("<", "\\u003c")
    body = "\n".join([
        f"<h1>{title}</h1>",
        *(f'<p class="soft">{html.escape(line)}</p>' for line in _intro_lines(summary)),
        '<div class="tiles">' + "".join(f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
            for name, value in _tiles(summary)) + "</div>",
        *(f'<p class="note">{html.escape(line)}</p>' for line in reader_notes(summary)),
        '<div id="at" class="soft" aria-live="polite">Point at a curve to read its values, or select it with Tab and press ← or →.</div>',
        *(_charts(summary) if summary.reply.points or summary.reply.evaluations else ["<p>No steps yet.</p>"]),
        *_prompts_section(summary.reply.samples),
        *_sequences_section(summary.reply.sequences),
        *_time_section(summary),
        *_scores_section(summary),
        *_events_section(list_events(summary), summary.start_time),
        *_facts_section(summary),
    ])  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>\n{body}\n'
        f'<script type="application/json" id="rows">{data}</script><script>{SCRIPT}</script>\n</body></html>\n'
    )


def reader_notes(summary: Summary) -> Iterator[str]:
    """Yield notes that a reader needs to interpret the report."""
    if line := describe_idle(summary):
        yield line
    has_resumed = any(event.kind is EventKind.RESUMED for event in summary.reply.events)
    if summary.trackers and has_resumed:
        names = " and ".join(summary.trackers)
        yield f"for steps repeated after a resume, {names} has the first values; this report has the last"


def _intro_lines(summary: Summary) -> Iterator[str]:
    reply = summary.reply
    hosts = ", ".join(
        f"{fold_names(name for name, host_ranks in reply.hosts if host_ranks == ranks)}, {pluralize(ranks, 'rank')} each"
        for ranks in dict.fromkeys(host_ranks for _, host_ranks in reply.hosts)
    )
    mesh = reply.mesh.label if reply.mesh else ""
    gpus = fmt_if(" x {}", reply.gpu)
    yield f"{format_run_state(summary)}; attempt {reply.attempt}, launched by {reply.owner}; as of {_local_datetime(reply.now)}"
    yield f"{summary.world_size}{gpus or ' ranks'} on {hosts}{fmt_if('; ranks as {}', mesh)}"


def _tiles(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the headline figures: name and value."""
    reply, account = summary.reply, summary.reply.account
    if reply.points:
        yield (
            f"loss of the last {pluralize(summary.n_last_steps, 'step')}, from {reply.points[0].loss:.3f}",
            f"{summary.mean_of_last('loss'):.4f}",
        )
    if reply.evaluations:
        best = min(loss for *_, loss in reply.evaluations)
        yield f"evaluation, best {best:.4f}", f"{reply.evaluations[-1][2]:.4f}"
    if reply.last:
        rate, planned_rate = summary.mean_of_last("rate"), summary.planned_tokens_per_s
        yield f"tokens/s{fmt_if(', planned {}', planned_rate and format_amount(planned_rate))}", format_amount(rate)
        if mfu := summary.mfu(rate):
            yield f"MFU{fmt_if(', planned {:.1f}%', summary.mfu(planned_rate))}", f"{mfu:.1f}%"
        yield "tokens trained on", format_amount(reply.last.tokens)
    if account:
        total_s = sum(account.seconds.values())
        yield f"goodput of {format_duration(total_s)}", f"{100 * (account.goodput or 0.0):.1f}%"
        yield summary.hour_unit, f"{account.rank_hours(total_s):,.2f}"
        if cost := summary.cost(total_s):
            yield f"cost, at {summary.price:g} a {summary.hour_unit}", f"{cost:,.2f}"


def _charts(summary: Summary) -> Iterator[str]:
    points, start_time = summary.reply.points, summary.start_time
    pieces = list(split_by_attempt(points))

    timed_pieces = [part for piece in pieces for part in _timed_pieces(summary, piece)]

    def curve(name: str, style: str, value: Callable[[CurvePoint], float]) -> Curve:
        return Curve(
            name, style, [[(time - start_time, value(point)) for time, point in part] for part in timed_pieces]
        )

    yield "<h2>Loss by step</h2>"
    yield _loss_chart_svg(summary, pieces)
    keys = (("saved", "good"), ("resumed or stopped", "b"), ("spike or slow step", "warn"), ("failure", "bad"))
    legend = "".join(f'<span class="key {style}">{name}</span>' for name, style in keys)
    yield f"<h2>By time since the launch</h2><figcaption>{legend}</figcaption>"
    axis = _time_axis(summary)
    evaluations = [[(time - start_time, loss)] for _, time, loss in summary.reply.evaluations]
    losses = [curve("loss", "a", lambda point: point.loss)] if points else []
    yield Chart(
        "loss, nats per target token",
        [*losses, Curve("evaluation", "b", evaluations, dots=True)],
        format_number,
        from_zero=False,
    ).to_svg(axis)
    if not points:
        return
    yield Chart(
        "gradient norm, before clipping", [curve("highest", "a", lambda point: point.grad_norm_high)], format_number
    ).to_svg(axis)
    yield Chart(
        "tokens per second",
        [curve("all ranks", "a", lambda point: point.rate)],
        format_amount,
        plan=summary.planned_tokens_per_s,
    ).to_svg(axis)
    if summary.mfu(points[-1].rate):
        yield Chart(
            "model FLOPs utilization", [curve("MFU", "a", lambda point: summary.mfu(point.rate) or 0.0)],
            lambda value: f"{value:.0f}%", plan=summary.mfu(summary.planned_tokens_per_s),
        ).to_svg(axis)  # fmt: skip
    parts = [curve(name, style, lambda point, field=field: getattr(point, field)) for name, field, style in STEP_PARTS]  # type: ignore[misc]
    planned_step_s = summary.reply.expected.step_s or None
    yield Chart("a step, seconds", parts, format_number, stacked=True, plan=planned_step_s).to_svg(axis)
    yield _memory_chart(points, curve).to_svg(axis)
    for chart in _user_charts(pieces, start_time):
        yield chart.to_svg(axis)
    yield Chart(
        "learning rate", [curve("of the first group", "a", lambda point: point.lr)], "{:.1e}".format, height=90
    ).to_svg(axis)


def _timed_pieces(summary: Summary, piece: Sequence[CurvePoint]) -> Iterator[list[tuple[float, CurvePoint]]]:
    """Yield an attempt's points by time; a step that hung is its own piece, drawn over the time it took."""
    hang_starts = {point.time: point.start_time for point, _ in summary.slow_points}
    for hang_start, group in itertools.groupby(piece, lambda point: hang_starts.get(point.time)):
        timed_points = [(point.time, point) for point in group]
        yield timed_points if hang_start is None else [(hang_start, timed_points[0][1]), *timed_points]


def _memory_chart(
    points: Sequence[CurvePoint], curve: Callable[[str, str, Callable[[CurvePoint], float]], Curve]
) -> Chart:
    on_gpu = any(point.allocated_bytes for point in points)
    curves = [curve("reserved by the allocator" if on_gpu else "held", "a", lambda point: point.peak_bytes / GIB)]
    if on_gpu:
        curves.append(curve("tensors", "c", lambda point: point.allocated_bytes / GIB))
    return Chart("peak memory of rank 0, GiB", curves, format_number)


def _user_charts(pieces: Sequence[Sequence[CurvePoint]], start_time: float) -> Iterator[Chart]:
    """Yield a chart for each metric that the user's module adds."""
    names = dict.fromkeys(name for piece in pieces for point in piece for name in point.own)
    for name in list(names)[:MAX_USER_CURVES]:
        curve_points = [
            [(point.time - start_time, point.own[name]) for point in piece if name in point.own] for piece in pieces
        ]
        yield Chart(
            f"own: {name}", [Curve(name, "a", list(filter(None, curve_points)))], format_number, from_zero=False
        )


def _loss_chart_svg(summary: Summary, pieces: Sequence[Sequence[CurvePoint]]) -> str:
    """Return the chart of the loss by step, with a range where one point stands for several steps."""
    points = summary.reply.points
    by_step = [[(point.step, point.loss) for point in piece] for piece in pieces]
    curves = [Curve("loss", "a", by_step)] if points else []
    if radius := len(points) // SMOOTHING_DIVISOR:
        averages = iter(_moving_average([place for piece in by_step for place in piece], radius))
        smooth_pieces = [list(itertools.islice(averages, len(piece))) for piece in by_step]
        curves = [Curve("loss", "a thin", by_step), Curve("smoothed", "a", smooth_pieces)]
    evaluation_curve = Curve(
        "evaluation", "b", [[(step, loss)] for step, _, loss in summary.reply.evaluations], dots=True
    )
    ranges = [
        [(point.step, point.loss_low, point.loss_high) for point in piece] for piece in pieces if piece[0].steps > 1
    ]
    shown_steps = [*(point.step for point in points), *(step for step, *_ in summary.reply.evaluations)]
    begin, end = min(shown_steps), max(shown_steps)
    marks = [(float(step), f"{step:,.0f}") for step in round_ticks(begin, end, 8) if step == int(step)]
    axis = ChartAxis(end, marks, begin=begin, kind="step")
    return Chart(
        "nats per target token", [*curves, evaluation_curve], format_number, 260, from_zero=False, ranges=ranges
    ).to_svg(axis)


def _moving_average(points: Sequence[DataPoint], radius: int) -> list[DataPoint]:
    """Return the moving average of the values."""
    windows = [points[max(0, i - radius) : i + radius + 1] for i in range(len(points))]
    return [
        (x, sum(value for _, value in window) / len(window)) for (x, _), window in zip(points, windows, strict=True)
    ]


def _time_axis(summary: Summary) -> ChartAxis:
    reply, start_time = summary.reply, summary.start_time
    end = max([reply.now if reply.alive else 0.0, *(point.time for point in reply.points), *(event.time for event in list_events(summary)),
        *(time for _, time, _ in reply.evaluations)]) - start_time  # fmt: skip
    account = reply.account
    bands = [
        (incident.began - start_time, min(end, (incident.resumed or incident.failed) - start_time), "bad")
        for incident in (account.incidents if account else ())
    ] + [(point.start_time - start_time, point.time - start_time, "warn") for point, _ in summary.slow_points]
    marks = [
        (event.time - start_time, EVENT_STYLES[event.kind], event.words)
        for event in list_events(summary)
        if event.kind in EVENT_STYLES
    ]
    return ChartAxis(
        end, [(at, format_duration(at) if at else "0") for at in round_time_ticks(end, 8)], bands=bands, marks=marks
    )


def _hover_text(summary: Summary, point: CurvePoint) -> str:
    """Return the values of a point as one line."""
    mfu = fmt_if("  MFU {:.1f}%", summary.mfu(point.rate))
    return (
        f"{format_steps(point)}  {format_duration(point.time - summary.start_time)}  loss {point.loss:.4f}  grad {point.grad_norm:.3f}  "
        f"{format_amount(point.rate)} tokens/s{mfu}  {point.step_s:.2f} s  lr {point.lr:.2e}"
    )


def _time_section(summary: Summary) -> Iterator[str]:
    account = summary.reply.account
    if not account:
        return
    total_s = sum(account.seconds.values())
    uses = list(time_by_use(account))
    yield "<h2>What the time went into</h2>"
    bars = (f'<i class="{USE_STYLES[use]}" style="width:{100 * seconds / total_s:.2f}%"></i>' for use, seconds in uses)
    yield f'<div class="bar">{"".join(bars)}</div>'
    rows = [
        [f'<span class="key {USE_STYLES[use]}">{use}</span>', USE_LABELS[use], *_use_cells(summary, seconds, total_s)]
        for use, seconds in uses
    ]
    total = "since the first launch, excluding the time it was stopped"
    rows.append(["<span class='key'></span>all", total, *_use_cells(summary, total_s, total_s)])
    yield _html_table(
        ["", "", "time", summary.hour_unit, "share", *(["cost"] if summary.price else [])], rows, numeric=2
    )
    if account.incidents:
        yield "<h2>Failures</h2>"
        rows = [
            [_local_datetime(incident.failed), str(incident.attempt), html.escape(incident_words(incident)),
             format_duration(incident.resumed - incident.began) if incident.resumed else started_words(incident),
             f"{account.rank_hours((incident.resumed or incident.failed) - incident.began):,.2f}"]
            for incident in account.incidents
        ]  # fmt: skip
        yield _html_table(["when", "attempt", "why", "until the next step", summary.hour_unit], rows)


def _use_cells(summary: Summary, seconds: float, total_s: float) -> list[str]:
    hours = f"{seconds * summary.world_size / 3600:,.2f}"
    cost = [fmt_or_dash(summary.cost(seconds), ",.2f")] if summary.price else []
    return [format_duration(seconds), hours, f"{100 * seconds / total_s:.1f}%", *cost]


def _events_section(events: Sequence[ReportEvent], start_time: float) -> Iterator[str]:
    saves = [event for event in events if event.kind == EventKind.SAVED]
    shown_events = [event for event in events if event.kind != EventKind.SAVED or event in saves[-MAX_SHOWN_SAVES:]]
    rows = [
        [_local_datetime(event.time), format_duration(event.time - start_time), html.escape(event.words)]
        for event in shown_events
    ]
    if not rows:
        return
    yield "<h2>What happened</h2>"
    if len(saves) > MAX_SHOWN_SAVES:
        yield f'<p class="soft">Of {len(saves)} saves, the last {MAX_SHOWN_SAVES}.</p>'
    yield _html_table(["when", "after", ""], rows)


def _prompts_section(samples: Sequence[PromptSample]) -> Iterator[str]:
    """Yield the prompts' continuations: those of the last evaluation, then all."""
    if not samples:
        return

    def rows(shown: Sequence[PromptSample]) -> list[list[str]]:
        return [[f"{sample.step}", html.escape(sample.prompt), html.escape(sample.text)] for sample in shown]

    last = [sample for sample in samples if sample.step == samples[-1].step]
    yield "<h2>Prompts, continued</h2>" + _html_table(["step", "prompt", "continuation"], rows(last))
    if len(last) < len(samples):
        ordered = sorted(samples, key=lambda sample: (sample.prompt, sample.step))
        table = _html_table(["step", "prompt", "continuation"], rows(ordered))
        yield f"<details><summary>all {len(samples)}</summary>{table}</details>"


def _sequences_section(sequences: Sequence[SequencePreview]) -> Iterator[str]:
    """Yield the first sequences of the run, with what is trained on marked."""
    if not sequences:
        return
    yield "<h2>First sequences</h2><p>What is trained on is <mark>marked</mark>; long texts and further documents are left out.</p>"
    for sequence in sequences:
        yield f"<details><summary>sequence {sequence.index + 1}: {html.escape(sequence.summary)}</summary>"
        for document in sequence.documents:
            yield f'<pre class="text">{"… " * document.is_continued}{_document_html(document)}</pre>'
        yield "</details>"


def _document_html(document: DocumentPreview) -> str:
    texts = ((html.escape(part.text), part.is_trained) for part in document.parts)
    return "".join(f"<mark>{text}</mark>" if is_trained else text for text, is_trained in texts)


def _scores_section(summary: Summary) -> Iterator[str]:
    """Yield what was predicted at the launch, beside what came."""
    if rows := summary.score_rows:
        yield "<h2>Predicted and measured</h2>"
        yield _html_table(["", ""], [[html.escape(word) for word in words] for words in rows])


def _facts_section(summary: Summary) -> Iterator[str]:
    reply = summary.reply
    yield "<h2>What ran</h2>"
    versions = ", ".join(f"{name} {version}" for name, version in sorted(reply.versions.items()))
    yield f"<p>{html.escape(versions or 'Package versions are known once a checkpoint is saved.')}</p>"
    if learns := reply.learns:
        yield f"<p>model: {html.escape(learns.model)}; data: {html.escape(learns.data)}</p>"
    if reply.checkpoint:
        yield f"<p>newest checkpoint: {html.escape(reply.checkpoint)}</p>"
    yield '<p class="soft">A run\'s files do not record power or energy; cluster-top shows them during training.</p>'
    yield f"<details><summary>settings (config.toml)</summary><pre>{html.escape(reply.settings)}</pre></details>"


def _html_table(headings: Sequence[str], rows: Sequence[Sequence[str]], numeric: int = 99) -> str:
    """Return an HTML table; cells are HTML already, and columns from ``numeric`` on hold numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        classes = [' class="n"' if i >= numeric else "" for i in range(len(cells))]
        return (
            "<tr>"
            + "".join(f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in zip(cells, classes, strict=True))
            + "</tr>"
        )

    return "<table>" + row(headings, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


def _local_datetime(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def format_report(summary: Summary, width: int, height: int, *, plain: bool) -> Iterator[str]:
    """Yield the report's lines for a terminal. ``plain``: use ASCII only."""
    reply, points = summary.reply, summary.reply.points
    yield f"run {summary.run}: {format_run_state(summary)}"
    losses = [(float(point.step), point.loss) for point in points]
    evaluations = [(float(step), loss) for step, _, loss in reply.evaluations]
    if losses or evaluations:
        yield "loss by step" + fmt_if("; o evaluations", len(evaluations))
        yield from plot(losses, evaluations, width, height, format_number, plain=plain)
    if points:
        last_steps = pluralize(summary.n_last_steps, "step")
        yield f"loss {points[0].loss:.4f} -> {summary.mean_of_last('loss'):.4f} (mean of the last {last_steps}), {_rate_text(summary)}"
    if evaluations:
        best = min(reply.evaluations, key=lambda evaluation: evaluation[2])
        yield f"evaluation {evaluations[0][1]:.4f} -> {evaluations[-1][1]:.4f}, lowest {best[2]:.4f} at step {best[0]}"
    if account := reply.account:
        yield account_line(account, summary.hour_unit)
        if cost := summary.cost(sum(account.seconds.values())):
            yield f"cost {cost:,.2f} at {summary.price:g} a {summary.hour_unit}"
        for incident in account.incidents:
            yield f"  {incident_line(account, incident, summary.hour_unit)}"
    for i, words in enumerate(summary.score_rows):
        yield f"{'' if i else 'prediction':10} {' '.join(words)}"
    yield from reader_notes(summary)


def _rate_text(summary: Summary) -> str:
    rate = summary.mean_of_last("rate")
    mfu = fmt_if(", MFU {:.1f}%", summary.mfu(rate))
    plan_note = fmt_if(
        " (planned {})", summary.reply.expected.step_s and format_duration(summary.reply.expected.step_s)
    )
    return f"{format_amount(rate)} tokens/s{mfu}, {summary.mean_of_last('step_s'):.2f} s per step{plan_note}"
