"""The user's choices, and what the keys are. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence

from llama405b_tools.top.state.picture import Change
from llama405b_tools.top.state.quantities import POWER

VIEWS = ("all", "gpus", "ranks", "network", "log", "events")  # keys 1 to 6
PANES = ("hosts", "events", "log")  # of view "all"
SORTS = ("worst", "name", "power", "step", "temperature")
COLUMNS = ("cpu_pct", "ram_pct", "disk", "step", "busy", "age")  # of a host, that can be left out
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
    """What is shown of the log."""

    at: int | None = None  # number of the last line that is shown; None: the newest, whatever comes
    all_lines: bool = False  # also those that each step prints
    errors_only: bool = False
    only: str = ""  # "host" or "rank": the chosen one
    wraps: bool = False
    left: int = 0  # columns moved sideways
    search: str = ""


@dataclasses.dataclass(slots=True)
class Ui:
    """The user's choices."""

    path: list[str] = dataclasses.field(default_factory=lambda: ["all"])  # a view, what was opened in it, a text
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
    at: float | None = None  # the moment that is looked at; None: now
    came_back: bool = False  # by the last key, from the past to now
    kept: tuple[float, float] = (0.0, 0.0)  # from when until when one can go back
    events_at: Change | None = None  # the last event that is shown; None: the newest
    wraps_events: bool = False  # beside other things; alone they always are
    down: int = 0  # lines that a text or a host is scrolled down
    log: LogView = dataclasses.field(default_factory=LogView)
    stacks: Mapping[int, Sequence[str]] = dataclasses.field(default_factory=dict)  # by rank, of the last autopsy
    stacks_of: str = ""  # when that was
    title: str = ""
    lines: Sequence[str] = ()  # of a text
    running: set[str] = dataclasses.field(default_factory=set)  # titles of our commands that have not ended
    hint: str = ""  # about the last key
    refusals: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by key, why something cannot be done
    pending: str = ""  # the key of what is to be done, if the user agrees
    question: str = ""  # whether he does

    @property
    def is_past(self) -> bool:
        """Whether another moment than now is looked at."""
        return self.at is not None

    @property
    def mode(self) -> str:
        """What is shown: a view, ``host``, ``rank`` or ``text``."""
        return self.path[-1]

    def show_text(self, title: str, lines: Sequence[str]) -> None:
        """Show a text, above what is shown; a text that is shown is replaced."""
        if self.mode != "text":
            self.path.append("text")
        self.title, self.lines, self.down = title, lines, 0

    @property
    def is_running(self) -> bool:
        """Whether the text that is shown is of a command that has not ended."""
        return self.mode == "text" and self.title in self.running

    @property
    def reads_log(self) -> bool:
        """Whether keys move in the log."""
        return self.mode == "log" or (self.mode == "all" and self.pane == "log")

    @property
    def reads_events(self) -> bool:
        """Whether keys move in the events."""
        return self.mode == "events" or (self.mode == "all" and self.pane == "events")
