"""The styles of values: what stands out is marked, and what is no longer heard is dim. Pure."""

from collections.abc import Collection, Iterable

from rich.text import Text

from llama405b_tools.top.state.picture import HostRow, HostState

STYLES = {0: "", 1: "warn", 2: "bad"}  # by severity
ODD, OLD = "odd", "old"


def is_victim(row: HostRow) -> bool:
    """Whether the run failed there because it failed elsewhere, or nobody knows yet where."""
    return row.state is HostState.FAILED and not row.is_culprit


def row_style(row: HostRow) -> str:
    """Return the style of a host's state and of why it is so."""
    return OLD if is_victim(row) else STYLES[row.severity]


def style_of(row: HostRow, *, odd: bool) -> str:
    """Return the style of a value: what stands out is marked; what is no longer heard, and a victim's, is dim."""
    if not row.is_heard or is_victim(row):
        return OLD
    return (STYLES[row.severity] or ODD) if odd else ""


def pieced(row: HostRow, pieces: Iterable[tuple[str, str]], odd_in: Collection[str]) -> Text:
    """Join pieces of text, each with the field that it shows ('': none), in the style of its value."""
    line = Text()
    for text, field in pieces:
        line.append(text, style_of(row, odd=field in odd_in))
    return line
