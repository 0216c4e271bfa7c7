"""The styles of values: what stands out is marked, and what is no longer heard is dim. Pure."""

from collections.abc import Collection, Iterable

from rich.text import Text

from llama405b_tools.top.state.picture import HostRow

STYLES = {0: "", 1: "yellow", 2: "bold red"}  # by severity
ODD, OLD = "bold yellow", "dim"


def style_of(row: HostRow, *, odd: bool) -> str:
    """Return the style of a value: what stands out is marked, and what is no longer heard is dim."""
    if not row.is_heard:
        return OLD
    return (STYLES[row.severity] or ODD) if odd else ""


def pieced(row: HostRow, pieces: Iterable[tuple[str, str]], odd_in: Collection[str]) -> Text:
    """Join pieces of text, each with the field that it shows ('': none), in the style of its value."""
    line = Text()
    for text, field in pieces:
        line.append(text, style_of(row, odd=field in odd_in))
    return line
