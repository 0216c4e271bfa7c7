"""cluster-top in a terminal: a Textual app that draws ``panels.screen`` and turns keys into choices.

One of our own commands that runs beside the screen: its lines as they come, and its end, after its time limit at the latest.
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
REST_S = 1.0  # for the last lines, which a process outside of its group may hold back for ever
UNDONE = "what it asked for may still be done"  # by the hosts: they are not asked to take it back


class Command:
    """A process group of its own, so that all of it can be ended."""

    def __init__(self, argv: Sequence[str], limit_s: float) -> None:
        """Start it."""
        self.limit_s = limit_s
        self.lines: list[str] = []
        self.why_ended = ""  # by us, as a sentence; "": it was not
        self.is_over = False
        self.lock = threading.Lock()
        self.child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
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
            self._signal(signal.SIGKILL)  # what is left of its group
        reader.join(REST_S)
        self.is_over = True
        return self.why_ended or f"exit code {self.child.returncode}"

    def _read(self, tell: Callable[[Sequence[str]], None]) -> None:
        assert self.child.stdout
        with self.child.stdout as stdout:
            for line in stdout:
                if self.is_over:  # somebody outside of its group still writes
                    return
                self.lines.append(clean(line.rstrip("\n")))
                tell(list(self.lines))

    def end(self, why: str) -> None:
        """Ask its processes to end, and end them if they do not; it does not wait for that."""
        with self.lock:
            if self.why_ended or self.child.poll() is not None:
                return
            self.why_ended = why
        self._signal(signal.SIGTERM)
        later = threading.Timer(KILL_AFTER_S, self._signal, (signal.SIGKILL,))
        later.daemon = True
        later.start()

    def end_now(self) -> None:
        """End its processes, when the screen ends: at once, for nobody would be left to do it."""
        if self.child.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(REST_S / 2)
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)


SKIP_S, MOST_SPEED = 10.0, 64.0  # of a recording
TICK_S, DRAW_EVERY_S, DRAW_LEAST_S = 0.25, 1.0, 2.0
DRAW_SHARE = 1 / 30  # of the time, for drawing
FIRST_ERROR = "FIRST ERROR"
NOT_DRAWN = Picture(0.0, 0.0, "", Verdict.CONNECTING, "", 0, (), None, (), 0, 0, 0)


def run_app(session: Session, files: Sequence[Path] = (), on_change: str = "", exporter: Exporter | None = None) -> int:
    """Show the screen until the user quits.

    Returns the exit code of the last picture, 128 + the signal, or ``READ_AGAIN`` if one of the hosts ``files`` has changed and the
    user wants it to be read.
    """
    for name in (
        ("COLUMNS", "LINES") if not in_browser() else ()
    ):  # the terminal itself reports its size, and any change of it
        os.environ.pop(name, None)
    app = TopApp(session, terminal_keeper(), files, on_change, exporter)
    code = app.run(mouse=False)
    if code is None:
        code = app.pic.exit_code
    if code != READ_AGAIN:
        leave_soon(code)  # even if a thread still waits for a host
    return code


class Canvas(Widget):
    """Lines of text over the whole screen; only those that change are written."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Text] = []
        self.look = Console()

    def put(self, lines: list[Text], look: Console) -> None:
        """Show these lines, in a console's styles."""
        before, self.lines = self.lines, lines
        changed = [y for y, line in enumerate(lines) if y >= len(before) or line != before[y]]
        if look is not self.look or len(lines) != len(before):
            self.look = look
            self.refresh()
        elif changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        """See ``Widget.render_line``."""
        if y >= len(self.lines):
            return Strip.blank(self.size.width)
        line = self.lines[y]
        return Strip(segments(line, self.look), line.cell_len)


class TopApp(App[int]):
    """The screen and its keys."""

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
        self.n_colors = remembered.color_count()  # before textual, which takes NO_COLOR away
        super().__init__(ansi_color=True)
        self.restore = restore
        self.session, self.ui = session, session.ui
        session.keep()
        self.pic, self.logs = NOT_DRAWN, list[LogLine]()
        self.past: tuple[float, Picture] | None = None  # the moment that is looked at, and its picture
        self.draw_at = 0.0  # when to draw again
        self.files = {file: _stamp(file) for file in files}
        self.hosts_file = next(iter(files), "")
        self.kept = remembered.of(self.ui)
        self.commands: dict[str, Command] = {}  # of ours that run now, as they were typed
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
        """Write control sequences to the terminal, which show nothing."""
        if self._driver is not None:
            self._driver.write(text)

    def compose(self) -> ComposeResult:
        """One widget that fills the screen."""
        yield Canvas()

    def on_mount(self) -> None:
        """Start sampling and drawing."""
        on_signals(functools.partial(self.end, asyncio.get_running_loop()), self.restore)
        self.write(PUSH_TITLE)
        self.set_interval(TICK_S, self.tick)
        self.tick()

    def end(self, loop: asyncio.AbstractEventLoop, code: int) -> None:
        """End after a signal, even if the terminal is gone."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self.exit, code)

    def tick(self) -> None:
        """Take what arrived, and draw if it is time: every second, of many hosts every two."""
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
        """Notice that a hosts file has changed."""
        for file, stamp in self.files.items():
            if (now := _stamp(file)) != stamp:
                self.files[file] = now
                self.session.cluster.note(f"{file} has changed: r reads it again", self.session.source.now())

    def look_again(self) -> None:
        """Take a new picture, unless the screen is to stand still."""
        pic = self.session.picture(logs=True)
        self.changes.see(pic)
        if self.exporter:
            self.exporter.pic = pic
        if not self.ui.paused or self.pic is NOT_DRAWN:
            self.pic, self.logs = pic, self.session.logs.shown()

    def draw(self, size: Size | None = None) -> None:
        """Draw the picture."""
        size = size or self.size
        pic, logs = self.shown()
        lines = panels.screen(pic, self.session.trends, self.ui, logs, size.width, size.height)
        self.query_one(Canvas).put(lines, self.look)

    def shown(self) -> tuple[Picture, list[LogLine]]:
        """Return the picture and the log of the moment that is looked at."""
        ui, box = self.ui, self.session.box
        if box:
            ui.kept = box.span
        if ui.at is None or not box:
            self.past = None
            return self.pic, self.logs
        if (self.past is None or self.past[0] != ui.at) and (found := box.at(ui.at)):
            # kept as long as it is looked at: its end of the ten minutes is forgotten meanwhile
            self.past = ui.at, found
        if self.past is None:
            return self.pic, self.logs
        at, pic = self.past
        return pic, [line for line in self.logs if line.time <= at]

    def on_resize(self, event: Resize) -> None:
        """Draw for the new size."""
        if self.pic is not NOT_DRAWN:
            self.draw(event.size)

    def on_unmount(self) -> None:
        """Give the window its title back, and end our commands that still run."""
        self.write(POP_TITLE)
        for command in list(self.commands.values()):
            command.end_now()

    def action_leave(self) -> None:
        """Quit."""
        self.exit(self.pic.exit_code)

    def action_suspend_process(self) -> None:
        """Stop the job, as a terminal does: with all processes of its group, and not at all without a shell to go on from."""
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
        """Say once that leaving would end a command that stops the run; returns whether that was said only now."""
        stops = next((title for title in self.commands if " stop " in title), "")
        hint = f"`{stops}` has not ended; q again leaves, and ends it"
        if not stops or self.ui.hint == hint:
            return False
        self.ui.hint = hint
        return True

    def act(self, name: str) -> None:
        """Do what a key asks for: what changes the view is pure, the rest is done here."""
        ui = self.ui
        pic, logs = self.shown()
        of = panels.scene(pic, self.session.trends, ui, logs)
        wanted = press(ui, name, of, self.size.width, self.size.height)
        if isinstance(self.session.source, Replay):
            self._play(self.session.source, wanted)
        elif wanted in ("slower", "faster"):
            ui.hint = "only a recording has a speed"
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
        """Have a recording go on as the keys say."""
        if wanted == "skip":
            source.skip(SKIP_S)
        elif wanted in ("slower", "faster"):
            self.speed = min(MOST_SPEED, max(1 / MOST_SPEED, self.speed * (2.0 if wanted == "faster" else 0.5)))
            self.ui.hint = f"speed {self.speed:g}"
        speed = 0.0 if self.ui.paused else self.speed
        if speed != source.speed:
            source.play(speed)

    def _read_again(self) -> None:
        """Start anew with what the hosts file says now, if there is one and nothing is lost by that."""
        if not self.files:
            self.ui.hint = "there is no hosts file to read"
        elif self.session.recorder:
            self.ui.hint = "not while --record writes: a recording has the hosts of its beginning"
        else:
            self.exit(READ_AGAIN)

    def _copy(self, of: Scene) -> None:
        """Copy the log that is shown, else what is known; that is also shown."""
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
        """Do what the user agreed to: open a shell, or run one of our own commands and show what it prints."""
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
        """Run one of our commands, and show each of its lines as it comes."""
        try:
            command = Command([*own_argv("llama405b_tools.cli"), *words], limit_s)
        except OSError as error:
            self._text(title, [f"it could not be started ({reason_of(error)})"])
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
        """Show how a command ended; if it was left, as an event."""
        lines = self.commands.pop(title).lines
        self.ui.running.discard(title)
        if self.ui.mode != "text" or self.ui.title != title:
            self._complain(f"`{title}`: {ended}")
        self._answer(title, [*lines, "", ended])

    def _tell(self, title: str, lines: Sequence[str]) -> None:
        self._on_screen(self._answer, title, list(lines))

    def _on_screen(self, act: Callable[..., None], *args: object) -> None:
        """Have the thread of the screen do something, if that has not been left meanwhile."""
        if self.is_running:
            with contextlib.suppress(RuntimeError):
                self.call_from_thread(act, *args)

    def _text(self, title: str, lines: list[str]) -> None:
        self.ui.show_text(title, lines)

    def _first_error(self) -> None:
        """Show the first error: from the hosts if they are live, else from the recording's lines."""
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
        """Show an answer, if it is still waited for."""
        if self.ui.mode == "text" and self.ui.title == title:
            self._text(title, lines)
            self.draw()


def _stamp(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
