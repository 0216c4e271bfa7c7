"""The screen of cluster-top: a picture in, lines of rich text out. Pure; used by the app, ``--once`` and the tests.

High power is good and is not colored as a deviation; deviations are, and also have a sign.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.text import Text

from llama405b.contract.phrases import given
from llama405b_tools.text.clean import printable
from llama405b_tools.text.figures import WIDE
from llama405b_tools.top.draw import heat, hosts
from llama405b_tools.top.draw.blocks import GAP, beside, fitted, rule, tall
from llama405b_tools.top.draw.chart import Axis
from llama405b_tools.top.draw.detail import detail, gpu_lines, rank_page, rank_table, selected_rank
from llama405b_tools.top.draw.graphs import LEAST, Graphs, axes_of
from llama405b_tools.top.draw.headline import headline
from llama405b_tools.top.draw.hosts import Grid, none_shown, ordered, selected_row
from llama405b_tools.top.draw.lines import LogLine, chosen_lines, event_line, events_pane, log_pane, wrapped
from llama405b_tools.top.draw.ui import (
    BACK_KEYS,
    COMMAND_KEYS,
    EVENT_KEYS,
    KEYS,
    LOG_KEYS,
    SHORT_KEYS,
    SORTS,
    VIEWS,
    Ui,
)
from llama405b_tools.top.state.picture import HostRow, Picture
from llama405b_tools.top.state.quantities import NETWORK, available
from llama405b_tools.top.state.series import WINDOW_WORDS
from llama405b_tools.top.state.trends import Trends

VERDICT_LINES = 2  # on a screen
BROAD = 160  # columns from which on the graphs stand beside the rest
LEAST_MAP = 6  # lines of a map of heat, with its heading and axis
LEFT = 0.6  # of the columns, for the hosts


class Scene(NamedTuple):
    """What is drawn, and how it is looked at."""

    pic: Picture
    trends: Trends
    ui: Ui
    logs: Sequence[LogLine]
    axes: tuple[Axis, Axis]  # of the steps, and of all else
    rows: Sequence[HostRow]  # the hosts to show, in order
    selected: HostRow | None

    @property
    def graphs(self) -> Graphs:
        """The graphs."""
        return Graphs(self.pic, self.trends, self.ui.window, *self.axes)

    @property
    def grid(self) -> Grid:
        """What the hosts are drawn with."""
        focused = self.ui.mode != "all" or self.ui.pane == "hosts"
        return Grid(self.pic, self.ui, self.trends, self.axes[1], quantity_of(self.pic, self.ui), focused)

    def heat_map(self, width: int, height: int, quantity: int | None = None) -> list[Text]:
        """Draw a quantity (the chosen one) of every GPU over time."""
        which = quantity_of(self.pic, self.ui) if quantity is None else quantity
        return heat.heat_map(self.pic.hosts, self.trends, which, self.ui.window, self.axes[1], width, height)

    @property
    def chosen_logs(self) -> list[LogLine]:
        """The log lines that the user wants to see."""
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
    """Return the chosen quantity; the first that is known, if nothing is known of it."""
    there = available(pic.hosts)
    return ui.quantity if ui.quantity in there or not there else there[0]


def scene(pic: Picture, trends: Trends, ui: Ui, logs: Sequence[LogLine]) -> Scene:
    """Return what is drawn."""
    rows = ordered(pic, ui)
    steps, seen = axes_of(trends, ui.window, pic.time)
    if ui.is_past:
        steps, seen = steps._replace(end_name="then"), seen._replace(end_name="then")
    return Scene(pic, trends, ui, logs, (steps, seen), rows, selected_row(rows, ui, pic.about))


def screen(pic: Picture, trends: Trends, ui: Ui, logs: Sequence[LogLine], width: int, height: int) -> list[Text]:
    """Draw exactly ``height`` lines of ``width`` columns; the past has an edge at its left."""
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
    """Return all lines of a text, wrapped to this width."""
    return [part for line in ui.lines for part in wrapped(line, width)]


def listed(pic: Picture, ui: Ui, width: int) -> list[Text]:
    """Draw everything, without a screen's limit: every host, what stands out, and the events."""
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
    """Draw everything that the size has room for."""
    if width >= BROAD:
        left = max(WIDE, int(LEFT * width))
        return beside([(_main(of, left, room), left), (of.graphs.column(width - left - GAP, room), width - left - GAP)])
    if width >= WIDE:
        return _medium(of, width, room)
    return _small(of, width, room)


def _main(of: Scene, width: int, room: int) -> list[Text]:
    """Draw hosts, the selected one, every GPU over time, events and log, one above the other."""
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
    """Draw the GPUs of the selected host, and every GPU over time, as far as there is room."""
    lines = gpu_lines(of.selected, width) if of.selected else []
    if len(lines) > room:
        lines = []
    n_units, rest = sum(n for _, n in of.trends.layout), room - len(lines)
    if n_units and rest >= LEAST_MAP:
        lines += of.heat_map(width, min(rest, n_units + 2))
    return lines


def _medium(of: Scene, width: int, room: int) -> list[Text]:
    """Draw three graphs side by side, hosts, the selected one, then events beside the log."""
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
    """Draw one graph if there is room, the hosts, the newest events, and the log if there still is room."""
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
    """Draw what every host sends and receives, now and over time, and what stands out about its ports."""
    lines = of.graphs.network(width, max(6, room // 4))
    lines += of.heat_map(width, min(room // 2, len(of.trends.layout) + 2), NETWORK)
    lines.append(rule("HOSTS: RDMA and the busiest interface, both directions, in Gb/s", width))
    return [*lines, *(hosts.network_line(row, is_selected=row is of.selected) for row in of.rows)]


def _to_the_bottom(pane: Sequence[Text], room: int) -> list[Text]:
    """Move the lines below a heading to the bottom: they stay where they are if the verdict takes another line."""
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
