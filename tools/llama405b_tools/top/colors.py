"""What this terminal can show."""

import os

from rich.console import Console

from llama405b_tools.top.draw.theme import background
from llama405b_tools.top.leaving import in_browser

COUNTS = {None: 0, "standard": 16, "windows": 16, "256": 256, "truecolor": 256}  # by what rich finds


def count() -> int:
    """Return how many colors the terminal has; 0 if the user wants none."""
    if in_browser():
        return 256
    return 0 if "NO_COLOR" in os.environ else COUNTS[Console().color_system]


def theme_for(chosen: str) -> str:
    """Return the theme that the user has chosen; without that, the one for the terminal's background."""
    return chosen or background(os.environ.get("COLORFGBG", ""))
