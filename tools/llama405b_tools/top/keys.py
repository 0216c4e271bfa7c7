"""Handle keys: change the user's choices, or start an action on the selected host or run. Pure.

Each action is a command that the user could type; it runs after confirmation.
"""

import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llama405b.contract.errors import given
from llama405b_tools.text.figures import stopwatch
from llama405b_tools.top.draw import panels
from llama405b_tools.top.draw.detail import ranks_in_order, selected_rank
from llama405b_tools.top.draw.panels import Scene
from llama405b_tools.top.draw.ui import COLUMNS, HELP, PANES, SORTS, VIEWS, Ui, event_line, found_at
from llama405b_tools.top.state.picture import GUARDED, OVER, Change, HostRow, TrainingStatus, available
from llama405b_tools.top.state.trends import WINDOWS_S

SHELL = "!"
NOT_LIVE = "actions are disabled in a replay"
PAST = "viewing history; End returns to live"
READ_ONLY = "cluster-top was started with --read-only"
NO_FILE = "this needs a hosts file; start cluster-top with one instead of host names"
IN_BROWSER = "a shell needs a terminal; use ssh"
IN_JOB = "Slurm nodes are not reached over SSH; use srun --overlap --pty for a shell"


class Action(NamedTuple):
    """An action; its question and command have ``{run}`` and ``{host}`` placeholders."""

    question: str
    words: tuple[str, ...]  # of our command, without the hosts file; () opens a shell
    limit_s: float = 0.0  # time limit of the command


LOOK_S = 60.0  # an autopsy takes seconds
ASK_S = 900.0  # `ask` itself waits ten minutes, then reports
END_S = 3600.0  # stopping waits for a save, which may take long
ACTIONS = {
    "a": Action(
        "look at what every rank of {run} is doing, and who holds it up", ("autopsy", "--run", "{run}"), LOOK_S
    ),
    "c": Action("save a checkpoint of {run} now", ("ask", "{run}", "save"), ASK_S),
    "p": Action("trace the next step of every rank of {run}", ("ask", "{run}", "profile"), ASK_S),
    "M": Action("tell what the memory of every rank of {run} holds", ("ask", "{run}", "memory"), ASK_S),
    "R": Action(
        "save, end this attempt of {run}, and have its guard start the next", ("ask", "{run}", "restart"), END_S
    ),
    "S": Action("stop {run} on every host; it saves first", ("stop", "--run", "{run}"), END_S),
    SHELL: Action("open a shell on {host}", ()),
}
OF_LIVE = ("c", "p", "M", "R")  # actions that need a live run
LINES = 20  # log lines and events in a diagnosis


def refusals(
    *, is_live: bool, read_only: bool, has_file: bool, in_job: bool, in_browser: bool = False
) -> dict[str, str]:
    """Return, by key, why an action is disabled on this screen, whatever is selected."""
    if read_only or not is_live:
        return dict.fromkeys(ACTIONS, READ_ONLY if read_only else NOT_LIVE)
    if in_job:
        return {SHELL: IN_JOB}
    found = {} if has_file else {key: NO_FILE for key in ACTIONS if key != SHELL}
    return found | ({SHELL: IN_BROWSER} if in_browser else {})


def asked(ui: Ui, key: str, of: Scene) -> None:
    """Ask for confirmation of an action, or show why it is disabled."""
    row, run = of.selected, of.pic.training
    refusal = ui.refusals.get(key, "") or (PAST if ui.is_past else "")
    if not refusal and key == SHELL and row is None:
        refusal = "no host is selected"
    elif not refusal and key != SHELL:
        refusal = _refused_of_run(key, run)
    if refusal:
        ui.hint = refusal
        return
    if row:
        ui.selected = row.name
    ui.pending = key
    ui.question = ACTIONS[key].question.format(run=run.run if run else "", host=row.name if row else "")


def _refused_of_run(key: str, run: TrainingStatus | None) -> str:
    """Return why an action cannot work for this run; "" if it can."""
    if run is None:
        return "there is no run on these hosts"
    if key in OF_LIVE and run.phase in OVER:
        return f"run {run.run} is not running: {run.phase}"
    if key == "R" and run.guard not in GUARDED:
        return f"run {run.run} has no guard to restart it; stop it (S) and launch it with --resume auto"
    return ""


def words_of(key: str, run: str, hosts_file: str) -> list[str]:
    """Return the command of an action as words. ``hosts_file``: '' in a Slurm job, which has none."""
    words = [word.format(run=run) for word in ACTIONS[key].words]
    return [*words, *([hosts_file] if hosts_file else ())]


def shell_line(host: str, workdir: str) -> str:
    """Return the shell command that opens a shell on a host. ``workdir``: quoted for a shell."""
    said = shlex.quote(f"shell on {host}; exit returns to cluster-top")
    return f'echo {said}; cd {workdir}; exec "${{SHELL:-sh}}"'


def diagnosis(of: Scene, commands: Sequence[str]) -> list[str]:
    """Return the current state as text to paste into a message. ``commands``: to show more."""
    pic, run = of.pic, of.pic.training
    lines = [f"THE PAST: {stopwatch(of.ui.kept[1] - pic.time)} ago"] if of.ui.is_past else []
    lines.append(f"{pic.verdict}: {pic.why}".removesuffix(": "))
    if pic.advice:
        lines.append(f"next: {pic.advice}")
    if run:
        lines.append(_run_words(run))
    lines.append(f"hosts heard {pic.fresh} of {len(pic.hosts)}; GPUs {pic.gpus_seen} of {pic.gpus_expected}")
    for row in of.rows:
        lines += [f"{row.name}: {words}" for words in _odd(row)]
    if pic.events:
        lines += ["", "events:", *(event_line(event).plain for event in pic.events[-LINES:])]
    mine = [line for line in of.chosen_logs if of.selected and of.selected.name in line.hosts][-LINES:]
    if of.selected and mine:
        lines += ["", f"log of {of.selected.name}:", *(f"{line.where} {line.text}" for line in mine)]
    return [*lines, *(("", "more:") if commands else ()), *commands]


def _run_words(run: TrainingStatus) -> str:
    """Describe the run, omitting unknown values."""
    step = given("step {:,}", run.step) + given(" of {:,}", run.steps if run.step is not None else None)
    pace = given("{:.2f} s a step", run.step_s) + given(" (planned {:.2f})", run.expected_step_s)
    saved = given("newest checkpoint step {:,}", run.checkpoint_step) or "no checkpoint yet"
    parts = [str(run.phase), step, given("loss {:.4f}", run.loss), pace, saved, given("network {}", run.network)]
    return f"run {run.run}, attempt {run.attempt}: {'; '.join(filter(None, parts))}"


def _odd(row: HostRow) -> list[str]:
    state = [f"{row.state} {row.why}"] if row.severity else []
    ranks = [
        f"rank {rank.rank} at step {rank.step}, heard {rank.age_s:.0f} s ago: {rank.odd}"
        for rank in row.ranks
        if rank.odd
    ]
    return [*state, *row.notes, *ranks]


FAR, LEAST_ROOM = 1 << 20, 12  # lines: a jump beyond any end; the least for an opened host
MOVES = {"up": -1, "k": -1, "down": 1, "j": 1}
ASKED = {"e": "error", "y": "copy", "T": "theme", "r": "read"}  # keys that the app handles, by name of what it does
DO = "do "  # prefix of a confirmed action; its key follows
SIDEWAYS = {"left": -20, "right": 20}
BACK_S = {"left": -10.0, "right": 10.0, "[": -60.0, "]": 60.0}
SPEEDS = {"<": "slower", ">": "faster"}
TABS = {"tab": 1, "shift+tab": -1}
VIEW_KEYS = {str(number): view for number, view in enumerate(VIEWS, 1)}
PAGES: dict[str, Callable[[int], int]] = {  # lines to move, by the height of the screen
    "pageup": lambda height: min(-1, 6 - height),
    "pagedown": lambda height: max(1, height - 6),
    "home": lambda _: -FAR,
    "end": lambda _: FAR,
}


def press(ui: Ui, key: str, of: Scene, width: int, height: int) -> str:
    """Do what a key asks for, and return what is left to be done by the program: a value of ``ASKED``, ``DO``…, or ""."""
    ui.hint = ""
    came_back, ui.came_back = ui.came_back, False
    if ui.pending:
        pending, ui.pending = ui.pending, ""
        if key in ("y", "Y"):
            return f"{DO}{pending}"
        ui.hint = "nothing was done"
    elif ui.typing:
        _type(ui, key, of)
    elif wanted := "end" if key == "x" and ui.is_running else ASKED.get(key, ""):
        return wanted
    elif key in MOVES:
        _move(ui, MOVES[key], of, width)
    elif _comes_back(ui, key, came_back):
        pass
    elif key in PAGES:
        _move(ui, PAGES[key](height), of, width, is_page=True)
    elif key in ACTIONS:
        asked(ui, key, of)
    elif key in SPEEDS:
        return SPEEDS[key]
    elif key in BACK_S and not (ui.reads_log and key in SIDEWAYS):
        return _travel(ui, BACK_S[key], of.pic.time if ui.paused else ui.kept[1])
    elif not (_go(ui, key, of) or _press_in_pane(ui, key, of)):
        _choose(ui, key, of)
    return ""


def _comes_back(ui: Ui, key: str, came_back: bool) -> bool:
    """Handle keys that return from the past to now; return whether this was one. A second End is ignored once."""
    if ui.is_past and (key == "end" or (key == "escape" and len(ui.path) == 1)):
        ui.at, ui.came_back = None, True
        return True
    if key == "end" and came_back:
        ui.hint = "live again; press End again to go to the end"
        return True
    return False


def _travel(ui: Ui, by_s: float, shown: float) -> str:
    """Look at another moment; returns "skip" if that is later than now. ``shown``: the moment that is, unless it is the past."""
    first, last = ui.kept
    if ui.at is None and by_s > 0:
        return "skip"
    ui.at = max(first, (shown if ui.at is None else ui.at) + by_s)
    if ui.at >= last:
        ui.at, ui.came_back = None, True
    elif ui.at == first:
        ui.hint = "this is the start of the history"
    return ""


def _go(ui: Ui, key: str, of: Scene) -> bool:
    """Handle keys that switch views or panes or open something; return whether this was one."""
    if key in ("escape", "q", "Q"):
        _back(ui)
    elif key == "enter":
        _open(ui, of)
    elif key in VIEW_KEYS:
        ui.path, ui.down = ["all", VIEW_KEYS[key]][: 1 + (key != "1")], 0
        if ui.mode == "ranks" and of.selected and (rank := selected_rank(of.selected, ui)):
            ui.selected, ui.rank = of.selected.name, rank.rank
    elif key in ("?", "h"):
        ui.show_text("HELP", HELP.split("\n"))
    elif key in TABS and ui.mode == "all":
        ui.pane = PANES[(PANES.index(ui.pane) + TABS[key]) % len(PANES)]
    else:
        return False
    return True


def _type(ui: Ui, key: str, of: Scene) -> None:
    """Handle a key while a filter or search text is typed."""
    what = ui.filter if ui.typing == "filter" else ui.log.search
    if key == "escape":
        what = ""
    elif key == "backspace":
        what = what[:-1]
    elif len(key) == 1:
        what += key
    elif key == "space":
        what += " "
    if ui.typing == "filter":
        ui.filter = what
    else:
        ui.log.search = what
    if key == "enter" and ui.typing == "search" and what:
        _find(ui, of, back=True)
    if key in ("enter", "escape"):
        ui.typing = ""


def _back(ui: Ui) -> None:
    """Go back one level; at the top, clear the host filters."""
    if len(ui.path) > 1:
        ui.path.pop()
    else:
        ui.filter, ui.odd_only, ui.pane = "", False, PANES[0]
    ui.down = 0


def _open(ui: Ui, of: Scene) -> None:
    """Open the selected host, or in a host or the list of ranks, the selected rank."""
    if of.selected is None or ui.mode in ("text", "rank", "log", "events"):
        return
    ui.selected, ui.down = of.selected.name, 0
    if ui.mode in ("host", "ranks"):
        rank = selected_rank(of.selected, ui)
        if rank:
            ui.rank = rank.rank
            ui.path.append("rank")
    else:
        ui.path.append("host")


def _move(ui: Ui, by: int, of: Scene, width: int, *, is_page: bool = False) -> None:
    """Move the selection, or scroll."""
    if ui.reads_log:
        ui.log.at = _scrolled([line.number for line in of.chosen_logs], ui.log.at, by)
    elif ui.reads_events:
        ui.events_at = _scrolled_events(of.pic.events, ui.events_at, by)
    elif ui.mode == "text":
        ui.down = min(max(0, len(panels.whole_text(ui, width)) - 3), max(0, ui.down + by))
    elif ui.mode == "rank" or (ui.mode == "host" and is_page):
        lines = panels.opened(of, width, LEAST_ROOM)
        ui.down = min(max(0, len(lines) - 3), max(0, ui.down + by))
    elif ui.mode == "host" and of.selected:
        ranks = [rank.rank for rank in of.selected.ranks]
        if ranks and (chosen := selected_rank(of.selected, ui)):
            ui.rank = ranks[min(len(ranks) - 1, max(0, ranks.index(chosen.rank) + by))]
    elif ui.mode == "ranks":
        order = [(row.name, rank.rank) for row, rank in ranks_in_order(of.rows)]
        at = next((i for i, each in enumerate(order) if each == (ui.selected, ui.rank)), 0)
        if order:
            ui.selected, ui.rank = order[min(len(order) - 1, max(0, at + by))]
    elif of.selected:
        at = min(len(of.rows) - 1, max(0, of.rows.index(of.selected) + by))
        ui.selected, ui.rank = of.rows[at].name, None


def _scrolled(numbers: Sequence[int], at: int | None, by: int) -> int | None:
    """Return the number of the last line shown after scrolling; None to follow the newest."""
    if not numbers:
        return None
    index = len(numbers) - 1 if at is None else sum(number <= at for number in numbers) - 1
    index = max(0, index + by)
    return None if index >= len(numbers) - 1 else numbers[index]


def _scrolled_events(events: Sequence[Change], at: Change | None, by: int) -> Change | None:
    if not events:
        return None
    index = max(0, (events.index(at) if at in events else len(events) - 1) + by)
    return None if index >= len(events) - 1 else events[index]


def _find(ui: Ui, of: Scene, *, back: bool) -> None:
    """Move to the next log line that matches the search."""
    found = found_at(of.chosen_logs, ui.log, back=back)
    if found is None:
        ui.hint = f"no {'earlier' if back else 'later'} line has {ui.log.search!r}"
    else:
        ui.log.at = found


def _press_in_pane(ui: Ui, key: str, of: Scene) -> bool:
    """Handle a key in the events or log pane; return whether it has a meaning there."""
    if ui.reads_events and key == "w":
        ui.wraps_events = not ui.wraps_events
        return True
    return ui.reads_log and _press_in_log(ui, key, of)


def _press_in_log(ui: Ui, key: str, of: Scene) -> bool:
    """Handle a key in the log; return whether it has a meaning there."""
    view = ui.log
    if key == "/":
        ui.typing, view.search = "search", ""
    elif key in ("n", "N") and view.search:
        _find(ui, of, back=key == "n")
    elif key == "f":
        view.all_lines = not view.all_lines
    elif key == "L":
        view.errors_only = not view.errors_only
    elif key == "F":
        view.only = {"": "host", "host": "rank", "rank": ""}[view.only]
    elif key == "w":
        view.wraps, view.left = not view.wraps, 0
    elif key in SIDEWAYS:
        view.left = max(0, view.left + SIDEWAYS[key])
    else:
        return False
    return True


def _choose(ui: Ui, key: str, of: Scene) -> None:
    """Handle keys that change how hosts and graphs are shown."""
    if key == "/":
        ui.typing, ui.filter = "filter", ""
        ui.path, ui.pane = ["all"], PANES[0]
    elif key == "s":
        ui.sort = SORTS[(SORTS.index(ui.sort) + 1) % len(SORTS)]
    elif key == "o":
        ui.odd_only = not ui.odd_only
    elif key == "C":
        ui.hidden = (ui.hidden + 1) % (len(COLUMNS) + 1)
    elif key == "m" and (there := available(of.pic.hosts)):
        later = [index for index in there if index > panels.quantity_of(of.pic, ui)]
        ui.quantity = (later or there)[0]
    elif key in ("+", "=", "-"):
        step = -1 if key == "-" else 1
        ui.window = min(len(WINDOWS_S) - 1, max(0, ui.window + step))
    elif key in (" ", "space"):
        ui.paused = not ui.paused
    else:
        ui.hint = f"no such key: {key}; ? shows the keys"
