"""Start and end of cluster-top: terminal capabilities, saved display choices, and a prompt exit.

Display choices are saved between starts, except in browsers. After a signal or ``q``, the process exits within a bounded time,
whatever its threads are doing.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from rich.console import Console

from llama405b.contract import reader
from llama405b_tools.hosts.fleet import state_directory
from llama405b_tools.top.draw.ui import COLUMNS, SORTS, THEMES, Ui, detect_background
from llama405b_tools.top.state.picture import QUANTITIES
from llama405b_tools.top.state.trends import WINDOWS_S

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
RELOAD_CODE = -1  # returned instead of an exit code to restart with a changed hosts file
LEAVE_WITHIN_S = 1.5  # then the process exits without cleanup; samplers end with their standard input
LEAVE_SCREEN = b"\x1b[23;2t\x1b[<u\x1b[?2004l\x1b[?1004l\x1b[?1049l\x1b[?25h"  # undoes what textual sets (xterm's control sequences)


def exit_soon(code: int, restore: Callable[[], None] = lambda: None) -> None:
    """Exit with this code after a time limit, calling ``restore`` first, if the process is still running."""

    def leave() -> None:
        with contextlib.suppress(Exception):
            restore()
        # skips the joining of threads, one of which may wait for a host forever
        os._exit(code)

    last_resort = threading.Timer(LEAVE_WITHIN_S, leave)
    last_resort.daemon = True
    last_resort.start()


def handle_signals(end: Callable[[int], None], restore: Callable[[], None] = lambda: None) -> None:
    """Call ``end`` with the exit code on a termination signal, and limit the time until the process exits."""

    def handle(number: int, _: FrameType | None) -> None:
        exit_soon(128 + number, restore)
        end(128 + number)

    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # keep ignored signals ignored, as after nohup
            signal.signal(number, handle)


def in_browser() -> bool:
    """Whether the screen is shown by textual-serve."""
    return "WebDriver" in os.environ.get("TEXTUAL_DRIVER", "")


def terminal_restorer() -> Callable[[], None]:
    """Return a function that restores the terminal's current state without blocking; a no-op in a browser."""
    if in_browser():
        return lambda: None
    attributes = termios.tcgetattr(sys.stdin)

    def restore() -> None:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, attributes)
        # a terminal that does not read must not block the exit
        os.set_blocking(sys.stderr.fileno(), False)
        os.write(sys.stderr.fileno(), LEAVE_SCREEN)

    return restore


@dataclasses.dataclass(frozen=True, slots=True)
class SavedChoices:
    """Display choices that are saved between starts."""

    sort: str = SORTS[0]
    window: int = 0
    quantity: int = 0
    hidden: int = 0
    theme: str = ""  # "": by what the terminal says of its background

    def __post_init__(self) -> None:
        """Refuse invalid values, such as those of another version."""
        counts = ((self.window, WINDOWS_S), (self.quantity, QUANTITIES), (self.hidden, [*COLUMNS, ""]))
        if self.sort not in SORTS or self.theme not in ("", *THEMES):
            raise ValueError
        if any(not 0 <= value < len(choices) for value, choices in counts):
            raise ValueError

    def apply(self, ui: Ui) -> None:
        """Apply the choices."""
        for field in dataclasses.fields(self):
            setattr(ui, field.name, getattr(self, field.name))


def current_choices(ui: Ui) -> SavedChoices:
    """Return the choices to save."""
    return SavedChoices(ui.sort, ui.window, ui.quantity, ui.hidden, ui.theme)


def load_choices() -> SavedChoices:
    """Load the saved choices; return the defaults if there are none or they are unreadable."""
    with contextlib.suppress(OSError, ValueError):
        text = "{}" if in_browser() else _choices_file().read_text(encoding="utf-8")
        return reader.loads(SavedChoices, text, "choices")
    return SavedChoices()


def save_choices(choices: SavedChoices) -> None:
    """Save the choices for the next start; ignore write errors."""
    if in_browser():
        return
    file = _choices_file()
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(dataclasses.asdict(choices)) + "\n", encoding="utf-8")
        temporary.replace(file)


def _choices_file() -> Path:
    return state_directory() / "top.json"


COLOR_COUNTS = {None: 0, "standard": 16, "windows": 16, "256": 256, "truecolor": 256}  # by rich's color system


def color_count() -> int:
    """Return how many colors the terminal has; 0 if the user wants none."""
    if in_browser():
        return 256
    return 0 if "NO_COLOR" in os.environ else COLOR_COUNTS[Console().color_system]


def theme_for(theme: str) -> str:
    """Return the chosen theme, or the one for the terminal's background."""
    return theme or detect_background(os.environ.get("COLORFGBG", ""))
