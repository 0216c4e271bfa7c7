"""cluster-top in a terminal: a Textual app that draws ``panels.screen`` and turns keys into choices."""

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from rich.console import Group
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.events import Key, Resize
from textual.geometry import Size
from textual.widgets import Static

from llama405b_tools.logs import first_error
from llama405b_tools.run.query import ask_hosts
from llama405b_tools.top.draw import panels
from llama405b_tools.top.draw.detail import detail
from llama405b_tools.top.leaving import leave_soon, on_signals, terminal_keeper
from llama405b_tools.top.session import Session
from llama405b_tools.top.state.picture import HostRow, Picture, Verdict

TICK_S, DRAW_EVERY_S = 0.25, 1.0
FAR = 1 << 20  # lines: to the very end
HELP, FIRST_ERROR = "HELP", "FIRST ERROR"
VIEWS = {  # key -> the view it opens: mode, and title of a text
    "enter": ("host", ""),
    "l": ("logs", ""),
    "v": ("events", ""),
    "e": ("text", FIRST_ERROR),
    "?": ("text", HELP),
    "h": ("text", HELP),
}
NOT_DRAWN = Picture(0.0, 0.0, "", Verdict.CONNECTING, "", 0, (), None, (), 0, 0, 0)
MOVES = {"up": -1, "k": -1, "down": 1, "j": 1}


def run_app(session: Session) -> int:
    """Show the screen until the user quits; return the exit code of the last picture, or 128 + the signal."""
    for name in ("COLUMNS", "LINES"):  # the terminal itself reports its size, and any change of it
        os.environ.pop(name, None)
    app = TopApp(session, terminal_keeper())
    code = app.run(mouse=False)
    if code is None:
        code = app.pic.exit_code
    leave_soon(code)  # even if a thread still waits for a host
    return code


class TopApp(App[int]):
    """The screen and its keys."""

    CSS = "Screen { overflow: hidden; } Static { width: 100%; height: 100%; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [("ctrl+c", "leave", "quit"), ("ctrl+z", "suspend_process", "suspend")]

    def __init__(self, session: Session, restore: Callable[[], None]) -> None:
        super().__init__()
        self.restore = restore
        self.session, self.ui = session, session.ui
        self.pic = NOT_DRAWN
        self.drawn_at = 0.0

    def compose(self) -> ComposeResult:
        """One widget that fills the screen."""
        yield Static(id="all", markup=False)

    def on_mount(self) -> None:
        """Start sampling and drawing."""
        on_signals(functools.partial(self.end, asyncio.get_running_loop()), self.restore)
        self.set_interval(TICK_S, self.tick)
        self.tick()

    def end(self, loop: asyncio.AbstractEventLoop, code: int) -> None:
        """End after a signal, even if the terminal is gone."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self.exit, code)

    def tick(self) -> None:
        """Take what arrived, and draw if it is time."""
        self.session.advance(self.session.source.now())
        if time.monotonic() - self.drawn_at >= DRAW_EVERY_S:
            self.draw()

    def draw(self, size: Size | None = None) -> None:
        """Draw the current picture."""
        self.drawn_at = time.monotonic()
        self.pic = self.session.picture(logs=True)
        size = size or self.size
        lines = panels.screen(self.pic, self.ui, self.session.logs.shown(), size.width, size.height)
        self.query_one("#all", Static).update(Group(*lines))

    def on_resize(self, event: Resize) -> None:
        """Draw for the new size."""
        if self.pic is not NOT_DRAWN:
            self.draw(event.size)

    def action_leave(self) -> None:
        """Quit."""
        self.exit(self.pic.exit_code)

    def on_key(self, event: Key) -> None:
        """Handle a key. Escape followed quickly by a key arrives as alt plus that key; treat it as the two keys."""
        event.stop()
        key = event.key.removeprefix("alt+")
        for name in [key] if key == event.key else ["escape", key]:
            if self.ui.typing:
                self._type(name, event.character)
            elif name in ("q", "Q") and self.ui.mode == "cluster":
                self.action_leave()
                return
            else:
                self._press(event.character if name != "escape" and event.character in ("/", "?") else name)
        self.draw()

    def _type(self, key: str, character: str | None) -> None:
        ui = self.ui
        if key == "enter":
            ui.typing = False
        elif key == "escape":
            ui.typing, ui.filter = False, ""
        elif key == "backspace":
            ui.filter = ui.filter[:-1]
        elif character and character.isprintable():
            ui.filter += character

    def _press(self, key: str) -> None:
        ui = self.ui
        rows = panels.ordered(self.pic, ui)
        if key in ("escape", "q", "Q"):
            if ui.mode == "cluster":
                ui.filter, ui.odd_only = "", False
            ui.mode, ui.back = "cluster", 0
        elif key in MOVES:
            self._move(rows, MOVES[key])
        elif key in ("pageup", "pagedown", "home", "end"):
            self._page(key)
        elif key in VIEWS:
            self._view(key, rows)
        elif key == "/":
            ui.typing, ui.mode = True, "cluster"
        elif key == "s":
            ui.sort = panels.SORTS[(panels.SORTS.index(ui.sort) + 1) % len(panels.SORTS)]
        elif key == "o":
            ui.odd_only = not ui.odd_only

    def _view(self, key: str, rows: list[HostRow]) -> None:
        """Open the key's view, or go back if it is open."""
        ui, (mode, title) = self.ui, VIEWS[key]
        if ui.mode == mode and title in ("", ui.title):
            ui.mode, ui.back = "cluster", 0
        elif title == FIRST_ERROR:
            self._first_error()
        elif title == HELP:
            self._text(HELP, panels.HELP.split("\n"))
        elif mode != "host" or rows:
            if row := panels.selected_row(rows, ui):
                ui.selected = row.name
            ui.mode, ui.back = mode, 0

    def _move(self, rows: list[HostRow], by: int) -> None:
        if self.ui.mode in ("logs", "events", "text"):
            self._scroll(by)
        elif row := panels.selected_row(rows, self.ui):
            at = min(len(rows) - 1, max(0, rows.index(row) + by))
            self.ui.selected = rows[at].name
            self.ui.page = panels.page_of(self.pic, self.ui, self.size.width, self.size.height)
            if self.ui.mode == "host":
                self.ui.back = 0

    def _page(self, key: str) -> None:
        if self.ui.mode == "cluster":
            last = panels.n_pages(self.pic, self.ui, self.size.width, self.size.height) - 1
            page = {"pageup": self.ui.page - 1, "pagedown": self.ui.page + 1, "home": 0, "end": last}[key]
            self.ui.page = min(last, max(0, page))
        else:
            page = max(1, self.size.height - 6)
            self._scroll({"pageup": -page, "pagedown": page, "home": -FAR, "end": FAR}[key])

    def _scroll(self, down: int) -> None:
        """Scroll by lines: a text or host counts from its beginning, logs and events from the newest."""
        logs, up = self.session.logs.shown(), -down
        most = len(logs)
        if self.ui.mode == "host":
            row = panels.selected_row(panels.ordered(self.pic, self.ui), self.ui)
            most = len(detail(row, logs, self.size.width, self.size.height - 6)) if row else 0
        elif self.ui.mode != "logs":
            most = len(panels.whole_text(self.pic, self.ui, self.size.width))
        if self.ui.mode in ("text", "host"):
            up = down
        self.ui.back = min(max(0, most - 3), max(0, self.ui.back + up))

    def _text(self, title: str, lines: list[str]) -> None:
        self.ui.mode = "text"
        self.ui.title = title
        self.ui.lines = lines
        self.ui.back = 0

    def _first_error(self) -> None:
        """Show the first error: from the hosts if they are live, else from the recording's lines."""
        fleet, run = self.session.fleet, self.session.cluster.wanted or self.session.cluster.run
        if fleet is None:
            found = self.session.logs.first_error()
            if found is None:
                self._text(FIRST_ERROR, ["no error in the lines so far"])
            else:
                self.ui.mode, self.ui.back = "logs", max(0, found - 3)
            return
        self._text(FIRST_ERROR, ["asking every host …"])

        def look() -> None:
            try:
                lines = first_error.find(fleet, *ask_hosts(fleet, run or None))[1]
            except Exception as error:  # noqa: BLE001 - shown on screen, which continues
                lines = [str(error)]
            with contextlib.suppress(RuntimeError):  # the screen was left meanwhile
                self.call_from_thread(self._text, FIRST_ERROR, lines)

        threading.Thread(target=look, daemon=True).start()
