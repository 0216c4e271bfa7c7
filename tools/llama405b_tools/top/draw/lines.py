"""cluster-top's lines of text: logs, events, help. Pure."""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Sequence

from rich.text import Text

from llama405b.contract.phrases import given
from llama405b_tools.text.figures import local_time
from llama405b_tools.top.draw.blocks import rule
from llama405b_tools.top.draw.ui import LogView
from llama405b_tools.top.state.picture import Change, Level

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


def chosen_lines(logs: Sequence[LogLine], view: LogView, host: str, rank: int | None) -> list[LogLine]:
    """Return the lines that the user wants to see. ``host`` and ``rank``: those that are selected."""
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
    """Return the newest of the chosen lines; while somebody reads, those up to where he is."""
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
    """Name what the log shows."""
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
    """Return the number of the next line (``back``: the one before) that contains what is searched for."""
    newest = chosen[-1].number if chosen else 0
    at = newest + 1 if view.at is None else view.at
    hits = [line.number for line in chosen if view.search.lower() in line.text.lower()]
    if back:
        return max((number for number in hits if number < at), default=None)
    return min((number for number in hits if number > at), default=None)


def events_pane(
    events: Sequence[Change], at: Change | None, room: int, width: int, *, wraps: bool = False, focused: bool = False
) -> list[Text]:
    """Return the newest events; while somebody reads, those up to where he is."""
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
    """Begin a line with a time of day, which alone is dim: a style of the whole ``Text`` would be of all that follows."""
    return Text().append(f"{local_time(moment)} ", "old")
