"""Draw cluster-top's screen: a view in, lines of rich text out. Pure.

The first lines show the verdict, what runs where, its progress, and what to do next. Lines that are too long lose their least
important parts. Deviations have a color and a sign.
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.text import Text

from llama405b.contract.errors import counted, given
from llama405b_tools.text.figures import DASH, WIDE, amount, local_time, number, span, stopwatch
from llama405b_tools.text.words import printable
from llama405b_tools.top.draw import hosts
from llama405b_tools.top.draw.charts import GAP, ODD, OLD, Axis, beside, fitted, gauge, rule, tall
from llama405b_tools.top.draw.detail import (
    LEAST,
    Graphs,
    axes_of,
    detail,
    gpu_lines,
    rank_page,
    rank_table,
    selected_rank,
)
from llama405b_tools.top.draw.hosts import Grid, none_shown, ordered, selected_row
from llama405b_tools.top.draw.ui import (
    BACK_KEYS,
    COMMAND_KEYS,
    EVENT_KEYS,
    KEYS,
    LOG_KEYS,
    SHORT_KEYS,
    SORTS,
    VIEWS,
    LogLine,
    Ui,
    chosen_lines,
    event_line,
    events_pane,
    log_pane,
    wrapped,
)
from llama405b_tools.top.state.picture import (
    NETWORK,
    OVER,
    GuardShown,
    HostRow,
    Picture,
    RunPhase,
    TrainingStatus,
    Verdict,
    available,
    known,
)
from llama405b_tools.top.state.trends import WINDOW_WORDS, Trends

Part = tuple[int, Text]  # priority: the part with the highest number is omitted first
VERDICTS = {
    Verdict.HEALTHY: ("●", "ok"),
    **dict.fromkeys((Verdict.DEGRADED, Verdict.RESTARTING), ("▲", "warn")),
    Verdict.CONNECTING: ("…", "warn"),
    **dict.fromkeys((Verdict.TRAINING, Verdict.RUNNING), ("●", "busy")),
    **dict.fromkeys((Verdict.STARTING, Verdict.LOADING, Verdict.SAVING, Verdict.EVALUATING), ("◐", "busy")),
    **dict.fromkeys((Verdict.DONE, Verdict.STOPPED, Verdict.NO_RUN), ("■", "over")),
}
PHASE_STYLES = {RunPhase.HUNG: "bad", RunPhase.FAILED: "bad"}
BAR = 10  # least columns of the progress bar


def headline(pic: Picture, width: int, max_lines: int | None = None, *, ago_s: float | None = None) -> list[Text]:
    """Return the first lines: verdict, what runs where, progress, and what to do.

    ``max_lines``: of the verdict, as bars as wide as the screen; None: it is text to be printed. ``ago_s``: of a picture of
    the past, how old it is; it has a bar that says so, and its verdict is none.
    """
    sign, name = VERDICTS.get(pic.verdict, ("✖", "bad"))
    indent = "" if max_lines is None else " "
    words = f"{indent}{sign} {'' if ago_s is None else 'was '}{pic.verdict}  {pic.why}".rstrip()
    wrapped = _wrapped(words, width, indent, max_lines)
    where, run = _runs_where(pic, width - len(indent), clock=bool(indent)), pic.training
    progress = _progress(run, width - len(indent), bars=bool(indent)) if run else _no_run(pic)
    style = f"bar.{name}" if ago_s is None else OLD
    lines = [Text(line.ljust(width if indent else 0), style) for line in wrapped]
    if ago_s is not None:
        lines.insert(
            0, Text(f"{indent}◀ THE PAST: {stopwatch(ago_s)} ago, at {local_time(pic.time)}".ljust(width), "bar.past")
        )
    lines += [Text(indent).append_text(line) for line in (where, progress)]
    if pic.advice:
        advice = _wrapped(f"{indent}→ {'' if ago_s is None else 'then: '}{pic.advice}", width, indent, max_lines)
        lines += [Text(line, "strong" if ago_s is None else OLD) for line in advice]
    return lines


def _wrapped(words: str, width: int, indent: str, max_lines: int | None) -> list[str]:
    return textwrap.wrap(
        words,
        max(width, 8),
        subsequent_indent=f"{indent}  ",
        max_lines=max_lines,
        placeholder=" …",
        drop_whitespace=False,
    )


def _runs_where(pic: Picture, width: int, *, clock: bool) -> Text:
    run = pic.training
    ages = known(row.age_s for row in pic.hosts)
    first = Text()
    parts = [
        (0, _alarm(f"hosts {pic.fresh}/{len(pic.hosts)}", when=pic.fresh < len(pic.hosts))),
        (0, _alarm(_gpus_seen(pic), when=pic.gpus_seen < pic.gpus_expected)),
    ]
    if pic.badge:
        first.append(f" {pic.badge} ", "bar.warn").append(" ")
    if run:
        first.append(f"{run.run} ", "strong")
        first.append(run.phase, PHASE_STYLES.get(run.phase, "strong"))
        first.append(f" {span(run.phase_s)}")
        parts += _parts(run, pic, width)
    else:
        first.append("no run" if pic.fresh else f"run {DASH}", "strong")
    parts.append((4, Text(f"sampled {span(max(ages, default=None))}")))
    now = f" {local_time(pic.time)}" if clock and width > WIDE else ""
    line = _joined(first, parts, width - len(now))
    return line.append(" " * (width - len(now) - line.cell_len)).append(now, OLD) if now else line


def _gpus_seen(pic: Picture) -> str:
    if pic.gpus_expected:
        return f"GPU {pic.gpus_seen}/{pic.gpus_expected}"
    if any(row.has_gpu is False for row in pic.hosts):
        return "no GPU"
    return f"GPU {DASH}"


def _parts(run: TrainingStatus, pic: Picture, width: int) -> Iterator[Part]:
    """Yield the parts of the status line after the run's phase."""
    yield 2, _alarm(f"net {run.network or DASH}", when=run.network == "SOCKET")
    yield 1, _marked(_risk(run, pic, short=width < WIDE), run, "checkpoint_step")
    if run.attempt > 1:
        yield 3, Text(counted(run.attempt - 1, "restart"), "warn")
    if run.age_s is not None:
        yield 3, Text(f"since {span(run.age_s)}")
    if run.goodput_pct is not None:
        yield 3, Text(f"goodput {run.goodput_pct:.1f}%")
    if run.others:
        yield 1, Text(f"{len(run.others)} more live: {', '.join(run.others)}", "warn")
    if run.guard:
        yield 2, _alarm(f"guard {run.guard}", when=run.guard is GuardShown.GONE)


def _alarm(words: str, *, when: bool) -> Text:
    """Return the text, red if ``when``."""
    return Text(words, "bad" if when else "")


def _risk(run: TrainingStatus, pic: Picture, *, short: bool) -> str:
    if run.lost_steps is None:
        return "ckpt none yet" if run.checkpoint_step is None else f"ckpt step {run.checkpoint_step}"
    steps = counted(run.lost_steps, "step")
    what = "lost" if run.phase in OVER and run.lost_steps else "at risk"
    if short:
        return f"{steps} {what}"
    if run.lost_rank_hours is not None:
        unit = "GPU-h" if pic.gpus_expected else "rank-h"
        steps += f", {run.lost_rank_hours:.1f} {unit}"
    where = "none" if run.checkpoint_step is None else run.checkpoint_step
    copied = "" if run.copied_step is None else f", copied {run.copied_step or 'none'}"
    return f"ckpt {where}{copied}: {steps} {what}"


def _no_run(pic: Picture) -> Text:
    if not pic.fresh:
        return Text("no host has reported yet, so it is unknown whether a run is live", OLD)
    where = pic.workdirs[0] if len(pic.workdirs) == 1 else "their working directories"
    return Text(f"no run in {where} on these hosts; `llama405b launch` starts one", OLD)


def _progress(run: TrainingStatus, width: int, *, bars: bool) -> Text:
    """Draw the progress and speed of the run; the bar takes the remaining room."""
    if run.phase is RunPhase.LOADING and run.total_bytes:
        done_bytes, total = run.done_bytes or 0, run.total_bytes
        words = f"loading {done_bytes / 1e9:,.1f} of {total / 1e9:,.1f} GB "
        return _with_bar(Text(words), done_bytes / total, [(0, Text(f"ETA {span(run.eta_s)}"))], width, bars=bars)
    if run.step is None:
        return Text("no step yet", OLD)
    first = _marked(f"step {run.step}{given('/{} ', run.steps)}", run, "step")
    first.append_text(Text("" if run.steps else "  "))
    plan = f" (plan {run.expected_step_s:.1f})" if run.expected_step_s else ""
    parts = [
        (1, _marked(f"loss {number(run.loss, '.4f')}", run, "loss")),
        (0, _marked(f"{number(run.step_s, '.2f')} s/step", run, "step_s").append(plan if width >= WIDE else "")),
        (0, Text(f"{amount(run.all_tokens_per_s)} tok/s")),
        (2, Text(f"MFU {number(run.mfu_pct and run.mfu_pct / 100, '.0%')}")),
        (0, Text(f"ETA {span(run.eta_s)}")),
        (3, Text(_evaluated(run))),
        (4, Text(_moved(run))),
    ]
    line = _with_bar(
        first, run.step / run.steps if run.steps else None, [p for p in parts if p[1].plain], width, bars=bars
    )
    if run.is_stale:
        line.stylize_before(OLD)
    return line


def _with_bar(first: Text, share: float | None, parts: Sequence[Part], width: int, *, bars: bool) -> Text:
    """Join parts, with a bar in the remaining room after the first."""
    if share is None:
        return _joined(first, parts, width, "  ")
    percent = f" {100 * share:.0f}%"
    line = _joined(Text(), parts, width - first.cell_len - len(percent) - BAR - 1, "  ")
    room = width - first.cell_len - len(percent) - line.cell_len - 1
    if room < BAR or not bars:
        return first.append(percent.strip()).append_text(line)
    return first.append(gauge(share, room), "chart").append(percent).append_text(line)


def _evaluated(run: TrainingStatus) -> str:
    if run.evaluated_step is None:
        return ""
    return f"eval {number(run.evaluation_loss, '.4f')} @{run.evaluated_step}"


def _moved(run: TrainingStatus) -> str:
    """Describe CPU optimizer updates: their time, memory bandwidth, and traffic between host and device."""
    if run.update_s is None:
        return ""
    words = f"update {number(run.update_s, '.2f')} of which waited {number(run.exposed_s, '.2f')}"
    if not run.update_s or run.update_bytes is None:
        return words
    crossed = f"{amount(run.down_bytes)}B down {amount(run.up_bytes)}B up"
    return f"{words}  host memory {amount(run.update_bytes / run.update_s)}B/s  {crossed}"


def _marked(words: str, run: TrainingStatus, field: str) -> Text:
    """Return the text of a field, marked if the field is unusual."""
    return Text().append(words, ODD if field in run.odd_in else "")


def _joined(first: Text, parts: Sequence[Part], width: int, between: str = " │ ") -> Text:
    """Join as many parts as fit, omitting those with the highest number first."""
    kept = list(parts)
    while kept and first.cell_len + sum(len(between) + part.cell_len for _, part in kept) > width:
        kept.remove(max(kept, key=lambda entry: entry[0]))
    line = first.copy()
    for _, part in kept:
        line.append(between, OLD)
        line.append_text(part)
    return line


VERDICT_LINES = 2  # on a screen
BROAD = 160  # columns from which graphs are drawn next to the hosts
LEAST_MAP = 6  # lines of a heat map, including its heading and axis
LEFT = 0.6  # share of the columns for the hosts


class Scene(NamedTuple):
    """Everything that is drawn: the view, the user's choices, and what derives from them."""

    pic: Picture
    trends: Trends
    ui: Ui
    logs: Sequence[LogLine]
    axes: tuple[Axis, Axis]  # of the steps, and of the samples
    rows: Sequence[HostRow]  # the hosts to show, in order
    selected: HostRow | None

    @property
    def graphs(self) -> Graphs:
        """The graphs of this view."""
        return Graphs(self.pic, self.trends, self.ui.window, *self.axes)

    @property
    def grid(self) -> Grid:
        """What the hosts are drawn with."""
        focused = self.ui.mode != "all" or self.ui.pane == "hosts"
        return Grid(self.pic, self.ui, self.trends, self.axes[1], quantity_of(self.pic, self.ui), focused)

    def heat_map(self, width: int, height: int, quantity: int | None = None) -> list[Text]:
        """Draw a quantity (by default the chosen one) of every GPU over time."""
        which = quantity_of(self.pic, self.ui) if quantity is None else quantity
        return hosts.heat_map(self.pic.hosts, self.trends, which, self.ui.window, self.axes[1], width, height)

    @property
    def chosen_logs(self) -> list[LogLine]:
        """The log lines that pass the user's filters."""
        row = self.selected
        rank = selected_rank(row, self.ui) if row else None
        return chosen_lines(self.logs, self.ui.log, row.name if row else "", rank.rank if rank else None)

    def events(self, room: int, width: int, *, wraps: bool = False) -> list[Text]:
        """Draw the newest events."""
        wraps |= self.ui.wraps_events
        return events_pane(self.pic.events, self.ui.events_at, room, width, wraps=wraps, focused=self.ui.reads_events)

    def log(self, room: int, width: int) -> list[Text]:
        """Draw the newest log lines."""
        return log_pane(self.chosen_logs, self.ui.log, room, width, focused=self.ui.reads_log)


def quantity_of(pic: Picture, ui: Ui) -> int:
    """Return the chosen quantity, or the first with data if it has none."""
    there = available(pic.hosts)
    return ui.quantity if ui.quantity in there or not there else there[0]


def scene(pic: Picture, trends: Trends, ui: Ui, logs: Sequence[LogLine]) -> Scene:
    """Return the context for drawing this view."""
    rows = ordered(pic, ui)
    steps, seen = axes_of(trends, ui.window, pic.time)
    if ui.is_past:
        steps, seen = steps._replace(end_name="then"), seen._replace(end_name="then")
    return Scene(pic, trends, ui, logs, (steps, seen), rows, selected_row(rows, ui, pic.about))


def screen(pic: Picture, trends: Trends, ui: Ui, logs: Sequence[LogLine], width: int, height: int) -> list[Text]:
    """Draw exactly ``height`` lines of ``width`` columns; a past view has an edge on the left."""
    ago_s = max(0.0, ui.kept[1] - pic.time) if ui.is_past else None
    edge = Text("│", "bar.past") if ui.is_past else Text()
    inner = max(1, width - edge.cell_len)
    top = headline(pic, inner, VERDICT_LINES, ago_s=ago_s)
    room = height - len(top) - 1
    body = tall(_body(scene(pic, trends, ui, logs), inner, room), max(0, room))
    shown = [*top, *body][: height - 1] if height > 1 else []
    shown += [Text() for _ in range(height - 1 - len(shown))]
    if ui.is_past:
        shown = [Text().append_text(edge).append_text(line) for line in shown]
    shown.append(_footer(ui, width))
    for line in shown:
        line.plain = printable(line.plain)
        fitted(line, width)
    return shown


def _body(of: Scene, width: int, room: int) -> list[Text]:
    ui = of.ui
    if ui.mode == "text":
        return [rule(ui.title, width), *map(Text, whole_text(ui, width)[ui.down : ui.down + room - 1])]
    if ui.mode in ("host", "rank"):
        return opened(of, width, room)[ui.down :]
    return VIEW[ui.mode](of, width, room)


def opened(of: Scene, width: int, room: int) -> list[Text]:
    """Draw the opened host or rank."""
    if of.selected is None:
        return [Text("no host", "old")]
    rank = selected_rank(of.selected, of.ui)
    if of.ui.mode == "rank" and rank:
        mesh = of.pic.training.mesh if of.pic.training else None
        return rank_page(of.selected, rank, mesh, of.chosen_logs, of.trends, of.axes[1], of.ui, width, room)
    return detail(of.selected, of.ui, of.chosen_logs, width, room)


def shown_logs(of: Scene, height: int) -> list[LogLine]:
    """Return the log lines that a screen of this height may show."""
    chosen = [line for line in of.chosen_logs if of.ui.log.at is None or line.number <= of.ui.log.at]
    return chosen[-height:]


def whole_text(ui: Ui, width: int) -> list[str]:
    """Return the lines of the shown text, wrapped to this width."""
    return [part for line in ui.lines for part in wrapped(line, width)]


def listed(pic: Picture, ui: Ui, width: int) -> list[Text]:
    """Draw everything without a height limit: all hosts, their notes, and the events."""
    rows = ordered(pic, ui)
    if not rows:
        return [*headline(pic, width), Text(none_shown(ui))]
    grid = Grid(pic, ui, Trends(), Axis(pic.time - 1, pic.time), quantity_of(pic, ui), is_text=True)
    lines = [*headline(pic, width), *hosts.grid(grid, rows, width, len(rows) + 1)]
    for row in rows:
        if row.why:
            lines.append(Text(f"! {row.name}: {row.state} {row.why}"))
        lines += [Text(f"! {row.name}: {note}") for note in row.notes]
    lines += [event_line(event) for event in pic.events]
    for line in lines:
        line.plain = printable(line.plain)
        line.rstrip()
    return lines


def _hosts(of: Scene, width: int, room: int) -> list[Text]:
    if not of.rows:
        return [Text(f"{none_shown(of.ui)}; Esc shows all", "old")]
    return hosts.grid(of.grid, of.rows, width, room)


def _all(of: Scene, width: int, room: int) -> list[Text]:
    """Draw the overview, as much as the size has room for."""
    if width >= BROAD:
        left = max(WIDE, int(LEFT * width))
        return beside([(_main(of, left, room), left), (of.graphs.column(width - left - GAP, room), width - left - GAP)])
    if width >= WIDE:
        return _medium(of, width, room)
    return _small(of, width, room)


def _main(of: Scene, width: int, room: int) -> list[Text]:
    """Draw hosts, the selected host, the heat map, events and log, stacked."""
    n_log = min(len(of.chosen_logs) + 1, max(4, room // 4))
    n_events = min(len(of.pic.events) + 1, max(3, room // 6))
    lines = _hosts(of, width, room - n_events - n_log - 1)
    tail = [*of.events(n_events, width), *of.log(n_log, width)]
    rest = room - len(lines) - len(tail)
    lines += (more := _more(of, width, rest))
    rest -= len(more)
    if rest > 0:
        tail = [*of.events(n_events + rest // 3, width), *of.log(n_log + rest, width)]
    return [*lines, *tall(tail, room - len(lines))]


def _more(of: Scene, width: int, room: int) -> list[Text]:
    """Draw the selected host's GPUs and the heat map, as far as there is room."""
    lines = gpu_lines(of.selected, width) if of.selected else []
    if len(lines) > room:
        lines = []
    n_units, rest = sum(n for _, n in of.trends.layout), room - len(lines)
    if n_units and rest >= LEAST_MAP:
        lines += of.heat_map(width, min(rest, n_units + 2))
    return lines


def _medium(of: Scene, width: int, room: int) -> list[Text]:
    """Draw three graphs side by side, hosts, the selected host, then events next to the log."""
    halves = (width - GAP) // 2
    n_tail = min(max(len(of.pic.events), len(of.chosen_logs)) + 1, max(3, room // 5))
    n_graph = 7 if room >= 24 and of.graphs.known() else 0
    lines = _hosts(of, width, max(4, room - n_graph - n_tail))
    rest = room - len(lines) - n_graph - n_tail
    lines += (more := _more(of, width, rest))
    rest -= len(more)
    if n_graph and rest > 0:
        taller = min(rest, 3)
        n_graph, rest = n_graph + taller, rest - taller
    n_tail += max(0, rest)
    tail = beside([(of.events(n_tail, halves), halves), (of.log(n_tail, width - halves - GAP), width - halves - GAP)])
    return [*(of.graphs.row(of.graphs.known()[:3], width, n_graph) if n_graph else ()), *lines, *tail]


def _small(of: Scene, width: int, room: int) -> list[Text]:
    """Draw one graph if there is room, the hosts, the newest events, and the log if room remains."""
    n_events = min(len(of.pic.events), 2) + 1
    lines = _hosts(of, width, max(3, room - n_events - 1))
    rest = room - len(lines) - n_events
    graph = of.graphs.rate(width, min(rest, 7)) if rest >= 5 else []
    rest -= len(graph)
    more = min(max(0, rest), len(of.pic.events) + 1 - n_events)
    return [*graph, *lines, *of.events(n_events + more, width), *of.log(max(0, rest - more), width)]


def _gpus(of: Scene, width: int, room: int) -> list[Text]:
    """Draw every GPU now, and over time."""
    lines = _hosts(of, width, max(4, room // 2))
    lines += of.heat_map(width, max(5, room - len(lines)))
    rest = room - len(lines)
    return [*lines, *(of.graphs.row(of.graphs.hardware()[:3], width, rest) if rest >= LEAST else ())]


def _network(of: Scene, width: int, room: int) -> list[Text]:
    """Draw every host's traffic, now and over time, and notes about its ports."""
    lines = of.graphs.network(width, max(6, room // 4))
    lines += of.heat_map(width, min(room // 2, len(of.trends.layout) + 2), NETWORK)
    lines.append(rule("HOSTS: RDMA and the busiest interface, both directions, in Gb/s", width))
    return [*lines, *(hosts.network_line(row, is_selected=row is of.selected) for row in of.rows)]


def _to_the_bottom(pane: Sequence[Text], room: int) -> list[Text]:
    """Align the lines below a heading to the bottom, so that they do not move if the verdict grows a line."""
    return [*pane[:1], *(Text() for _ in range(room - len(pane))), *pane[1:]]


VIEW: dict[str, Callable[[Scene, int, int], list[Text]]] = {
    "all": _all,
    "gpus": _gpus,
    "ranks": lambda of, width, room: rank_table(of.pic, of.rows, of.ui, width, room),
    "network": _network,
    "log": lambda of, width, room: _to_the_bottom(of.log(room, width), room),
    "events": lambda of, width, room: _to_the_bottom(of.events(room, width, wraps=True), room),
}


def _footer(ui: Ui, width: int) -> Text:
    if ui.pending:
        return Text(f" {ui.question}? y yes, any other key no".ljust(width), "bar.warn")
    if ui.typing:
        typed = ui.filter if ui.typing == "filter" else ui.log.search
        return Text(f"/{typed}█  Enter keeps it, Esc ends it", "strong")
    keys = KEYS if width >= len(KEYS) else SHORT_KEYS
    if ui.reads_log:
        keys = LOG_KEYS
    elif ui.reads_events and ui.mode == "all":
        keys = EVENT_KEYS
    elif ui.is_running:
        keys = COMMAND_KEYS
    elif ui.mode not in VIEWS[:1]:
        keys = BACK_KEYS
    extra = {
        f"{ui.hint}": bool(ui.hint), "the past: → goes on, Esc or End now": ui.is_past,
        "PAUSED: Space goes on": ui.paused, f"filter {ui.filter!r}": bool(ui.filter),
        "odd ones only": ui.odd_only, f"by {ui.sort}": ui.sort != SORTS[0], WINDOW_WORDS[ui.window]: ui.window > 0,
    }  # fmt: skip
    marks = given("[{}] ", ", ".join(words for words, on in extra.items() if on))
    return Text(f" {marks}{keys}".ljust(width), "bar.past" if ui.is_past else "keys")
