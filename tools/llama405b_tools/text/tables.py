"""Tables for a terminal. Pure."""

from collections.abc import Sequence

from llama405b_tools.text.clean import printable


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as columns, each as wide as it needs to be."""
    lines = [headings, *(list(map(printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
