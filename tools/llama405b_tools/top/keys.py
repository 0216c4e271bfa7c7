"""Handle keys: change the user's choices, or start an action on the selected host or run. Pure.

Each action is a command that the user could type; it runs after confirmation.
"""

import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llama405b.contract.errors import fmt_if
from llama405b_tools.text.figures import format_stopwatch
from llama405b_tools.top.draw import panels
from llama405b_tools.top.draw.detail import ranks_in_order, selected_rank
from llama405b_tools.top.draw.panels import RenderContext
from llama405b_tools.top.draw.ui import COLUMNS, PANES, SORTS, VIEWS, Ui, draw_event, find_line_number, help_lines
from llama405b_tools.top.state.picture import (
    GUARDING_STATES,
    OVER_PHASES,
    ClusterEvent,
    HostRow,
    TrainingStatus,
    available_quantities,
)
from llama405b_tools.top.state.trends import WINDOWS_S

SHELL = "!"
NOT_LIVE = "actions are disabled in a replay"
IN_PAST = "viewing history; End returns to live"
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
    "c": Action("save a checkpoint of {run} now", ("ask", "save", "--run", "{run}"), ASK_S),
    "p": Action("trace the next step of every rank of {run}", ("ask", "profile", "--run", "{run}"), ASK_S),
    "M": Action("tell what the memory of every rank of {run} holds", ("ask", "memory", "--run", "{run}"), ASK_S),
    "R": Action(
        "save, end this attempt of {run}, and have its guard start the next",
        ("ask", "restart", "--run", "{run}"),
        END_S,
    ),
    "S": Action("stop {run} on every host; it saves first", ("stop", "--run", "{run}"), END_S),
    SHELL: Action("open a shell on {host}", ()),
}
LIVE_ACTIONS = ("c", "p", "M", "R")  # actions that need a live run
DIAGNOSIS_LINES = 20  # log lines and events in a diagnosis


def refusals(
    *, is_live: bool, read_only: bool, has_file: bool, in_job: bool, in_browser: bool = False
) -> dict[str, str]:
    """Return, by key, why an action is disabled on this screen, whatever is selected."""
    if read_only or not is_live:
        return dict.fromkeys(ACTIONS, READ_ONLY if read_only else NOT_LIVE)
    if in_job:
        return {SHELL: IN_JOB}
    reasons = {} if has_file else {key: NO_FILE for key in ACTIONS if key != SHELL}
    return reasons | ({SHELL: IN_BROWSER} if in_browser else {})


def request_action(ui: Ui, key: str, context: RenderContext) -> None:
    """Ask for confirmation of an action, or show why it is disabled."""
    row, run = context.selected, context.view.training
    refusal = ui.refusals.get(key, "") or (IN_PAST if ui.is_past else "")
    if not refusal and key == SHELL and row is None:
        refusal = "no host is selected"
    elif not refusal and key != SHELL:
        refusal = _run_refusal(key, run)
    if refusal:
        ui.hint = refusal
        return
    if row:
        ui.selected = row.name
    ui.pending_key = key
    ui.question = ACTIONS[key].question.format(run=run.run if run else "", host=row.name if row else "")


def _run_refusal(key: str, run: TrainingStatus | None) -> str:
    """Return why an action cannot work for this run; "" if it can."""
    if run is None:
        return "there is no run on these hosts"
    if key in LIVE_ACTIONS and run.phase in OVER_PHASES:
        return f"run {run.run} is not running: {run.phase}"
    if key == "R" and run.guard not in GUARDING_STATES:
        return f"run {run.run} has no guard to restart it; stop it (S) and launch it with --resume auto"
    return ""


def action_command(key: str, run: str, hosts_file: str) -> list[str]:
    """Return the command of an action as words. ``hosts_file``: '' in a Slurm job, which has none."""
    words = [word.format(run=run) for word in ACTIONS[key].words]
    return [*words, *([hosts_file] if hosts_file else ())]


def shell_line(host: str, workdir: str) -> str:
    """Return the shell command that opens a shell on a host. ``workdir``: quoted for a shell."""
    message = shlex.quote(f"shell on {host}; exit returns to cluster-top")
    return f'echo {message}; cd {workdir}; exec "${{SHELL:-sh}}"'


def format_diagnosis(context: RenderContext, commands: Sequence[str]) -> list[str]:
    """Return the current state as text to paste into a message. ``commands``: to show more."""
    view, run = context.view, context.view.training
    lines = [f"THE PAST: {format_stopwatch(context.ui.history_span[1] - view.time)} ago"] if context.ui.is_past else []
    lines.append(f"{view.verdict}: {view.why}".removesuffix(": "))
    if view.advice:
        lines.append(f"next: {view.advice}")
    if run:
        lines.append(_describe_run(run))
    lines.append(f"hosts heard {view.fresh} of {len(view.hosts)}; GPUs {view.gpus_seen} of {view.gpus_expected}")
    for row in context.rows:
        lines += [f"{row.name}: {words}" for words in _odd_lines(row)]
    if view.events:
        lines += ["", "events:", *(draw_event(event).plain for event in view.events[-DIAGNOSIS_LINES:])]
    host_log = [line for line in context.chosen_logs if context.selected and context.selected.name in line.hosts][
        -DIAGNOSIS_LINES:
    ]
    if context.selected and host_log:
        lines += ["", f"log of {context.selected.name}:", *(f"{line.where} {line.text}" for line in host_log)]
    return [*lines, *(("", "more:") if commands else ()), *commands]


def _describe_run(run: TrainingStatus) -> str:
    """Describe the run, omitting unknown values."""
    step = fmt_if("step {:,}", run.step) + fmt_if(" of {:,}", run.steps if run.step is not None else None)
    pace = fmt_if("{:.2f} s a step", run.step_s) + fmt_if(" (planned {:.2f})", run.expected_step_s)
    saved = fmt_if("newest checkpoint step {:,}", run.checkpoint_step) or "no checkpoint yet"
    parts = [str(run.phase), step, fmt_if("loss {:.4f}", run.loss), pace, saved, fmt_if("network {}", run.network)]
    return f"run {run.run}, attempt {run.attempt}: {'; '.join(filter(None, parts))}"


def _odd_lines(row: HostRow) -> list[str]:
    state = [f"{row.state} {row.why}"] if row.severity else []
    ranks = [
        f"rank {rank.rank} at step {rank.step}, heard {rank.age_s:.0f} s ago: {rank.odd}"
        for rank in row.ranks
        if rank.odd
    ]
    return [*state, *row.notes, *ranks]


MAX_SCROLL, MIN_OPENED_LINES = 1 << 20, 12  # lines: a jump beyond any end; the least for an opened host
MOVES = {"up": -1, "k": -1, "down": 1, "j": 1}
APP_KEYS = {"e": "error", "y": "copy", "T": "theme", "r": "read"}  # keys that the app handles, by name of what it does
ACTION_PREFIX = "do "  # prefix of a confirmed action; its key follows
SIDEWAYS = {"left": -20, "right": 20}
BACK_S = {"left": -10.0, "right": 10.0, "[": -60.0, "]": 60.0}
SPEEDS = {"<": "slower", ">": "faster"}
TABS = {"tab": 1, "shift+tab": -1}
VIEW_KEYS = {str(number): view for number, view in enumerate(VIEWS, 1)}
PAGES: dict[str, Callable[[int], int]] = {  # lines to move, by the height of the screen
    "pageup": lambda height: min(-1, 6 - height),
    "pagedown": lambda height: max(1, height - 6),
    "home": lambda _: -MAX_SCROLL,
    "end": lambda _: MAX_SCROLL,
}


def press(ui: Ui, key: str, context: RenderContext, width: int, height: int) -> str:
    """Do what a key asks for, and return what is left to be done by the program: a value of ``APP_KEYS``, ``ACTION_PREFIX``…, or ""."""
    ui.hint = ""
    just_returned, ui.just_returned = ui.just_returned, False
    if ui.pending_key:
        pending_key, ui.pending_key = ui.pending_key, ""
        if key in ("y", "Y"):
            return f"{ACTION_PREFIX}{pending_key}"
        ui.hint = "nothing was done"
    elif ui.typing:
        _type_key(ui, key, context)
    elif action := "end" if key == "x" and ui.is_running else APP_KEYS.get(key, ""):
        return action
    elif key in MOVES:
        _move_selection(ui, MOVES[key], context, width)
    elif _return_to_now(ui, key, just_returned):
        pass
    elif key in PAGES:
        _move_selection(ui, PAGES[key](height), context, width, is_page=True)
    elif key in ACTIONS:
        request_action(ui, key, context)
    elif key in SPEEDS:
        return SPEEDS[key]
    elif key in BACK_S and not (ui.reads_log and key in SIDEWAYS):
        return _move_in_time(ui, BACK_S[key], context.view.time if ui.is_paused else ui.history_span[1])
    elif not (_navigate(ui, key, context) or _press_in_pane(ui, key, context)):
        _change_display(ui, key, context)
    return ""


def _return_to_now(ui: Ui, key: str, just_returned: bool) -> bool:
    """Handle keys that return from the past to now; return whether this was one. A second End is ignored once."""
    if ui.is_past and (key == "end" or (key == "escape" and len(ui.path) == 1)):
        ui.past_time, ui.just_returned = None, True
        return True
    if key == "end" and just_returned:
        ui.hint = "live again; press End again to go to the end"
        return True
    return False


def _move_in_time(ui: Ui, delta_s: float, shown_time: float) -> str:
    """Look at another moment; returns "skip" if that is later than now. ``shown_time``: the moment that is, unless it is the past."""
    first, last = ui.history_span
    if ui.past_time is None and delta_s > 0:
        return "skip"
    ui.past_time = max(first, (shown_time if ui.past_time is None else ui.past_time) + delta_s)
    if ui.past_time >= last:
        ui.past_time, ui.just_returned = None, True
    elif ui.past_time == first:
        ui.hint = "this is the start of the history"
    return ""


def _navigate(ui: Ui, key: str, context: RenderContext) -> bool:
    """Handle keys that switch views or panes or open something; return whether this was one."""
    if key in ("escape", "q", "Q"):
        _go_back(ui)
    elif key == "enter":
        _open_selected(ui, context)
    elif key in VIEW_KEYS:
        ui.path, ui.scroll = ["all", VIEW_KEYS[key]][: 1 + (key != "1")], 0
        if ui.mode == "ranks" and context.selected and (rank := selected_rank(context.selected, ui)):
            ui.selected, ui.rank = context.selected.name, rank.rank
    elif key in ("?", "h"):
        ui.show_text("HELP", help_lines())
    elif key in TABS and ui.mode == "all":
        ui.pane = PANES[(PANES.index(ui.pane) + TABS[key]) % len(PANES)]
    else:
        return False
    return True


def _type_key(ui: Ui, key: str, context: RenderContext) -> None:
    """Handle a key while a filter or search text is typed."""
    text = ui.filter if ui.typing == "filter" else ui.log.search
    if key == "escape":
        text = ""
    elif key == "backspace":
        text = text[:-1]
    elif len(key) == 1:
        text += key
    elif key == "space":
        text += " "
    if ui.typing == "filter":
        ui.filter = text
    else:
        ui.log.search = text
    if key == "enter" and ui.typing == "search" and text:
        _find_in_log(ui, context, is_backward=True)
    if key in ("enter", "escape"):
        ui.typing = ""


def _go_back(ui: Ui) -> None:
    """Go back one level; at the top, clear the host filters."""
    if len(ui.path) > 1:
        ui.path.pop()
    else:
        ui.filter, ui.odd_only, ui.pane = "", False, PANES[0]
    ui.scroll = 0


def _open_selected(ui: Ui, context: RenderContext) -> None:
    """Open the selected host, or in a host or the list of ranks, the selected rank."""
    if context.selected is None or ui.mode in ("text", "rank", "log", "events"):
        return
    ui.selected, ui.scroll = context.selected.name, 0
    if ui.mode in ("host", "ranks"):
        rank = selected_rank(context.selected, ui)
        if rank:
            ui.rank = rank.rank
            ui.path.append("rank")
    else:
        ui.path.append("host")


def _move_selection(ui: Ui, delta: int, context: RenderContext, width: int, *, is_page: bool = False) -> None:
    """Move the selection, or scroll."""
    if ui.reads_log:
        ui.log.last_number = _scroll_log([line.number for line in context.chosen_logs], ui.log.last_number, delta)
    elif ui.reads_events:
        ui.last_event = _scroll_events(context.view.events, ui.last_event, delta)
    elif ui.mode == "text":
        ui.scroll = min(max(0, len(panels.wrap_text(ui, width)) - 3), max(0, ui.scroll + delta))
    elif ui.mode == "rank" or (ui.mode == "host" and is_page):
        lines = panels.draw_opened(context, width, MIN_OPENED_LINES)
        ui.scroll = min(max(0, len(lines) - 3), max(0, ui.scroll + delta))
    elif ui.mode == "host" and context.selected:
        ranks = [rank.rank for rank in context.selected.ranks]
        if ranks and (selected := selected_rank(context.selected, ui)):
            ui.rank = ranks[min(len(ranks) - 1, max(0, ranks.index(selected.rank) + delta))]
    elif ui.mode == "ranks":
        order = [(row.name, rank.rank) for row, rank in ranks_in_order(context.rows)]
        index = next((i for i, entry in enumerate(order) if entry == (ui.selected, ui.rank)), 0)
        if order:
            ui.selected, ui.rank = order[min(len(order) - 1, max(0, index + delta))]
    elif context.selected:
        index = min(len(context.rows) - 1, max(0, context.rows.index(context.selected) + delta))
        ui.selected, ui.rank = context.rows[index].name, None


def _scroll_log(numbers: Sequence[int], current: int | None, delta: int) -> int | None:
    """Return the number of the last line shown after scrolling; None to follow the newest."""
    if not numbers:
        return None
    index = len(numbers) - 1 if current is None else sum(number <= current for number in numbers) - 1
    index = max(0, index + delta)
    return None if index >= len(numbers) - 1 else numbers[index]


def _scroll_events(events: Sequence[ClusterEvent], current: ClusterEvent | None, delta: int) -> ClusterEvent | None:
    if not events:
        return None
    index = max(0, (events.index(current) if current in events else len(events) - 1) + delta)
    return None if index >= len(events) - 1 else events[index]


def _find_in_log(ui: Ui, context: RenderContext, *, is_backward: bool) -> None:
    """Move to the next log line that matches the search."""
    line_number = find_line_number(context.chosen_logs, ui.log, back=is_backward)
    if line_number is None:
        ui.hint = f"no {'earlier' if is_backward else 'later'} line has {ui.log.search!r}"
    else:
        ui.log.last_number = line_number


def _press_in_pane(ui: Ui, key: str, context: RenderContext) -> bool:
    """Handle a key in the events or log pane; return whether it has a meaning there."""
    if ui.reads_events and key == "w":
        ui.wraps_events = not ui.wraps_events
        return True
    return ui.reads_log and _press_in_log(ui, key, context)


def _press_in_log(ui: Ui, key: str, context: RenderContext) -> bool:
    """Handle a key in the log; return whether it has a meaning there."""
    view = ui.log
    if key == "/":
        ui.typing, view.search = "search", ""
    elif key in ("n", "N") and view.search:
        _find_in_log(ui, context, is_backward=key == "n")
    elif key == "f":
        view.all_lines = not view.all_lines
    elif key == "L":
        view.errors_only = not view.errors_only
    elif key == "F":
        view.scope = {"": "host", "host": "rank", "rank": ""}[view.scope]
    elif key == "w":
        view.wraps, view.offset = not view.wraps, 0
    elif key in SIDEWAYS:
        view.offset = max(0, view.offset + SIDEWAYS[key])
    else:
        return False
    return True


def _change_display(ui: Ui, key: str, context: RenderContext) -> None:
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
    elif key == "m" and (quantities := available_quantities(context.view.hosts)):
        later = [index for index in quantities if index > panels.shown_quantity(context.view, ui)]
        ui.quantity = (later or quantities)[0]
    elif key in ("+", "=", "-"):
        step = -1 if key == "-" else 1
        ui.window = min(len(WINDOWS_S) - 1, max(0, ui.window + step))
    elif key in (" ", "space"):
        ui.is_paused = not ui.is_paused
    else:
        ui.hint = f"no such key: {key}; ? shows the keys"
