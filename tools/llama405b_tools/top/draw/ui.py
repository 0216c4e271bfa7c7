"""The user's choices, the key help, log and event lines, and the themes. Pure.

Drawing modules name styles by meaning (``bad``, ``warn``, ``old``, ``heat.7``); only this module knows colors. The background is
always the terminal's own.
"""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.segment import Segment
from rich.text import Text
from rich.theme import Theme

from llama405b.contract.errors import given
from llama405b_tools.text.figures import local_time
from llama405b_tools.top.draw.charts import rule
from llama405b_tools.top.state.picture import POWER, Change, Level

VIEWS = ("all", "gpus", "ranks", "network", "log", "events")  # keys 1 to 6
PANES = ("hosts", "events", "log")  # of view "all"
SORTS = ("worst", "name", "power", "step", "temperature")
COLUMNS = ("cpu_pct", "ram_pct", "disk", "step", "busy", "age")  # columns of a host that can be hidden
KEYS = "1-6 views  ↑↓ ⏎ open  Tab pane  ← → back in time  / find  m heat  +- time  Space pause  a why  ? keys  q quit"
SHORT_KEYS = "1-6 ↑↓ ⏎ Tab ← → / s m + - Space a e ? q"
LOG_KEYS = "↑↓ PgUp End  / n N find  f all  L errors  F host/rank  w wrap  ←→  y copy  Esc q back  ? keys"
EVENT_KEYS = "↑↓ PgUp PgDn End  w wrap  Tab pane  6 all of them, whole  Esc q back  ? keys"
COMMAND_KEYS = "x ends it  Esc q leaves it, and it goes on  ↑↓ PgUp PgDn"
BACK_KEYS = "↑↓ PgUp PgDn  ⏎ open  m heat  +- time  Esc q back  ? keys"
HELP = """cluster-top: every host, every GPU, every rank, the training and its logs

  1 … 6        everything; GPUs; ranks; the network; the log; the events
  ↑ ↓ j k      choose a host or rank; scroll          PgUp PgDn Home End   a page; to the end
  Enter        open the chosen host, then its chosen rank          Esc q   one level back; q at the top: quit
  Tab          in view 1, what ↑ ↓ move in: hosts, events, log
  + -          how far back the graphs go: 10 minutes, 1 hour, 8 hours, the whole run
  m            what the cells of heat show: power, utilization, memory, temperature, clock, network, busy seconds
  Space        stop the screen, and let it go on (it misses nothing meanwhile); a recording stands still
  ← → [ ]      go back ten seconds in the last ten minutes, and forward; a minute; End, Esc: to now. All of it goes.
  < >          a recording: half, twice as fast; → at its newest moment skips ten seconds
  /            show only hosts whose name, state or notes contain a text; in the log, find a text (n N: further back, forward)
  s o C        sort: worst first, name, power, step, temperature; only hosts that stand out; fewer columns
  e            the first error across all hosts, with its traceback
  T            colors for a dark or a light background
  a            say what every rank is doing right now, and who holds up the run
  c p M R S    have the run save now, trace its next step, tell what memory holds; restart it (by its guard); stop it (both save first)
  ! y          a shell on the chosen host; what is known as text, which is also copied     Each but y asks first.
  x            end the command that is shown; Esc leaves it, and it goes on: an event says how it ended
  r            read the hosts file again, after it has changed
  ? h          this page          Ctrl-C   quit; nothing is left on any host     Ctrl-Z   suspend; `fg` goes on

In the log: f also what each step printed (the graphs have it); L only errors; F only the chosen host, then its chosen rank;
  ← → move sideways; y copies the lines that are shown, without times and names. It stands still while it is read.
In the log and the events: w wraps lines that end with … because they are cut; in 6 all events are whole.

Graphs: s a save, e an evaluation, r a restart; ┄ what was planned. ▁ to █ and its color: how much. — is unknown, never 0.
Cells: a bar or number per GPU; ! a GPU that deviates from the median, has an error, a throttle reason, or whose rank delays the others.
Gb/s: InfiniBand and RoCE, all ports, both ways; without them the busiest interface. STEP and AGE: of the slowest rank.
✖ before a name: the run failed or hangs, and it began there; hosts that only lost contact are dim, as is what is no longer heard.
States: OK, STALE (no frame for 3 intervals), AUTH, REFUSED, TIMEOUT, DOWN (no connection, and why),
  NO-DRIVER, SMI-HUNG (nvidia-smi does not answer), HUNG (its rank is the one the others wait for), FAILED.
"at risk": the steps since the newest checkpoint, and their hours summed over all ranks, lost if the run died now."""


@dataclasses.dataclass(slots=True)
class LogView:
    """How the log is shown."""

    at: int | None = None  # number of the last line shown; None: follow the newest
    all_lines: bool = False  # include the lines that every step prints
    errors_only: bool = False
    only: str = ""  # "host" or "rank": only lines of the selected one
    wraps: bool = False
    left: int = 0  # columns moved sideways
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
    paused: bool = False
    at: float | None = None  # the past moment shown; None: now
    came_back: bool = False  # whether the last key returned from the past to now
    kept: tuple[float, float] = (0.0, 0.0)  # first and last moment of the history
    events_at: Change | None = None  # the last event shown; None: the newest
    wraps_events: bool = False  # in the overview; the events view always wraps
    down: int = 0  # lines that a text or a host is scrolled down
    log: LogView = dataclasses.field(default_factory=LogView)
    stacks: Mapping[int, Sequence[str]] = dataclasses.field(
        default_factory=dict
    )  # stack by rank, from the last autopsy
    stacks_of: str = ""  # time of that autopsy
    title: str = ""
    lines: Sequence[str] = ()  # of a text
    running: set[str] = dataclasses.field(default_factory=set)  # titles of our running commands
    hint: str = ""  # about the last key
    refusals: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by key, why an action is disabled
    pending: str = ""  # key of the action that waits for confirmation
    question: str = ""  # the question shown for it

    @property
    def is_past(self) -> bool:
        """Whether a past moment is shown."""
        return self.at is not None

    @property
    def mode(self) -> str:
        """What is shown: a view, ``host``, ``rank`` or ``text``."""
        return self.path[-1]

    def show_text(self, title: str, lines: Sequence[str]) -> None:
        """Show a text on top of the view, replacing a shown text."""
        if self.mode != "text":
            self.path.append("text")
        self.title, self.lines, self.down = title, lines, 0

    @property
    def is_running(self) -> bool:
        """Whether the shown text belongs to a running command."""
        return self.mode == "text" and self.title in self.running

    @property
    def reads_log(self) -> bool:
        """Whether keys move in the log."""
        return self.mode == "log" or (self.mode == "all" and self.pane == "log")

    @property
    def reads_events(self) -> bool:
        """Whether keys move in the events."""
        return self.mode == "events" or (self.mode == "all" and self.pane == "events")


SIGNS = {Level.BAD: ("✖", "bad"), Level.WARNING: ("▲", "warn"), Level.NOTE: ("·", "old")}
STEP = re.compile(r"(?:step \d+/\d+  loss |\{'loss': |\s*\d+%\|)")  # our trainer's, transformers', a progress bar


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


def chosen_lines(logs: Sequence[LogLine], view: LogView, host: str, rank: int | None) -> list[LogLine]:
    """Return the lines that pass the user's filters. ``host`` and ``rank``: the selected ones."""
    wanted: list[Callable[[LogLine], bool]] = []
    if not view.all_lines:
        wanted.append(lambda line: not STEP.match(line.text))
    if view.errors_only:
        wanted.append(lambda line: line.is_error)
    if view.only:
        wanted.append(lambda line: host in line.hosts)
    if view.only == "rank" and rank is not None:
        wanted.append(lambda line: rank in line.ranks)
    return [line for line in logs if all(wants(line) for wants in wanted)]


def log_pane(chosen: Sequence[LogLine], view: LogView, room: int, width: int, *, focused: bool = False) -> list[Text]:
    """Draw the newest of the chosen lines, or those up to the scroll position."""
    if room < 1:
        return []
    end = len(chosen) if view.at is None else sum(line.number <= view.at for line in chosen)
    lines: list[Text] = []
    for entry in reversed(chosen[max(0, end - room + 1) : end]):
        lines[:0] = log_lines(entry, view, width)
        if len(lines) >= room - 1:
            break
    heading = rule(log_title(view), width, right=given("{} newer, End", len(chosen) - end), focused=focused)
    return [heading, *lines[max(0, len(lines) - room + 1) :]]


def log_title(view: LogView) -> str:
    """Return the log's title, which names its filters."""
    words = "all lines" if view.all_lines else "without step lines"
    if view.errors_only:
        words = "errors"
    return f"LOG: {words}{given(' of the chosen {}', view.only)}{given(', /{}', view.search)}"


def log_lines(entry: LogLine, view: LogView, width: int) -> list[Text]:
    """Draw one line of the log: as one line, or wrapped as several."""
    head = clock(entry.time).append(f"{entry.where} ", "where")
    text = entry.text if view.wraps else entry.text[view.left :]
    body = Text(text, "bad" if entry.is_error else "")
    if view.search:
        body.highlight_regex(re.compile(re.escape(view.search), re.IGNORECASE), "found")
    room = max(20, width - head.cell_len)
    if not view.wraps or len(text) <= room:
        return [Text().append_text(head).append_text(body)]
    parts = [body[at : at + room] for at in range(0, len(text), room)]
    return [
        Text().append_text(head if i == 0 else Text(" " * head.cell_len)).append_text(part)
        for i, part in enumerate(parts)
    ]


def found_at(chosen: Sequence[LogLine], view: LogView, *, back: bool) -> int | None:
    """Return the number of the next (``back``: previous) line that contains the search text."""
    newest = chosen[-1].number if chosen else 0
    at = newest + 1 if view.at is None else view.at
    hits = [line.number for line in chosen if view.search.lower() in line.text.lower()]
    if back:
        return max((number for number in hits if number < at), default=None)
    return min((number for number in hits if number > at), default=None)


def events_pane(
    events: Sequence[Change], at: Change | None, room: int, width: int, *, wraps: bool = False, focused: bool = False
) -> list[Text]:
    """Draw the newest events, or those up to the scroll position."""
    if room < 1:
        return []
    end = events.index(at) + 1 if at in events else len(events)
    lines: list[Text] = []
    for event in reversed(events[:end]):
        line = event_line(event)
        lines[:0] = _wrapped_text(line, width) if wraps else [line]
        if len(lines) >= room - 1:
            break
    newer = given("{} newer, End", len(events) - end)
    title = "EVENTS" if events else "EVENTS: none yet"
    return [rule(title, width, right=newer, focused=focused), *lines[max(0, len(lines) - room + 1) :]]


def _wrapped_text(line: Text, width: int) -> list[Text]:
    """Wrap an event, indenting the further lines below its text."""
    if line.cell_len <= width:
        return [line]
    head, *rest = textwrap.wrap(line.plain, max(width, 8), subsequent_indent=" " * 11)
    style = str(line.spans[-1].style) if line.spans else ""
    return [line[: len(head)], *(Text(part, style) for part in rest)]


def event_line(event: Change) -> Text:
    """Draw one event."""
    sign, style = SIGNS[event.level]
    line = clock(event.time)
    line.append(f"{sign} {given('{} ', event.host)}{event.text}", style)
    return line


def wrapped(line: str, width: int) -> list[str]:
    """Wrap a line of text, indenting the further lines relative to where its text begins."""
    indent = " " * min(len(line) - len(line.lstrip()) + 2, max(0, width // 4))
    return textwrap.wrap(line, max(width, 8), subsequent_indent=indent, drop_whitespace=False) or [""]


def clock(moment: float) -> Text:
    """Return a dim time of day to start a line; a base style of ``Text`` would dim everything appended too."""
    return Text().append(f"{local_time(moment)} ", "old")


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
SIXTEEN = PLAIN | {
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


def theme(name: str, n_colors: int) -> Theme:
    """Return the theme for a background (``THEMES``) and number of colors (0: none, or NO_COLOR is set)."""
    if n_colors < 256:
        return Theme(PLAIN if n_colors < 16 else SIXTEEN, inherit=False)
    return Theme(SIXTEEN | COLORS[name] | _ramp(*RAMPS[name]), inherit=False)


def _ramp(colors: Sequence[int], inks: Sequence[int]) -> dict[str, str]:
    """Return the styles of heat cells: full blocks (``heat``) and numbers on them (``cell``)."""
    heat = {f"heat.{i}": f"color({color}) on color({color})" for i, color in enumerate(colors)}
    cell = {
        f"cell.{i}": f"color({ink}) on color({color})" for i, (color, ink) in enumerate(zip(colors, inks, strict=True))
    }
    return heat | cell


def segments(line: Text, look: Console) -> list[Segment]:
    """Return a line's styled segments; ``Text.render`` ignores the base style of a line without spans."""
    if line.spans:
        return [part for part in line.render(look) if part.text != "\n"]
    return [Segment(line.plain, look.get_style(line.style))]


def background(colorfgbg: str) -> str:
    """Return the theme for COLORFGBG, such as ``15;0``; dark if unknown."""
    last = colorfgbg.rpartition(";")[2]
    return "light" if last in ("7", "15") else "dark"
