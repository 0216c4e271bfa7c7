"""cluster-top's lines of text: logs, events, help. Pure."""

import dataclasses
import datetime
import textwrap
from collections.abc import Sequence

from rich.text import Text

from llama405b.contract.phrases import given
from llama405b_tools.top.state.picture import Change, Level

SIGNS = {Level.BAD: ("✖", "bold red"), Level.WARNING: ("▲", "yellow"), Level.NOTE: ("·", "dim")}


@dataclasses.dataclass(frozen=True, slots=True)
class LogLine:
    """One (folded) line of the logs."""

    time: float
    where: str
    text: str
    is_error: bool = False
    hosts: frozenset[str] = frozenset()


def log_pane(logs: Sequence[LogLine], room: int, width: int, back: int) -> list[Text]:
    """Return the newest lines, scrolled up by ``back`` lines."""
    if room < 1:
        return []
    end = len(logs) - back
    shown = logs[max(0, end - room + 1) : end]
    lines = [rule(f"LOGS{given('  {} lines up, End: newest', back)}", width)]
    for entry in shown:
        line = _clock(entry.time)
        line.append(f"{entry.where} ", "cyan")
        line.append(f"│ {entry.text}", "red" if entry.is_error else "")
        lines.append(line)
    return lines


def event_line(event: Change) -> Text:
    """Draw one event."""
    sign, style = SIGNS[event.level]
    line = _clock(event.time)
    line.append(f"{sign} {given('{} ', event.host)}{event.text}", style)
    return line


def wrapped(line: str, width: int) -> list[str]:
    """Wrap a line of text, indenting the further lines relative to where its text begins."""
    indent = " " * min(len(line) - len(line.lstrip()) + 2, max(0, width // 4))
    return textwrap.wrap(line, max(width, 8), subsequent_indent=indent, drop_whitespace=False) or [""]


def _clock(moment: float) -> Text:
    """Begin a line with a time of day, which alone is dim: a style of the whole ``Text`` would be of all that follows."""
    clock = datetime.datetime.fromtimestamp(moment).astimezone().strftime("%H:%M:%S ")
    return Text().append(clock, "dim")


def rule(title: str, width: int) -> Text:
    """Return a heading as wide as the screen."""
    return Text(f"── {title} {'─' * max(0, width - len(title) - 4)}", "dim")
