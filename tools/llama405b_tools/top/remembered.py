"""What cluster-top remembers from one time to the next: how the user likes to see the screen. In browsers, nothing."""

import contextlib
import dataclasses
import json
import os
from pathlib import Path

from llama405b.contract import reader
from llama405b_tools.hosts.hosts_file import state_directory
from llama405b_tools.top.draw.theme import THEMES
from llama405b_tools.top.draw.ui import COLUMNS, SORTS, Ui
from llama405b_tools.top.leaving import in_browser
from llama405b_tools.top.state.quantities import QUANTITIES
from llama405b_tools.top.state.series import WINDOWS_S


@dataclasses.dataclass(frozen=True, slots=True)
class Remembered:
    """The choices that outlive the program."""

    sort: str = SORTS[0]
    window: int = 0
    quantity: int = 0
    hidden: int = 0
    theme: str = ""  # "": by what the terminal says of its background

    def __post_init__(self) -> None:
        """Refuse what another version may have written."""
        counts = ((self.window, WINDOWS_S), (self.quantity, QUANTITIES), (self.hidden, [*COLUMNS, ""]))
        if self.sort not in SORTS or self.theme not in ("", *THEMES):
            raise ValueError
        if any(not 0 <= value < len(choices) for value, choices in counts):
            raise ValueError

    def put(self, ui: Ui) -> None:
        """Choose it."""
        for field in dataclasses.fields(self):
            setattr(ui, field.name, getattr(self, field.name))


def of(ui: Ui) -> Remembered:
    """Return what is to be remembered."""
    return Remembered(ui.sort, ui.window, ui.quantity, ui.hidden, ui.theme)


def recall() -> Remembered:
    """Return what was chosen the last time; without that, or if it cannot be read, the defaults."""
    with contextlib.suppress(OSError, ValueError):
        text = "{}" if in_browser() else _file().read_text(encoding="utf-8")
        return reader.loads(Remembered, text, "choices")
    return Remembered()


def remember(chosen: Remembered) -> None:
    """Keep the choices for the next time, if they can be written."""
    if in_browser():
        return
    file = _file()
    new = file.with_name(f"{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(dataclasses.asdict(chosen)) + "\n", encoding="utf-8")
        new.replace(file)


def _file() -> Path:
    return state_directory() / "top.json"
