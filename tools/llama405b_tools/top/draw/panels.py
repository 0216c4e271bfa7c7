"""Draw cluster-top's screen: a view in, lines of rich text out. Pure.

The first lines show the verdict, what runs where, its progress, and what to do next. Lines that are too long lose their least
important parts. Deviations have a color and a sign.
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.text import Text

from llama405b.contract.errors import fmt_if, pluralize
from llama405b_tools.text.figures import (
    DASH,
    WIDE_COLUMNS,
    fmt_or_dash,
    format_amount,
    format_clock,
    format_duration,
    format_stopwatch,
    hour_unit,
)
from llama405b_tools.text.words import mask_controls
from llama405b_tools.top.draw import hosts
from llama405b_tools.top.draw.charts import (
    GAP_COLUMNS,
    ODD_STYLE,
    STALE_STYLE,
    TimeAxis,
    draw_heading,
    fit_height,
    fit_width,
    gauge,
    side_by_side,
)
from llama405b_tools.top.draw.detail import (
    MIN_GRAPH_LINES,
    Graphs,
    draw_gpus,
    draw_host,
    draw_rank,
    draw_ranks,
    selected_rank,
    time_axes,
)
from llama405b_tools.top.draw.hosts import HostGrid, no_host_text, selected_row, shown_hosts
from llama405b_tools.top.draw.ui import (
    FOOTERS,
    SORTS,
    VIEWS,
    LogLine,
    Ui,
    draw_event,
    draw_events_pane,
    draw_log_pane,
    filter_lines,
    wrap_line,
)
from llama405b_tools.top.state.picture import (
    NETWORK,
    OVER_PHASES,
    ClusterVerdict,
    ClusterView,
    GuardShown,
    HostRow,
    RunPhase,
    TrainingStatus,
    available_quantities,
    not_none,
)
from llama405b_tools.top.state.trends import WINDOW_WORDS, Trends

StatusPart = tuple[int, Text]  # priority: the part with the highest number is omitted first
VERDICTS = {
    ClusterVerdict.HEALTHY: ("●", "ok"),
    **dict.fromkeys((ClusterVerdict.DEGRADED, ClusterVerdict.RESTARTING), ("▲", "warn")),
    ClusterVerdict.CONNECTING: ("…", "warn"),
    **dict.fromkeys((ClusterVerdict.TRAINING, ClusterVerdict.RUNNING), ("●", "busy")),
    **dict.fromkeys(
        (ClusterVerdict.STARTING, ClusterVerdict.LOADING, ClusterVerdict.SAVING, ClusterVerdict.EVALUATING),
        ("◐", "busy"),
    ),
    **dict.fromkeys((ClusterVerdict.DONE, ClusterVerdict.STOPPED, ClusterVerdict.NO_RUN), ("■", "over")),
}
PHASE_STYLES = {RunPhase.HUNG: "bad", RunPhase.FAILED: "bad"}
MIN_BAR_WIDTH = 10  # least columns of the progress bar


def draw_headline(
    pic: ClusterView, width: int, max_lines: int | None = None, *, ago_s: float | None = None
) -> list[Text]:
    """Return the first lines: verdict, what runs where, progress, and what to do.

    ``max_lines``: of the verdict, as bars as wide as the screen; None: it is text to be printed. ``ago_s``: of a picture of
    the past, how old it is; it has a bar that says so, and its verdict is none.
    """
    sign, name = VERDICTS.get(pic.verdict, ("✖", "bad"))
    indent = "" if max_lines is None else " "
    words = f"{indent}{sign} {'' if ago_s is None else 'was '}{pic.verdict}  {pic.why}".rstrip()
    verdict_lines = _wrap(words, width, indent, max_lines)
    place, run = _place_line(pic, width - len(indent), clock=bool(indent)), pic.training
    progress = _progress_line(run, width - len(indent), bars=bool(indent)) if run else _no_run_text(pic)
    style = f"bar.{name}" if ago_s is None else STALE_STYLE
    lines = [Text(line.ljust(width if indent else 0), style) for line in verdict_lines]
    if ago_s is not None:
        lines.insert(
            0,
            Text(
                f"{indent}◀ THE PAST: {format_stopwatch(ago_s)} ago, at {format_clock(pic.time)}".ljust(width),
                "bar.past",
            ),
        )
    lines += [Text(indent).append_text(line) for line in (place, progress)]
    if pic.advice:
        advice = _wrap(f"{indent}→ {'' if ago_s is None else 'then: '}{pic.advice}", width, indent, max_lines)
        lines += [Text(line, "strong" if ago_s is None else STALE_STYLE) for line in advice]
    return lines


def _wrap(words: str, width: int, indent: str, max_lines: int | None) -> list[str]:
    return textwrap.wrap(
        words,
        max(width, 8),
        subsequent_indent=f"{indent}  ",
        max_lines=max_lines,
        placeholder=" …",
        drop_whitespace=False,
    )


def _place_line(pic: ClusterView, width: int, *, clock: bool) -> Text:
    run = pic.training
    ages = not_none(row.age_s for row in pic.hosts)
    first = Text()
    parts = [
        (0, _alarm(f"hosts {pic.fresh}/{len(pic.hosts)}", when=pic.fresh < len(pic.hosts))),
        (0, _alarm(_gpu_count(pic), when=pic.gpus_seen < pic.gpus_expected)),
    ]
    if pic.badge:
        first.append(f" {pic.badge} ", "bar.warn").append(" ")
    if run:
        first.append(f"{run.run} ", "strong")
        first.append(run.phase, PHASE_STYLES.get(run.phase, "strong"))
        first.append(f" {format_duration(run.phase_s)}")
        parts += _status_parts(run, pic, width)
    else:
        first.append("no run" if pic.fresh else f"run {DASH}", "strong")
    parts.append((4, Text(f"sampled {format_duration(max(ages, default=None))}")))
    clock_text = f" {format_clock(pic.time)}" if clock and width > WIDE_COLUMNS else ""
    line = _join_parts(first, parts, width - len(clock_text))
    return (
        line.append(" " * (width - len(clock_text) - line.cell_len)).append(clock_text, STALE_STYLE)
        if clock_text
        else line
    )


def _gpu_count(pic: ClusterView) -> str:
    if pic.gpus_expected:
        return f"GPU {pic.gpus_seen}/{pic.gpus_expected}"
    if any(row.has_gpu is False for row in pic.hosts):
        return "no GPU"
    return f"GPU {DASH}"


def _status_parts(run: TrainingStatus, pic: ClusterView, width: int) -> Iterator[StatusPart]:
    """Yield the parts of the status line after the run's phase."""
    yield 2, _alarm(f"net {run.network or DASH}", when=run.network == "SOCKET")
    yield 1, _mark_odd(_risk_text(run, pic, short=width < WIDE_COLUMNS), run, "checkpoint_step")
    if run.attempt > 1:
        yield 3, Text(pluralize(run.attempt - 1, "restart"), "warn")
    if run.age_s is not None:
        yield 3, Text(f"since {format_duration(run.age_s)}")
    if run.goodput_pct is not None:
        yield 3, Text(f"goodput {run.goodput_pct:.1f}%")
    if run.others:
        yield 1, Text(f"{len(run.others)} more live: {', '.join(run.others)}", "warn")
    if run.guard:
        yield 2, _alarm(f"guard {run.guard}", when=run.guard is GuardShown.GONE)


def _alarm(words: str, *, when: bool) -> Text:
    """Return the text, red if ``when``."""
    return Text(words, "bad" if when else "")


def _risk_text(run: TrainingStatus, pic: ClusterView, *, short: bool) -> str:
    if run.lost_steps is None:
        return "ckpt none yet" if run.checkpoint_step is None else f"ckpt step {run.checkpoint_step}"
    steps = pluralize(run.lost_steps, "step")
    outcome = "lost" if run.phase in OVER_PHASES and run.lost_steps else "at risk"
    if short:
        return f"{steps} {outcome}"
    if run.lost_rank_hours is not None:
        steps += f", {run.lost_rank_hours:.1f} {hour_unit(pic.gpus_expected > 0)}"
    checkpoint = "none" if run.checkpoint_step is None else run.checkpoint_step
    copied_text = "" if run.copied_step is None else f", copied {run.copied_step or 'none'}"
    return f"ckpt {checkpoint}{copied_text}: {steps} {outcome}"


def _no_run_text(pic: ClusterView) -> Text:
    if not pic.fresh:
        return Text("no host has reported yet, so it is unknown whether a run is live", STALE_STYLE)
    directory = pic.workdirs[0] if len(pic.workdirs) == 1 else "their working directories"
    return Text(f"no run in {directory} on these hosts; `llama405b launch` starts one", STALE_STYLE)


def _progress_line(run: TrainingStatus, width: int, *, bars: bool) -> Text:
    """Draw the progress and speed of the run; the bar takes the remaining room."""
    if run.phase is RunPhase.LOADING and run.total_bytes:
        done_bytes, total = run.done_bytes or 0, run.total_bytes
        words = f"loading {done_bytes / 1e9:,.1f} of {total / 1e9:,.1f} GB "
        return _with_bar(
            Text(words), done_bytes / total, [(0, Text(f"ETA {format_duration(run.eta_s)}"))], width, bars=bars
        )
    if run.step is None:
        return Text("no step yet", STALE_STYLE)
    first = _mark_odd(f"step {run.step}{fmt_if('/{} ', run.steps)}", run, "step")
    first.append_text(Text("" if run.steps else "  "))
    plan = f" (plan {run.expected_step_s:.1f})" if run.expected_step_s else ""
    parts = [
        (1, _mark_odd(f"loss {fmt_or_dash(run.loss, '.4f')}", run, "loss")),
        (
            0,
            _mark_odd(f"{fmt_or_dash(run.step_s, '.2f')} s/step", run, "step_s").append(
                plan if width >= WIDE_COLUMNS else ""
            ),
        ),
        (0, Text(f"{format_amount(run.all_tokens_per_s)} tok/s")),
        (2, Text(f"MFU {fmt_or_dash(run.mfu_pct and run.mfu_pct / 100, '.0%')}")),
        (0, Text(f"ETA {format_duration(run.eta_s)}")),
        (3, Text(_evaluation_text(run))),
        (4, Text(_update_text(run))),
    ]
    line = _with_bar(
        first, run.step / run.steps if run.steps else None, [p for p in parts if p[1].plain], width, bars=bars
    )
    if run.is_stale:
        line.stylize_before(STALE_STYLE)
    return line


def _with_bar(first: Text, share: float | None, parts: Sequence[StatusPart], width: int, *, bars: bool) -> Text:
    """Join parts, with a bar in the remaining room after the first."""
    if share is None:
        return _join_parts(first, parts, width, "  ")
    percent = f" {100 * share:.0f}%"
    line = _join_parts(Text(), parts, width - first.cell_len - len(percent) - MIN_BAR_WIDTH - 1, "  ")
    room = width - first.cell_len - len(percent) - line.cell_len - 1
    if room < MIN_BAR_WIDTH or not bars:
        return first.append(percent.strip()).append_text(line)
    return first.append(gauge(share, room), "chart").append(percent).append_text(line)


def _evaluation_text(run: TrainingStatus) -> str:
    if run.evaluated_step is None:
        return ""
    return f"eval {fmt_or_dash(run.evaluation_loss, '.4f')} @{run.evaluated_step}"


def _update_text(run: TrainingStatus) -> str:
    """Describe CPU optimizer updates: their time, memory bandwidth, and traffic between host and device."""
    if run.update_s is None:
        return ""
    words = f"update {fmt_or_dash(run.update_s, '.2f')} of which waited {fmt_or_dash(run.exposed_s, '.2f')}"
    if not run.update_s or run.update_bytes is None:
        return words
    traffic = f"{format_amount(run.down_bytes)}B down {format_amount(run.up_bytes)}B up"
    return f"{words}  host memory {format_amount(run.update_bytes / run.update_s)}B/s  {traffic}"


def _mark_odd(words: str, run: TrainingStatus, field: str) -> Text:
    """Return the text of a field, marked if the field is unusual."""
    return Text().append(words, ODD_STYLE if field in run.odd_in else "")


def _join_parts(first: Text, parts: Sequence[StatusPart], width: int, separator: str = " │ ") -> Text:
    """Join as many parts as fit, omitting those with the highest number first."""
    shown = list(parts)
    while shown and first.cell_len + sum(len(separator) + part.cell_len for _, part in shown) > width:
        shown.remove(max(shown, key=lambda entry: entry[0]))
    line = first.copy()
    for _, part in shown:
        line.append(separator, STALE_STYLE)
        line.append_text(part)
    return line


VERDICT_LINES = 2  # on a screen
BROAD_COLUMNS = 160  # columns from which graphs are drawn next to the hosts
MIN_MAP_LINES = 6  # lines of a heat map, including its heading and axis
HOSTS_SHARE = 0.6  # share of the columns for the hosts


class RenderContext(NamedTuple):
    """Everything that is drawn: the view, the user's choices, and what derives from them."""

    view: ClusterView
    trends: Trends
    ui: Ui
    logs: Sequence[LogLine]
    axes: tuple[TimeAxis, TimeAxis]  # of the steps, and of the samples
    rows: Sequence[HostRow]  # the hosts to show, in order
    selected: HostRow | None

    @property
    def graphs(self) -> Graphs:
        """The graphs of this view."""
        return Graphs(self.view, self.trends, self.ui.window, *self.axes)

    @property
    def grid(self) -> HostGrid:
        """What the hosts are drawn with."""
        focused = self.ui.mode != "all" or self.ui.pane == "hosts"
        return HostGrid(self.view, self.ui, self.trends, self.axes[1], shown_quantity(self.view, self.ui), focused)

    def draw_heat_map(self, width: int, height: int, quantity: int | None = None) -> list[Text]:
        """Draw a quantity (by default the chosen one) of every GPU over time."""
        index = shown_quantity(self.view, self.ui) if quantity is None else quantity
        return hosts.draw_heat_map(self.view.hosts, self.trends, index, self.ui.window, self.axes[1], width, height)

    @property
    def chosen_logs(self) -> list[LogLine]:
        """The log lines that pass the user's filters."""
        row = self.selected
        rank = selected_rank(row, self.ui) if row else None
        return filter_lines(self.logs, self.ui.log, row.name if row else "", rank.rank if rank else None)

    def draw_events(self, room: int, width: int, *, wraps: bool = False) -> list[Text]:
        """Draw the newest events."""
        wraps |= self.ui.wraps_events
        return draw_events_pane(
            self.view.events, self.ui.last_event, room, width, wraps=wraps, focused=self.ui.reads_events
        )

    def draw_log(self, room: int, width: int) -> list[Text]:
        """Draw the newest log lines."""
        return draw_log_pane(self.chosen_logs, self.ui.log, room, width, focused=self.ui.reads_log)


def shown_quantity(pic: ClusterView, ui: Ui) -> int:
    """Return the chosen quantity, or the first with data if it has none."""
    known_quantities = available_quantities(pic.hosts)
    return ui.quantity if ui.quantity in known_quantities or not known_quantities else known_quantities[0]


def render_context(pic: ClusterView, trends: Trends, ui: Ui, logs: Sequence[LogLine]) -> RenderContext:
    """Return the context for drawing this view."""
    rows = shown_hosts(pic, ui)
    steps, sampled = time_axes(trends, ui.window, pic.time)
    if ui.is_past:
        steps, sampled = steps._replace(end_name="then"), sampled._replace(end_name="then")
    return RenderContext(pic, trends, ui, logs, (steps, sampled), rows, selected_row(rows, ui, pic.about))


def draw_screen(context: RenderContext, width: int, height: int) -> list[Text]:
    """Draw exactly ``height`` lines of ``width`` columns; a past view has an edge on the left."""
    pic, ui = context.view, context.ui
    ago_s = max(0.0, ui.history_span[1] - pic.time) if ui.is_past else None
    edge = Text("│", "bar.past") if ui.is_past else Text()
    inner_width = max(1, width - edge.cell_len)
    top = draw_headline(pic, inner_width, VERDICT_LINES, ago_s=ago_s)
    room = height - len(top) - 1
    body = fit_height(_draw_body(context, inner_width, room), max(0, room))
    screen_lines = [*top, *body][: height - 1] if height > 1 else []
    screen_lines += [Text() for _ in range(height - 1 - len(screen_lines))]
    if ui.is_past:
        screen_lines = [Text().append_text(edge).append_text(line) for line in screen_lines]
    screen_lines.append(_draw_footer(ui, width))
    for line in screen_lines:
        line.plain = mask_controls(line.plain)
        fit_width(line, width)
    return screen_lines


def _draw_body(context: RenderContext, width: int, room: int) -> list[Text]:
    ui = context.ui
    if ui.mode == "text":
        return [draw_heading(ui.title, width), *map(Text, wrap_text(ui, width)[ui.scroll : ui.scroll + room - 1])]
    if ui.mode in ("host", "rank"):
        return draw_opened(context, width, room)[ui.scroll :]
    return DRAW_VIEW[ui.mode](context, width, room)


def draw_opened(context: RenderContext, width: int, room: int) -> list[Text]:
    """Draw the opened host or rank."""
    if context.selected is None:
        return [Text("no host", "old")]
    rank = selected_rank(context.selected, context.ui)
    if context.ui.mode == "rank" and rank:
        mesh = context.view.training.mesh if context.view.training else None
        return draw_rank(
            context.selected, rank, mesh, context.chosen_logs, context.trends, context.axes[1], context.ui, width, room
        )
    return draw_host(context.selected, context.ui, context.chosen_logs, width, room)


def shown_logs(context: RenderContext, height: int) -> list[LogLine]:
    """Return the log lines that a screen of this height may show."""
    lines = [
        line
        for line in context.chosen_logs
        if context.ui.log.last_number is None or line.number <= context.ui.log.last_number
    ]
    return lines[-height:]


def wrap_text(ui: Ui, width: int) -> list[str]:
    """Return the lines of the shown text, wrapped to this width."""
    return [part for line in ui.lines for part in wrap_line(line, width)]


def draw_listing(pic: ClusterView, ui: Ui, width: int) -> list[Text]:
    """Draw everything without a height limit: all hosts, their notes, and the events."""
    rows = shown_hosts(pic, ui)
    if not rows:
        return [*draw_headline(pic, width), Text(no_host_text(ui))]
    grid = HostGrid(pic, ui, Trends(), TimeAxis(pic.time - 1, pic.time), shown_quantity(pic, ui), is_text=True)
    lines = [*draw_headline(pic, width), *hosts.draw_hosts(grid, rows, width, len(rows) + 1)]
    for row in rows:
        if row.why:
            lines.append(Text(f"! {row.name}: {row.state} {row.why}"))
        lines += [Text(f"! {row.name}: {note}") for note in row.notes]
    lines += [draw_event(event) for event in pic.events]
    for line in lines:
        line.plain = mask_controls(line.plain)
        line.rstrip()
    return lines


def _draw_hosts(context: RenderContext, width: int, room: int) -> list[Text]:
    if not context.rows:
        return [Text(f"{no_host_text(context.ui)}; Esc shows all", "old")]
    return hosts.draw_hosts(context.grid, context.rows, width, room)


def _draw_all(context: RenderContext, width: int, room: int) -> list[Text]:
    """Draw the overview, as much as the size has room for."""
    if width >= BROAD_COLUMNS:
        left_width = max(WIDE_COLUMNS, int(HOSTS_SHARE * width))
        return side_by_side(
            [
                (_draw_main(context, left_width, room), left_width),
                (context.graphs.draw_column(width - left_width - GAP_COLUMNS, room), width - left_width - GAP_COLUMNS),
            ]
        )
    if width >= WIDE_COLUMNS:
        return _draw_medium(context, width, room)
    return _draw_small(context, width, room)


def _draw_main(context: RenderContext, width: int, room: int) -> list[Text]:
    """Draw hosts, the selected host, the heat map, events and log, stacked."""
    n_log = min(len(context.chosen_logs) + 1, max(4, room // 4))
    n_events = min(len(context.view.events) + 1, max(3, room // 6))
    lines = _draw_hosts(context, width, room - n_events - n_log - 1)
    tail = [*context.draw_events(n_events, width), *context.draw_log(n_log, width)]
    spare = room - len(lines) - len(tail)
    lines += (extra := _draw_selected_and_map(context, width, spare))
    spare -= len(extra)
    if spare > 0:
        tail = [*context.draw_events(n_events + spare // 3, width), *context.draw_log(n_log + spare, width)]
    return [*lines, *fit_height(tail, room - len(lines))]


def _draw_selected_and_map(context: RenderContext, width: int, room: int) -> list[Text]:
    """Draw the selected host's GPUs and the heat map, as far as there is room."""
    lines = draw_gpus(context.selected, width) if context.selected else []
    if len(lines) > room:
        lines = []
    n_units, spare = sum(n for _, n in context.trends.layout), room - len(lines)
    if n_units and spare >= MIN_MAP_LINES:
        lines += context.draw_heat_map(width, min(spare, n_units + 2))
    return lines


def _draw_medium(context: RenderContext, width: int, room: int) -> list[Text]:
    """Draw three graphs side by side, hosts, the selected host, then events next to the log."""
    half_width = (width - GAP_COLUMNS) // 2
    n_tail = min(max(len(context.view.events), len(context.chosen_logs)) + 1, max(3, room // 5))
    n_graph = 7 if room >= 24 and context.graphs.available_graphs() else 0
    lines = _draw_hosts(context, width, max(4, room - n_graph - n_tail))
    spare = room - len(lines) - n_graph - n_tail
    lines += (extra := _draw_selected_and_map(context, width, spare))
    spare -= len(extra)
    if n_graph and spare > 0:
        extra_lines = min(spare, 3)
        n_graph, spare = n_graph + extra_lines, spare - extra_lines
    n_tail += max(0, spare)
    tail = side_by_side(
        [
            (context.draw_events(n_tail, half_width), half_width),
            (context.draw_log(n_tail, width - half_width - GAP_COLUMNS), width - half_width - GAP_COLUMNS),
        ]
    )
    return [
        *(context.graphs.draw_row(context.graphs.available_graphs()[:3], width, n_graph) if n_graph else ()),
        *lines,
        *tail,
    ]


def _draw_small(context: RenderContext, width: int, room: int) -> list[Text]:
    """Draw one graph if there is room, the hosts, the newest events, and the log if room remains."""
    n_events = min(len(context.view.events), 2) + 1
    lines = _draw_hosts(context, width, max(3, room - n_events - 1))
    spare = room - len(lines) - n_events
    graph = context.graphs.draw_main(width, min(spare, 7)) if spare >= 5 else []
    spare -= len(graph)
    extra_events = min(max(0, spare), len(context.view.events) + 1 - n_events)
    return [
        *graph,
        *lines,
        *context.draw_events(n_events + extra_events, width),
        *context.draw_log(max(0, spare - extra_events), width),
    ]


def _draw_gpus_view(context: RenderContext, width: int, room: int) -> list[Text]:
    """Draw every GPU now, and over time."""
    lines = _draw_hosts(context, width, max(4, room // 2))
    lines += context.draw_heat_map(width, max(5, room - len(lines)))
    spare = room - len(lines)
    return [
        *lines,
        *(
            context.graphs.draw_row(context.graphs.hardware_graphs()[:3], width, spare)
            if spare >= MIN_GRAPH_LINES
            else ()
        ),
    ]


def _draw_network_view(context: RenderContext, width: int, room: int) -> list[Text]:
    """Draw every host's traffic, now and over time, and notes about its ports."""
    lines = context.graphs.draw_network(width, max(6, room // 4))
    lines += context.draw_heat_map(width, min(room // 2, len(context.trends.layout) + 2), NETWORK)
    lines.append(draw_heading("HOSTS: RDMA and the busiest interface, both directions, in Gb/s", width))
    return [*lines, *(hosts.draw_network_line(row, is_selected=row is context.selected) for row in context.rows)]


def _align_bottom(pane: Sequence[Text], room: int) -> list[Text]:
    """Align the lines below a heading to the bottom, so that they do not move if the verdict grows a line."""
    return [*pane[:1], *(Text() for _ in range(room - len(pane))), *pane[1:]]


DRAW_VIEW: dict[str, Callable[[RenderContext, int, int], list[Text]]] = {
    "all": _draw_all,
    "gpus": _draw_gpus_view,
    "ranks": lambda of, width, room: draw_ranks(of.view, of.rows, of.ui, width, room),
    "network": _draw_network_view,
    "log": lambda of, width, room: _align_bottom(of.draw_log(room, width), room),
    "events": lambda of, width, room: _align_bottom(of.draw_events(room, width, wraps=True), room),
}


def _draw_footer(ui: Ui, width: int) -> Text:
    if ui.pending_key:
        return Text(f" {ui.question}? y yes, any other key no".ljust(width), "bar.warn")
    if ui.typing:
        text = ui.filter if ui.typing == "filter" else ui.log.search
        return Text(f"/{text}█  Enter keeps it, Esc ends it", "strong")
    kind = "view" if width >= len(FOOTERS["view"]) else "narrow"
    if ui.reads_log:
        kind = "log"
    elif ui.reads_events and ui.mode == "all":
        kind = "events"
    elif ui.is_running:
        kind = "command"
    elif ui.mode not in VIEWS[:1]:
        kind = "opened"
    states = {
        f"{ui.hint}": bool(ui.hint), "the past: → goes on, Esc or End now": ui.is_past,
        "PAUSED: Space goes on": ui.is_paused, f"filter {ui.filter!r}": bool(ui.filter),
        "odd ones only": ui.odd_only, f"by {ui.sort}": ui.sort != SORTS[0], WINDOW_WORDS[ui.window]: ui.window > 0,
    }  # fmt: skip
    states_text = fmt_if("[{}] ", ", ".join(words for words, is_on in states.items() if is_on))
    return Text(f" {states_text}{FOOTERS[kind]}".ljust(width), "bar.past" if ui.is_past else "keys")
