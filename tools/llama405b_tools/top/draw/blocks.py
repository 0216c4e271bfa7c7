"""Lines, columns and gauges, of which the screen is put together. Pure."""

import itertools
from collections.abc import Iterable, Sequence

from rich.text import Text

EIGHTHS = " ▏▎▍▌▋▊▉█"
GAP = 1  # columns between what stands side by side


def rule(title: str, width: int, *, right: str = "", focused: bool = False) -> Text:
    """Return a heading as wide as its pane; what stands at the right is omitted if there is no room."""
    style = "focus" if focused else "title"
    line = Text().append(f"── {title} ", style)
    room = width - line.cell_len - len(right) - 2
    if right and room < 0:
        right, room = "", width - line.cell_len
    line.append("─" * max(0, room if right else width - line.cell_len), style)
    return line.append(f" {right} " if right else "", style)


def fitted(line: Text, width: int) -> Text:
    """Return the line exactly so wide."""
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


def tall(lines: Sequence[Text], height: int) -> list[Text]:
    """Return exactly so many lines."""
    return [*lines[:height], *(Text() for _ in range(height - len(lines)))]


def beside(panes: Sequence[tuple[Sequence[Text], int]]) -> list[Text]:
    """Put panes, each with its width, side by side."""
    joined = []
    for row in itertools.zip_longest(*(lines for lines, _ in panes)):
        line = Text()
        for (_, width), part in zip(panes, row, strict=True):
            line.append_text(fitted(part.copy() if part else Text(), width)).append(" " * GAP)
        line.right_crop(GAP)
        joined.append(line)
    return joined


def divided(width: int, n: int) -> list[int]:
    """Divide a width among n panes with gaps between them."""
    room = width - GAP * (n - 1)
    return [room * (i + 1) // n - room * i // n for i in range(n)]


def gauge(share: float | None, width: int) -> str:
    """Draw a share of 1 as a bar of so many columns, by eighths of a column; the rest is light."""
    if share is None:
        return "·" * width
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width, "░")


def runs(cells: Iterable[tuple[str, str]]) -> Text:
    """Join characters, each with its style; equal styles that follow each other become one piece."""
    pieces: list[tuple[str, str]] = []
    for char, style in cells:
        if pieces and pieces[-1][1] == style:
            pieces[-1] = (pieces[-1][0] + char, style)
        else:
            pieces.append((char, style))
    return Text.assemble(*pieces)
