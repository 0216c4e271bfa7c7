"""cluster-top in a terminal: a Textual app that draws the screen and handles keys.

It also runs our own commands in the background, shows their output as it arrives, and ends them after their time limit.
"""

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from rich.console import Console
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Key, Resize
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from llama405b.contract.errors import counted, given, reason_of
from llama405b.contract.software import own_argv
from llama405b_tools.hosts.transport import shell_path
from llama405b_tools.run import log_reader
from llama405b_tools.run.autopsy import last_stacks
from llama405b_tools.run.query import ask_hosts
from llama405b_tools.run.screen import at_terminal
from llama405b_tools.text.figures import span
from llama405b_tools.text.words import clean
from llama405b_tools.top import keys, remembered
from llama405b_tools.top.draw import panels
from llama405b_tools.top.draw.panels import Scene
from llama405b_tools.top.draw.ui import THEMES, LogLine, segments, theme
from llama405b_tools.top.event_sources import Replay
from llama405b_tools.top.exporter import POP_TITLE, PUSH_TITLE, Changes, Exporter
from llama405b_tools.top.keys import DO, press
from llama405b_tools.top.remembered import READ_AGAIN, in_browser, leave_soon, on_signals, terminal_keeper
from llama405b_tools.top.session import Session
from llama405b_tools.top.state.picture import Picture, Verdict

KILL_AFTER_S = 5.0  # between SIGTERM and SIGKILL
REST_S = 1.0  # wait for the last lines; a process outside the group may hold the pipe open forever
UNDONE = "the request may still be carried out"  # by the hosts, which are not asked to cancel it


class Command:
    """A command in its own process group, so that all its processes can be ended."""

    def __init__(self, argv: Sequence[str], limit_s: float) -> None:
        """Start the command."""
        self.limit_s = limit_s
        self.lines: list[str] = []
        self.why_ended = ""  # why we ended it, as a sentence; "": we did not
        self.is_over = False
        self.lock = threading.Lock()
        self.child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # its own session and process group, so that killpg also reaches its children
            start_new_session=True,
        )

    def follow(self, tell: Callable[[Sequence[str]], None]) -> str:
        """Wait for its end, and return how it ended, in words. ``tell`` takes all its lines whenever there is a new one."""
        reader = threading.Thread(target=self._read, args=(tell,), daemon=True)
        reader.start()
        try:
            self.child.wait(self.limit_s)
        except subprocess.TimeoutExpired:
            self.end(f"it took longer than {span(self.limit_s)} and was ended; {UNDONE}")
            self.child.wait()
        if self.why_ended:
            self._signal(signal.SIGKILL)  # whatever remains of its group
        reader.join(REST_S)
        self.is_over = True
        return self.why_ended or f"exit code {self.child.returncode}"

    def _read(self, tell: Callable[[Sequence[str]], None]) -> None:
        assert self.child.stdout
        with self.child.stdout as stdout:
            for line in stdout:
                if self.is_over:  # a process outside the group still writes
                    return
                self.lines.append(clean(line.rstrip("\n")))
                tell(list(self.lines))

    def end(self, why: str) -> None:
        """Send SIGTERM to its processes, and SIGKILL later, without waiting."""
        with self.lock:
            if self.why_ended or self.child.poll() is not None:
                return
            self.why_ended = why
        self._signal(signal.SIGTERM)
        later = threading.Timer(KILL_AFTER_S, self._signal, (signal.SIGKILL,))
        later.daemon = True
        later.start()

    def end_now(self) -> None:
        """End its processes at once, because the program is exiting."""
        if self.child.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(REST_S / 2)
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)


SKIP_S, MOST_SPEED = 10.0, 64.0  # playback of a recording
TICK_S, DRAW_EVERY_S, DRAW_LEAST_S = 0.25, 1.0, 2.0
DRAW_SHARE = 1 / 30  # most of the time to spend on drawing
FIRST_ERROR = "FIRST ERROR"
NOT_DRAWN = Picture(0.0, 0.0, "", Verdict.CONNECTING, "", 0, (), None, (), 0, 0, 0)


def run_app(session: Session, files: Sequence[Path] = (), on_change: str = "", exporter: Exporter | None = None) -> int:
    """Show the screen until the user quits.

    Returns the exit code of the last view, 128 + the signal number, or the reload code if the user wants changed hosts files read.
    """
    for name in (
        ("COLUMNS", "LINES") if not in_browser() else ()
    ):  # these would override the size that the terminal reports, and its changes
        os.environ.pop(name, None)
    app = TopApp(session, terminal_keeper(), files, on_change, exporter)
    # without mouse capture, so that the terminal's text selection keeps working
    code = app.run(mouse=False)
    if code is None:
        code = app.pic.exit_code
    if code != READ_AGAIN:
        leave_soon(code)  # even if a thread is still waiting for a host
    return code


class Canvas(Widget):
    """A widget of text lines over the whole screen that redraws only changed lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Text] = []
        self.look = Console()

    def put(self, lines: list[Text], look: Console) -> None:
        """Show these lines with a console's styles."""
        before, self.lines = self.lines, lines
        changed = [y for y, line in enumerate(lines) if y >= len(before) or line != before[y]]
        if look is not self.look or len(lines) != len(before):
            self.look = look
            self.refresh()
        elif changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        """Return one line of the widget; see ``Widget.render_line``."""
        if y >= len(self.lines):
            return Strip.blank(self.size.width)
        line = self.lines[y]
        return Strip(segments(line, self.look), line.cell_len)


class TopApp(App[int]):
    """The Textual app: the screen and its keys."""

    CSS = "Screen, Canvas { overflow: hidden; background: ansi_default; color: ansi_default; } Canvas { width: 100%; height: 100%; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "leave", priority=True),  # before on_key, which takes all others
        Binding("ctrl+z", "suspend_process", priority=True),
    ]

    def __init__(
        self,
        session: Session,
        restore: Callable[[], None],
        files: Sequence[Path] = (),
        on_change: str = "",
        exporter: Exporter | None = None,
    ) -> None:
        self.n_colors = remembered.color_count()  # before textual starts, which removes NO_COLOR from the environment
        super().__init__(ansi_color=True)
        self.restore = restore
        self.session, self.ui = session, session.ui
        session.keep()
        self.pic, self.logs = NOT_DRAWN, list[LogLine]()
        self.past: tuple[float, Picture] | None = None  # the selected past moment and its view
        self.draw_at = 0.0  # when to draw again
        self.files = {file: _stamp(file) for file in files}
        self.hosts_file = next(iter(files), "")
        self.kept = remembered.of(self.ui)
        self.commands: dict[str, Command] = {}  # our running commands, by command line
        self.changes = Changes(on_change, self.write, self._complain)
        self.exporter = exporter
        self.speed = session.source.speed if isinstance(session.source, Replay) else 1.0
        self._choose_colors()

    def _choose_colors(self) -> None:
        look = theme(remembered.theme_for(self.ui.theme), self.n_colors)
        self.look = Console(theme=look, force_terminal=True, color_system="256", legacy_windows=False)

    def _complain(self, words: str) -> None:
        self.session.cluster.note(words, self.session.source.now())

    def write(self, text: str) -> None:
        """Write control sequences to the terminal."""
        if self._driver is not None:
            self._driver.write(text)

    def compose(self) -> ComposeResult:
        """Yield the one widget that fills the screen."""
        yield Canvas()

    def on_mount(self) -> None:
        """Start sampling and drawing."""
        on_signals(functools.partial(self.end, asyncio.get_running_loop()), self.restore)
        self.write(PUSH_TITLE)
        self.set_interval(TICK_S, self.tick)
        self.tick()

    def end(self, loop: asyncio.AbstractEventLoop, code: int) -> None:
        """Exit after a signal, even if the terminal is gone."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self.exit, code)

    def tick(self) -> None:
        """Process events, and draw if it is time: every second, or every two if drawing is slow."""
        self.session.advance(self.session.source.now())
        begin = time.monotonic()
        if begin < self.draw_at:
            return
        self.look_at_files()
        self.look_again()
        if not self.ui.paused:
            self.draw()
        took_s = time.monotonic() - begin
        self.draw_at = begin + min(DRAW_LEAST_S, max(DRAW_EVERY_S, took_s / DRAW_SHARE))

    def look_at_files(self) -> None:
        """Report hosts files that have changed."""
        for file, stamp in self.files.items():
            if (now := _stamp(file)) != stamp:
                self.files[file] = now
                self.session.cluster.note(f"{file} has changed: r reads it again", self.session.source.now())

    def look_again(self) -> None:
        """Update the view, unless the screen is paused."""
        pic = self.session.picture(logs=True)
        self.changes.see(pic)
        if self.exporter:
            self.exporter.pic = pic
        if not self.ui.paused or self.pic is NOT_DRAWN:
            self.pic, self.logs = pic, self.session.logs.shown()

    def draw(self, size: Size | None = None) -> None:
        """Draw the current view."""
        size = size or self.size
        pic, logs = self.shown()
        lines = panels.screen(pic, self.session.trends, self.ui, logs, size.width, size.height)
        self.query_one(Canvas).put(lines, self.look)

    def shown(self) -> tuple[Picture, list[LogLine]]:
        """Return the view and the log lines of the selected moment."""
        ui, box = self.ui, self.session.box
        if box:
            ui.kept = box.span
        if ui.at is None or not box:
            self.past = None
            return self.pic, self.logs
        if (self.past is None or self.past[0] != ui.at) and (found := box.at(ui.at)):
            # keep it while it is shown: it may drop out of the ten-minute history meanwhile
            self.past = ui.at, found
        if self.past is None:
            return self.pic, self.logs
        at, pic = self.past
        return pic, [line for line in self.logs if line.time <= at]

    def on_resize(self, event: Resize) -> None:
        """Redraw for the new size."""
        if self.pic is not NOT_DRAWN:
            self.draw(event.size)

    def on_unmount(self) -> None:
        """Restore the window title and end our running commands."""
        self.write(POP_TITLE)
        for command in list(self.commands.values()):
            command.end_now()

    def action_leave(self) -> None:
        """Quit."""
        self.exit(self.pic.exit_code)

    def action_suspend_process(self) -> None:
        """Suspend the process group as a terminal does; do nothing in a browser, where no shell could resume it."""
        if in_browser():
            return
        with self.suspend():
            before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.killpg(0, signal.SIGTSTP)
            signal.signal(signal.SIGTSTP, before)

    def on_key(self, event: Key) -> None:
        """Handle a key. Escape followed quickly by a key arrives as alt plus that key; treat it as the two keys."""
        event.stop()
        event.prevent_default()
        key = event.key.removeprefix("alt+")
        char = event.character if event.character and event.character.isprintable() else None
        for name in [char or key] if key == event.key else ["escape", char or key]:
            if name in ("q", "Q") and self.ui.path == ["all"] and not (self.ui.typing or self.ui.pending):
                if self._warns_of_a_stop():
                    continue
                self.action_leave()
                return
            self.act(name)
        if (chosen := remembered.of(self.ui)) != self.kept:
            self.kept = chosen
            remembered.remember(chosen)
        self.draw()

    def _warns_of_a_stop(self) -> bool:
        """Warn once that quitting would kill a running stop command; return whether the warning is new."""
        stops = next((title for title in self.commands if " stop " in title), "")
        hint = f"`{stops}` is still running; press q again to kill it and quit"
        if not stops or self.ui.hint == hint:
            return False
        self.ui.hint = hint
        return True

    def act(self, name: str) -> None:
        """Handle a key: ``press`` changes the user's choices, everything else happens here."""
        ui = self.ui
        pic, logs = self.shown()
        of = panels.scene(pic, self.session.trends, ui, logs)
        wanted = press(ui, name, of, self.size.width, self.size.height)
        if isinstance(self.session.source, Replay):
            self._play(self.session.source, wanted)
        elif wanted in ("slower", "faster"):
            ui.hint = "only a recording has a playback speed"
        if wanted == "error":
            self._first_error()
        elif wanted == "end":
            self.commands[ui.title].end(f"you ended it; {UNDONE}")
        elif wanted == "copy":
            self._copy(of)
        elif wanted.startswith(DO):
            self._do(wanted.removeprefix(DO))
        elif wanted == "theme":
            ui.theme = THEMES[1 - THEMES.index(remembered.theme_for(ui.theme))]
            self._choose_colors()
        elif wanted == "read":
            self._read_again()

    def _play(self, source: Replay, wanted: str) -> None:
        """Skip in a recording, or change its speed."""
        if wanted == "skip":
            source.skip(SKIP_S)
        elif wanted in ("slower", "faster"):
            self.speed = min(MOST_SPEED, max(1 / MOST_SPEED, self.speed * (2.0 if wanted == "faster" else 0.5)))
            self.ui.hint = f"speed {self.speed:g}"
        speed = 0.0 if self.ui.paused else self.speed
        if speed != source.speed:
            source.play(speed)

    def _read_again(self) -> None:
        """Restart with the changed hosts file, if there is one and no recording is being written."""
        if not self.files:
            self.ui.hint = "there is no hosts file to read"
        elif self.session.recorder:
            self.ui.hint = "not possible with --record: a recording keeps its initial hosts"
        else:
            self.exit(READ_AGAIN)

    def _copy(self, of: Scene) -> None:
        """Copy the visible log lines, else a diagnosis, which is also shown."""
        if self.ui.reads_log:
            lines = [line.text for line in panels.shown_logs(of, self.size.height)]
            self.ui.hint = f"copied {counted(len(lines), 'line')}"
        else:
            verbs = ("status", "logs --first-error", "doctor")
            lines = keys.diagnosis(of, [self._typed(verb) for verb in verbs] if self.session.fleet else ())
            self._text("COPIED", lines)
        self.copy_to_clipboard("".join(f"{line}\n" for line in lines))

    def _typed(self, verb: str) -> str:
        run = self.session.cluster.run if verb != "doctor" else ""
        return f"{self.session.cluster.program} {verb}{self.session.cluster.hosts_argument}{given(' --run {}', run)}"

    def _do(self, key: str) -> None:
        """Run a confirmed action: open a shell, or run one of our commands and show its output."""
        fleet = self.session.fleet
        if fleet is None:
            return
        if key == keys.SHELL:
            host = fleet.hosts[self.ui.selected]
            line = keys.shell_line(host.name, shell_path(fleet.workdir(host.name)))
            with self.suspend():
                subprocess.run(at_terminal(host, line), check=False)
            self.refresh()
            return
        words = keys.words_of(key, self.session.cluster.run, str(self.hosts_file))
        title = f"{self.session.cluster.program} {' '.join(words)}"
        known = self.commands.get(title)
        self._text(title, list(known.lines) if known else ["…"])
        if known is None:
            self._start(title, words, keys.ACTIONS[key].limit_s)

    def _start(self, title: str, words: Sequence[str], limit_s: float) -> None:
        """Run one of our commands and show its output as it arrives."""
        try:
            command = Command([*own_argv("llama405b_tools.cli"), *words], limit_s)
        except OSError as error:
            self._text(title, [f"cannot start it ({reason_of(error)})"])
            return
        self.commands[title] = command
        self.ui.running.add(title)

        def follow() -> None:
            ended = command.follow(lambda lines: self._tell(title, lines))
            if words[0] == "autopsy":
                self.ui.stacks_of, self.ui.stacks = last_stacks(self.session.cluster.run)
            self._on_screen(self._ended, title, ended)

        threading.Thread(target=follow, daemon=True).start()

    def _ended(self, title: str, ended: str) -> None:
        """Show how a command ended; as an event if its text is no longer shown."""
        lines = self.commands.pop(title).lines
        self.ui.running.discard(title)
        if self.ui.mode != "text" or self.ui.title != title:
            self._complain(f"`{title}`: {ended}")
        self._answer(title, [*lines, "", ended])

    def _tell(self, title: str, lines: Sequence[str]) -> None:
        self._on_screen(self._answer, title, list(lines))

    def _on_screen(self, act: Callable[..., None], *args: object) -> None:
        """Run a function in the app's thread, unless the app is exiting."""
        if self.is_running:
            with contextlib.suppress(RuntimeError):
                self.call_from_thread(act, *args)

    def _text(self, title: str, lines: list[str]) -> None:
        self.ui.show_text(title, lines)

    def _first_error(self) -> None:
        """Show the first error: from the live hosts, else from the recording's log lines."""
        fleet, run = self.session.fleet, self.session.cluster.wanted or self.session.cluster.run
        if fleet is None:
            found = self.session.logs.first_error()
            if found is None:
                self._text(FIRST_ERROR, ["no error in the lines so far"])
            else:
                self.ui.path, self.ui.log.at = ["all", "log"], found + 3
            return
        self._text(FIRST_ERROR, ["asking every host …"])

        def look() -> None:
            try:
                lines = log_reader.find_first_error(fleet, *ask_hosts(fleet, run or None))[1]
            except Exception as error:  # noqa: BLE001 - shown on screen, which continues
                lines = [str(error)]
            self._tell(FIRST_ERROR, lines)

        threading.Thread(target=look, daemon=True).start()

    def _answer(self, title: str, lines: list[str]) -> None:
        """Update the shown text, if it is still the one with this title."""
        if self.ui.mode == "text" and self.ui.title == title:
            self._text(title, lines)
            self.draw()


def _stamp(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
