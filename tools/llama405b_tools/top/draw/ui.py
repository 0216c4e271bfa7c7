"""The user's choices, the key help, log and event lines, and the themes. Pure.

Drawing modules name styles by meaning (``bad``, ``warn``, ``old``, ``heat.7``); only this module knows colors. The background is
always the terminal's own.
"""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Console
from rich.segment import Segment
from rich.text import Text
from rich.theme import Theme

from llama405b.contract.errors import fmt_if
from llama405b_tools.text.figures import format_clock
from llama405b_tools.top.draw.charts import draw_heading
from llama405b_tools.top.state.picture import POWER, ClusterEvent, Severity

VIEWS = ("all", "gpus", "ranks", "network", "log", "events")  # keys 1 to 6
PANES = ("hosts", "events", "log")  # of view "all"
SORTS = ("worst", "name", "power", "step", "temperature")
COLUMNS = ("cpu_pct", "ram_pct", "disk", "step", "busy", "age")  # columns of a host that can be hidden


class Key(NamedTuple):
    """Keys that do one thing: the help page, the footers and docs/cluster-top.md are made from these rows.

    ``footers``: words for the last line, by what is shown there: ``view``, ``narrow`` (a view without room for words), ``log``,
    ``events``, ``command`` (its output) or ``opened`` (everything else).
    """

    names: tuple[str, ...]  # as they arrive
    shown: str
    does: str
    footers: Mapping[str, str] = MappingProxyType({})
    where: str = ""  # "log" or "events": only there


KEYS = (
    Key(
        ("1", "2", "3", "4", "5", "6"),
        "1 … 6",
        "everything; GPUs; ranks; network; log; events",
        {"view": "1-6 views", "narrow": "1-6"},
    ),
    Key(
        ("up", "down", "j", "k"),
        "↑ ↓ j k",
        "select a host or rank; scroll",
        {
            "view": "↑↓ ⏎ open",
            "narrow": "↑↓ ⏎",
            "log": "↑↓ PgUp End",
            "events": "↑↓ PgUp PgDn End",
            "opened": "↑↓ PgUp PgDn",
        },
    ),
    Key(("pageup", "pagedown", "home", "end"), "PgUp PgDn Home End", "a page up or down; to the first or last line"),
    Key(("enter",), "Enter", "open the selected host, then its selected rank", {"opened": "⏎ open"}),
    Key(("/",), "/", "search; Enter finds the newest line", {"log": "/ n N find"}, "log"),
    Key(("n", "N"), "n N", "the next line with the text, further back or forward", {}, "log"),
    Key(("f",), "f", "also the lines that every step prints", {"log": "f all"}, "log"),
    Key(("L",), "L", "only errors", {"log": "L errors"}, "log"),
    Key(("F",), "F", "only the selected host, then its selected rank", {"log": "F host/rank"}, "log"),
    Key(("w",), "w", "wrap lines, or cut them", {"log": "w wrap"}, "log"),
    Key(("left", "right"), "← →", "scroll sideways", {"log": "←→"}, "log"),
    Key(("w",), "w", "wrap events, or cut them; view 6 always wraps them", {"events": "w wrap"}, "events"),
    Key(
        ("tab", "shift+tab"),
        "Tab",
        "in view 1: move between hosts, events and log",
        {"view": "Tab pane", "narrow": "Tab", "events": "Tab pane  6 all of them, whole"},
    ),
    Key(
        ("left", "right", "[", "]"),
        "← → [ ]",
        "go back or forward 10 s, or a minute; End and Esc return to now",
        {"view": "← → back in time", "narrow": "← →"},
    ),
    Key(("<", ">"), "< >", "recording: half or double speed; → at its end skips 10 s"),
    Key(("/",), "/", "filter hosts by name, state or notes", {"view": "/ find", "narrow": "/"}),
    Key(("s", "o", "C"), "s o C", "sort; only hosts with problems; fewer columns", {"narrow": "s"}),
    Key(
        ("m",),
        "m",
        "quantity of the cells: power, utilization, memory, temperature, clock, network, busy seconds",
        {"view": "m heat", "narrow": "m", "opened": "m heat"},
    ),
    Key(
        ("+", "=", "-"),
        "+ -",
        "time range of the graphs: 10 minutes, 1 hour, 8 hours, the whole run",
        {"view": "+- time", "narrow": "+ -", "opened": "+- time"},
    ),
    Key(
        (" ", "space"),
        "Space",
        "freeze and resume the screen, which misses nothing; pause a recording",
        {"view": "Space pause", "narrow": "Space"},
    ),
    Key(("T",), "T", "colors for a dark or light background"),
    Key(
        ("a",),
        "a",
        "show what every rank does and which one holds up the run",
        {"view": "a why", "narrow": "a"},
    ),
    Key(("e",), "e", "the first error of all hosts, with its traceback", {"narrow": "e"}),
    Key(
        ("c", "p", "M", "R", "S"),
        "c p M R S",
        "save now; trace the next step; list what memory holds; restart through the guard; stop (both save first)",
    ),
    Key(("!",), "!", "a shell on the selected host"),
    Key(("y",), "y", "show the state as text and copy it (OSC 52); in the log, copy its lines", {"log": "y copy"}),
    Key(("x",), "x", "end the command that is shown", {"command": "x ends it"}),
    Key(("r",), "r", "read the hosts file again"),
    Key(
        ("escape", "q", "Q"),
        "Esc q",
        "one level back; q at the top quits",
        {
            "log": "Esc q back",
            "events": "Esc q back",
            "command": "Esc q leaves it, and it goes on  ↑↓ PgUp PgDn",
            "opened": "Esc q back",
        },
    ),
    Key(
        ("?", "h"),
        "? h",
        "this page",
        {"view": "? keys", "narrow": "?", "log": "? keys", "events": "? keys", "opened": "? keys"},
    ),
    Key((), "Ctrl-C Ctrl-Z", "quit, and nothing is left on any host; suspend", {"view": "q quit", "narrow": "q"}),
)
FOOTERS = {
    kind: (" " if kind == "narrow" else "  ").join(key.footers[kind] for key in KEYS if kind in key.footers)
    for kind in ("view", "narrow", "log", "events", "command", "opened")
}
PLACES = {"": "", "log": "In the log, which stands still while it is read:", "events": "In the events:"}
LEGEND = """a, c, p, M, R, S and ! ask first. Esc leaves a command running; an event says how it ended.

Graphs: s a save, e an evaluation, r a restart; ┄ what was planned. ▁ to █ and its color: how much. — is unknown, never 0.
Cells: a bar or number per GPU; ! a GPU that deviates from the median, has an error, a throttle reason, or whose rank delays the others.
Gb/s: InfiniBand and RoCE, all ports, both ways; without them the busiest interface. STEP and AGE: of the slowest rank.
✖ before a name: the run failed or hangs, and it began there; hosts that only lost contact are dim, as is what is no longer heard.
States: OK, STALE (no frame for 3 intervals), AUTH, REFUSED, TIMEOUT, DOWN (no connection, and why),
  NO-DRIVER, SMI-HUNG (nvidia-smi does not answer), HUNG (its rank is the one the others wait for), FAILED.
"at risk": the steps since the newest checkpoint, and their hours summed over all ranks, lost if the run died now."""


def help_lines() -> list[str]:
    """Return the help page."""
    lines = ["cluster-top: every host, every GPU, every rank, the training and its logs"]
    for place, heading in PLACES.items():
        rows = [key for key in KEYS if key.where == place]
        lines += ["", *([heading] if heading else ()), *(f"  {key.shown:18}  {key.does}" for key in rows)]
    return [*lines, "", *LEGEND.split("\n")]


@dataclasses.dataclass(slots=True)
class LogView:
    """How the log is shown."""

    last_number: int | None = None  # number of the last line shown; None: follow the newest
    all_lines: bool = False  # include the lines that every step prints
    errors_only: bool = False
    scope: str = ""  # "host" or "rank": only lines of the selected one
    wraps: bool = False
    offset: int = 0  # columns moved sideways
    search: str = ""


@dataclasses.dataclass(slots=True)
class Ui:
    """The user's choices and what is open on the screen."""

    path: list[str] = dataclasses.field(
        default_factory=lambda: ["all"]
    )  # view, then what was opened in it, then a text
    pane: str = PANES[0]
    selected: str = ""  # host
    rank: int | None = None  # selected on that host; None: the one that stands out, else the first
    sort: str = SORTS[0]
    odd_only: bool = False
    filter: str = ""
    typing: str = ""  # "filter" or "search", while it is typed
    window: int = 0  # of ``WINDOWS_S``
    quantity: int = POWER
    hidden: int = 0  # columns of a host that are left out, from the first
    theme: str = ""  # of ``THEMES``; "": by what the terminal says of its background
    is_paused: bool = False
    past_time: float | None = None  # the past moment shown; None: now
    just_returned: bool = False  # whether the last key returned from the past to now
    history_span: tuple[float, float] = (0.0, 0.0)  # first and last moment of the history
    last_event: ClusterEvent | None = None  # the last event shown; None: the newest
    wraps_events: bool = False  # in the overview; the events view always wraps
    scroll: int = 0  # lines that a text or a host is scrolled down
    log: LogView = dataclasses.field(default_factory=LogView)
    stacks: Mapping[int, Sequence[str]] = dataclasses.field(
        default_factory=dict
    )  # stack by rank, from the last autopsy
    stacks_time: str = ""  # time of that autopsy
    title: str = ""
    lines: Sequence[str] = ()  # of a text
    running_titles: set[str] = dataclasses.field(default_factory=set)  # titles of our running commands
    hint: str = ""  # about the last key
    refusals: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by key, why an action is disabled
    pending_key: str = ""  # key of the action that waits for confirmation
    question: str = ""  # the question shown for it

    @property
    def is_past(self) -> bool:
        """Whether a past moment is shown."""
        return self.past_time is not None

    @property
    def mode(self) -> str:
        """What is shown: a view, ``host``, ``rank`` or ``text``."""
        return self.path[-1]

    def show_text(self, title: str, lines: Sequence[str]) -> None:
        """Show a text on top of the view, replacing a shown text."""
        if self.mode != "text":
            self.path.append("text")
        self.title, self.lines, self.scroll = title, lines, 0

    @property
    def is_running(self) -> bool:
        """Whether the shown text belongs to a running command."""
        return self.mode == "text" and self.title in self.running_titles

    @property
    def reads_log(self) -> bool:
        """Whether keys move in the log."""
        return self.mode == "log" or (self.mode == "all" and self.pane == "log")

    @property
    def reads_events(self) -> bool:
        """Whether keys move in the events."""
        return self.mode == "events" or (self.mode == "all" and self.pane == "events")


LEVEL_SIGNS = {Severity.BAD: ("✖", "bad"), Severity.WARNING: ("▲", "warn"), Severity.NOTE: ("·", "old")}
STEP_LINE = re.compile(r"(?:step \d+/\d+  loss |\{'loss': |\s*\d+%\|)")  # our trainer's, transformers', a progress bar


@dataclasses.dataclass(frozen=True, slots=True)
class LogLine:
    """One (folded) line of the logs."""

    time: float
    where: str
    text: str
    is_error: bool = False
    hosts: frozenset[str] = frozenset()
    ranks: frozenset[int] = frozenset()
    number: int = 0  # counted from the first line
    is_bar: bool = False  # the state of a line that is being overwritten


def filter_lines(logs: Sequence[LogLine], view: LogView, host: str, rank: int | None) -> list[LogLine]:
    """Return the lines that pass the user's filters. ``host`` and ``rank``: the selected ones."""
    conditions: list[Callable[[LogLine], bool]] = []
    if not view.all_lines:
        conditions.append(lambda line: not STEP_LINE.match(line.text))
    if view.errors_only:
        conditions.append(lambda line: line.is_error)
    if view.scope:
        conditions.append(lambda line: host in line.hosts)
    if view.scope == "rank" and rank is not None:
        conditions.append(lambda line: rank in line.ranks)
    return [line for line in logs if all(condition(line) for condition in conditions)]


def draw_log_pane(
    shown_lines: Sequence[LogLine], view: LogView, room: int, width: int, *, focused: bool = False
) -> list[Text]:
    """Draw the newest of the chosen lines, or those up to the scroll position."""
    if room < 1:
        return []
    end = len(shown_lines) if view.last_number is None else sum(line.number <= view.last_number for line in shown_lines)
    lines: list[Text] = []
    for entry in reversed(shown_lines[max(0, end - room + 1) : end]):
        lines[:0] = draw_log_line(entry, view, width)
        if len(lines) >= room - 1:
            break
    heading = draw_heading(
        log_title(view), width, right=fmt_if("{} newer, End", len(shown_lines) - end), focused=focused
    )
    return [heading, *lines[max(0, len(lines) - room + 1) :]]


def log_title(view: LogView) -> str:
    """Return the log's title, which names its filters."""
    words = "all lines" if view.all_lines else "without step lines"
    if view.errors_only:
        words = "errors"
    return f"LOG: {words}{fmt_if(' of the chosen {}', view.scope)}{fmt_if(', /{}', view.search)}"


def draw_log_line(entry: LogLine, view: LogView, width: int) -> list[Text]:
    """Draw one line of the log: as one line, or wrapped as several."""
    head = clock_text(entry.time).append(f"{entry.where} ", "where")
    text = entry.text if view.wraps else entry.text[view.offset :]
    body = Text(text, "bad" if entry.is_error else "")
    if view.search:
        body.highlight_regex(re.compile(re.escape(view.search), re.IGNORECASE), "found")
    room = max(20, width - head.cell_len)
    if not view.wraps or len(text) <= room:
        return [Text().append_text(head).append_text(body)]
    parts = [body[begin : begin + room] for begin in range(0, len(text), room)]
    return [
        Text().append_text(head if i == 0 else Text(" " * head.cell_len)).append_text(part)
        for i, part in enumerate(parts)
    ]


def find_line_number(shown_lines: Sequence[LogLine], view: LogView, *, back: bool) -> int | None:
    """Return the number of the next (``back``: previous) line that contains the search text."""
    newest = shown_lines[-1].number if shown_lines else 0
    current = newest + 1 if view.last_number is None else view.last_number
    matches = [line.number for line in shown_lines if view.search.lower() in line.text.lower()]
    if back:
        return max((number for number in matches if number < current), default=None)
    return min((number for number in matches if number > current), default=None)


def draw_events_pane(
    events: Sequence[ClusterEvent],
    last_event: ClusterEvent | None,
    room: int,
    width: int,
    *,
    wraps: bool = False,
    focused: bool = False,
) -> list[Text]:
    """Draw the newest events, or those up to the scroll position."""
    if room < 1:
        return []
    end = events.index(last_event) + 1 if last_event in events else len(events)
    lines: list[Text] = []
    for event in reversed(events[:end]):
        line = draw_event(event)
        lines[:0] = _wrap_event(line, width) if wraps else [line]
        if len(lines) >= room - 1:
            break
    newer = fmt_if("{} newer, End", len(events) - end)
    title = "EVENTS" if events else "EVENTS: none yet"
    return [draw_heading(title, width, right=newer, focused=focused), *lines[max(0, len(lines) - room + 1) :]]


def _wrap_event(line: Text, width: int) -> list[Text]:
    """Wrap an event, indenting the further lines below its text."""
    if line.cell_len <= width:
        return [line]
    head, *further_lines = textwrap.wrap(line.plain, max(width, 8), subsequent_indent=" " * 11)
    style = str(line.spans[-1].style) if line.spans else ""
    return [line[: len(head)], *(Text(part, style) for part in further_lines)]


def draw_event(event: ClusterEvent) -> Text:
    """Draw one event."""
    sign, style = LEVEL_SIGNS[event.level]
    line = clock_text(event.time)
    line.append(f"{sign} {fmt_if('{} ', event.host)}{event.text}", style)
    return line


def wrap_line(line: str, width: int) -> list[str]:
    """Wrap a line of text, indenting the further lines relative to where its text begins."""
    indent = " " * min(len(line) - len(line.lstrip()) + 2, max(0, width // 4))
    return textwrap.wrap(line, max(width, 8), subsequent_indent=indent, drop_whitespace=False) or [""]


def clock_text(moment: float) -> Text:
    """Return a dim time of day to start a line; a base style of ``Text`` would dim everything appended too."""
    return Text().append(f"{format_clock(moment)} ", "old")


N_HEAT = 8  # heat levels, cold to hot; one per bar character
THEMES = ("dark", "light")
PLAIN = {  # without colors; 16 colors have no ramp
    "": "none",
    "warn": "bold",
    "bad": "bold",
    "old": "dim",
    "odd": "bold underline",
    "strong": "bold",
    "title": "none",
    "focus": "bold",
    "chart": "none",
    "plan": "none",
    "plan.on": "none",  # the plan line across the filled area of a graph
    "where": "none",
    "found": "reverse",
    "keys": "reverse",
    **dict.fromkeys(("bar.ok", "bar.warn", "bar.bad", "bar.busy", "bar.over", "bar.past"), "bold reverse"),
    **{f"{kind}.{i}": "none" for kind in ("heat", "cell") for i in range(N_HEAT)},
    **{f"part.{i}": "none" for i in range(4)},
    "heat.odd": "bold underline",
    "heat.bad": "bold reverse",
}
SIXTEEN_COLORS = PLAIN | {
    "warn": "yellow",
    "bad": "bold red",
    "odd": "bold yellow",
    "focus": "bold cyan",
    "where": "cyan",
    "chart": "cyan",
    "plan": "yellow",
    "plan.on": "black on cyan",
    "bar.ok": "black on green",
    "bar.warn": "black on yellow",
    "bar.bad": "bold white on red",
    "bar.busy": "black on cyan",
    "bar.over": "reverse",
    "bar.past": "bold black on magenta",
    "heat.odd": "bold yellow reverse",
    "heat.bad": "bold red reverse",
    **{f"part.{i}": color for i, color in enumerate(("magenta", "cyan", "blue", "green"))},
}
RAMPS = {  # color numbers of the 256 (xterm), cold to hot; and the ink that is legible on each
    "dark": ((235, 236, 238, 23, 24, 30, 66, 73), (250, 250, 252, 255, 255, 255, 255, 16)),
    "light": ((255, 254, 252, 152, 116, 74, 67, 24), (16, 16, 16, 16, 16, 16, 255, 255)),
}
COLORS = {
    "dark": {
        "warn": "color(221)", "bad": "bold color(203)", "odd": "bold color(221)",
        "old": "color(243)", "title": "color(245)", "focus": "bold color(117)", "where": "color(109)", "chart": "color(67)",
        "plan": "color(221)", "plan.on": "color(221) on color(67)",
        "bar.ok": "color(16) on color(108)", "bar.warn": "color(16) on color(221)",
        "bar.bad": "bold color(231) on color(160)", "bar.busy": "color(16) on color(110)",
        "bar.over": "color(16) on color(248)", "bar.past": "bold color(16) on color(177)", "heat.odd": "bold color(16) on color(221)",
        "heat.bad": "bold color(231) on color(160)", "keys": "color(252) on color(236)", "found": "color(16) on color(215)",
        "part.0": "color(139)", "part.1": "color(73)", "part.2": "color(67)", "part.3": "color(108)",
    },
    "light": {
        "warn": "color(130)", "bad": "bold color(160)", "odd": "bold color(130)",
        "old": "color(247)", "title": "color(242)", "focus": "bold color(25)", "where": "color(24)", "chart": "color(67)",
        "plan": "color(130)", "plan.on": "color(255) on color(67)",
        "bar.ok": "color(231) on color(28)", "bar.warn": "color(16) on color(214)",
        "bar.bad": "bold color(231) on color(160)", "bar.busy": "color(231) on color(25)",
        "bar.over": "color(231) on color(240)", "bar.past": "bold color(231) on color(91)", "heat.odd": "bold color(16) on color(214)",
        "heat.bad": "bold color(231) on color(160)", "keys": "color(236) on color(253)", "found": "color(16) on color(222)",
        "part.0": "color(96)", "part.1": "color(30)", "part.2": "color(67)", "part.3": "color(65)",
    },
}  # fmt: skip


def make_theme(name: str, n_colors: int) -> Theme:
    """Return the theme for a background (``THEMES``) and number of colors (0: none, or NO_COLOR is set)."""
    if n_colors < 256:
        return Theme(PLAIN if n_colors < 16 else SIXTEEN_COLORS, inherit=False)
    return Theme(SIXTEEN_COLORS | COLORS[name] | _ramp(*RAMPS[name]), inherit=False)


def _ramp(colors: Sequence[int], inks: Sequence[int]) -> dict[str, str]:
    """Return the styles of heat cells: full blocks (``heat``) and numbers on them (``cell``)."""
    heat = {f"heat.{i}": f"color({color}) on color({color})" for i, color in enumerate(colors)}
    cell = {
        f"cell.{i}": f"color({ink}) on color({color})" for i, (color, ink) in enumerate(zip(colors, inks, strict=True))
    }
    return heat | cell


def styled_segments(line: Text, console: Console) -> list[Segment]:
    """Return a line's styled segments; ``Text.render`` ignores the base style of a line without spans."""
    if line.spans:
        return [part for part in line.render(console) if part.text != "\n"]
    return [Segment(line.plain, console.get_style(line.style))]


def detect_background(colorfgbg: str) -> str:
    """Return the theme for COLORFGBG, such as ``15;0``; dark if unknown."""
    color_number = colorfgbg.rpartition(";")[2]
    return "light" if color_number in ("7", "15") else "dark"
