"""What the names of styles look like: on a dark and a light background, in 16 colors, and in none. Pure.

The drawing modules name a style by what it says (``bad``, ``warn``, ``old``, ``heat.7``); only this module knows colors. The
background is always the terminal's own.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.segment import Segment
from rich.text import Text
from rich.theme import Theme

N_HEAT = 8  # of heat, from cold to hot: as many as there are bars
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
    "plan.on": "none",  # across the filled area of a graph
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
    """Return the styles for a background (``THEMES``), on a terminal with so many colors (0: none, or NO_COLOR is set)."""
    if n_colors < 256:
        return Theme(PLAIN if n_colors < 16 else SIXTEEN, inherit=False)
    return Theme(SIXTEEN | COLORS[name] | _ramp(*RAMPS[name]), inherit=False)


def _ramp(colors: Sequence[int], inks: Sequence[int]) -> dict[str, str]:
    """Return the cells of heat: full blocks (``heat``), and numbers on them (``cell``)."""
    heat = {f"heat.{i}": f"color({color}) on color({color})" for i, color in enumerate(colors)}
    cell = {
        f"cell.{i}": f"color({ink}) on color({color})" for i, (color, ink) in enumerate(zip(colors, inks, strict=True))
    }
    return heat | cell


def segments(line: Text, look: Console) -> list[Segment]:
    """Return a line's pieces with their styles; ``Text.render`` omits the style of a line without pieces."""
    if line.spans:
        return [part for part in line.render(look) if part.text != "\n"]
    return [Segment(line.plain, look.get_style(line.style))]


def background(colorfgbg: str) -> str:
    """Return the theme for what a terminal says of its background in COLORFGBG: ``15;0``, and so on; dark if unknown."""
    last = colorfgbg.rpartition(";")[2]
    return "light" if last in ("7", "15") else "dark"
