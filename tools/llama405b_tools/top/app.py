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

from llama405b.contract.errors import fmt_if, pluralize, reason_of
from llama405b.contract.software import module_argv
from llama405b_tools.hosts.transport import shell_path
from llama405b_tools.run import log_reader
from llama405b_tools.run.diagnosis import last_stacks
from llama405b_tools.run.query import ask_hosts
from llama405b_tools.run.screen import terminal_command
from llama405b_tools.text.figures import format_duration
from llama405b_tools.text.words import clean
from llama405b_tools.top import keys, remembered
from llama405b_tools.top.draw import panels
from llama405b_tools.top.draw.panels import RenderContext
from llama405b_tools.top.draw.ui import THEMES, LogLine, make_theme, styled_segments
from llama405b_tools.top.event_sources import ReplaySource
from llama405b_tools.top.exporter import POP_TITLE, PUSH_TITLE, VerdictNotifier
from llama405b_tools.top.keys import ACTION_PREFIX, press
from llama405b_tools.top.remembered import RELOAD_CODE, exit_soon, handle_signals, in_browser, terminal_restorer
from llama405b_tools.top.session import Session
from llama405b_tools.top.state.picture import ClusterVerdict, ClusterView

KILL_AFTER_S = 5.0  # between SIGTERM and SIGKILL
LAST_LINES_S = 1.0  # wait for the last lines; a process outside the group may hold the pipe open forever
MAYBE_DONE_NOTE = "the request may still be carried out"  # by the hosts, which are not asked to cancel it


class ChildProcess:
    """A command in its own process group, so that all its processes can be ended."""

    def __init__(self, argv: Sequence[str], limit_s: float) -> None:
        """Start the command."""
        self.limit_s = limit_s
        self.lines: list[str] = []
        self.end_reason = ""  # why we ended it, as a sentence; "": we did not
        self.is_over = False
        self.lock = threading.Lock()
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # its own session and process group, so that killpg also reaches its children
            start_new_session=True,
        )

    def follow(self, on_lines: Callable[[Sequence[str]], None]) -> str:
        """Wait for its end, and return how it ended, in words. ``on_lines`` takes all its lines whenever there is a new one."""
        reader = threading.Thread(target=self._read, args=(on_lines,), daemon=True)
        reader.start()
        try:
            self.process.wait(self.limit_s)
        except subprocess.TimeoutExpired:
            self.terminate(f"it took longer than {format_duration(self.limit_s)} and was ended; {MAYBE_DONE_NOTE}")
            self.process.wait()
        if self.end_reason:
            self._signal(signal.SIGKILL)  # whatever remains of its group
        reader.join(LAST_LINES_S)
        self.is_over = True
        return self.end_reason or f"exit code {self.process.returncode}"

    def _read(self, on_lines: Callable[[Sequence[str]], None]) -> None:
        assert self.process.stdout
        with self.process.stdout as stdout:
            for line in stdout:
                if self.is_over:  # a process outside the group still writes
                    return
                self.lines.append(clean(line.rstrip("\n")))
                on_lines(list(self.lines))

    def terminate(self, why: str) -> None:
        """Send SIGTERM to its processes, and SIGKILL later, without waiting."""
        with self.lock:
            if self.end_reason or self.process.poll() is not None:
                return
            self.end_reason = why
        self._signal(signal.SIGTERM)
        timer = threading.Timer(KILL_AFTER_S, self._signal, (signal.SIGKILL,))
        timer.daemon = True
        timer.start()

    def terminate_now(self) -> None:
        """End its processes at once, because the program is exiting."""
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(LAST_LINES_S / 2)
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


SKIP_S, MAX_SPEED = 10.0, 64.0  # playback of a recording
TICK_S, MIN_DRAW_INTERVAL_S, MAX_DRAW_INTERVAL_S = 0.25, 1.0, 2.0
DRAW_SHARE = 1 / 30  # most of the time to spend on drawing
FIRST_ERROR = "FIRST ERROR"
EMPTY_VIEW = ClusterView(0.0, 0.0, "", ClusterVerdict.CONNECTING, "", 0, (), None, (), 0, 0, 0)


def run_app(session: Session, files: Sequence[Path] = (), on_change: str = "") -> int:
    """Show the screen until the user quits.

    Returns the exit code of the last view, 128 + the signal number, or the reload code if the user wants changed hosts files read.
    """
    for name in (
        ("COLUMNS", "LINES") if not in_browser() else ()
    ):  # these would override the size that the terminal reports, and its changes
        os.environ.pop(name, None)
    app = TopApp(session, terminal_restorer(), files, on_change)
    # without mouse capture, so that the terminal's text selection keeps working
    code = app.run(mouse=False)
    if code is None:
        code = app.view.exit_code
    if code != RELOAD_CODE:
        exit_soon(code)  # even if a thread is still waiting for a host
    return code


class Canvas(Widget):
    """A widget of text lines over the whole screen that redraws only changed lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Text] = []
        self.text_console = Console()

    def show_lines(self, lines: list[Text], text_console: Console) -> None:
        """Show these lines with a console's styles."""
        previous, self.lines = self.lines, lines
        changed = [y for y, line in enumerate(lines) if y >= len(previous) or line != previous[y]]
        if text_console is not self.text_console or len(lines) != len(previous):
            self.text_console = text_console
            self.refresh()
        elif changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        """Return one line of the widget; see ``Widget.render_line``."""
        if y >= len(self.lines):
            return Strip.blank(self.size.width)
        line = self.lines[y]
        return Strip(styled_segments(line, self.text_console), line.cell_len)


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
    ) -> None:
        self.n_colors = remembered.color_count()  # before textual starts, which removes NO_COLOR from the environment
        super().__init__(ansi_color=True)
        self.restore = restore
        self.session, self.ui = session, session.ui
        session.start_history()
        self.view, self.logs = EMPTY_VIEW, list[LogLine]()
        self.past_view: tuple[float, ClusterView] | None = None  # the selected past moment and its view
        self.context = panels.render_context(self.view, session.trends, self.ui, self.logs)  # of what is shown
        self.draw_at = 0.0  # when to draw again
        self.canvas = Canvas()  # a tick may still draw on it once the screen has been taken down
        self.files = {file: _modified_at(file) for file in files}
        self.hosts_file = next(iter(files), "")
        self.saved_choices = remembered.current_choices(self.ui)
        self.commands: dict[str, ChildProcess] = {}  # our running commands, by command line
        session.on_view.append(VerdictNotifier(on_change, self.write, self._add_event).update)
        self.speed = session.source.speed if isinstance(session.source, ReplaySource) else 1.0
        self._choose_colors()

    def _choose_colors(self) -> None:
        styles = make_theme(remembered.theme_for(self.ui.theme), self.n_colors)
        self.text_console = Console(theme=styles, force_terminal=True, color_system="256", legacy_windows=False)

    def _add_event(self, words: str) -> None:
        self.session.cluster.note(words, self.session.source.now())

    def write(self, text: str) -> None:
        """Write control sequences to the terminal."""
        if self._driver is not None:
            self._driver.write(text)

    def compose(self) -> ComposeResult:
        """Yield the one widget that fills the screen."""
        yield self.canvas

    def on_mount(self) -> None:
        """Start sampling and drawing."""
        handle_signals(functools.partial(self.end_after_signal, asyncio.get_running_loop()), self.restore)
        self.write(PUSH_TITLE)
        self.set_interval(TICK_S, self.tick)
        self.tick()

    def end_after_signal(self, loop: asyncio.AbstractEventLoop, code: int) -> None:
        """Exit after a signal, even if the terminal is gone."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self.exit, code)

    def tick(self) -> None:
        """Process events, and draw if it is time: every second, or every two if drawing is slow."""
        self.session.advance(self.session.source.now())
        begin = time.monotonic()
        if begin < self.draw_at:
            return
        self.check_hosts_files()
        self.refresh_view()
        if not self.ui.is_paused:
            self.draw_view()
        took_s = time.monotonic() - begin
        self.draw_at = begin + min(MAX_DRAW_INTERVAL_S, max(MIN_DRAW_INTERVAL_S, took_s / DRAW_SHARE))

    def check_hosts_files(self) -> None:
        """Report hosts files that have changed."""
        for file, stamp in self.files.items():
            if (current := _modified_at(file)) != stamp:
                self.files[file] = current
                self.session.cluster.note(f"{file} has changed: r reads it again", self.session.source.now())

    def refresh_view(self) -> None:
        """Update the view, unless the screen is paused."""
        view = self.session.make_view(logs=True)
        if not self.ui.is_paused or self.view is EMPTY_VIEW:
            self.view, self.logs = view, self.session.logs.shown_lines()

    def draw_view(self, size: Size | None = None) -> None:
        """Draw the current view."""
        size = size or self.size
        view, logs = self.shown_view()
        self.context = panels.render_context(view, self.session.trends, self.ui, logs)
        lines = panels.draw_screen(self.context, size.width, size.height)
        self.canvas.show_lines(lines, self.text_console)

    def shown_view(self) -> tuple[ClusterView, list[LogLine]]:
        """Return the view and the log lines of the selected moment."""
        ui, black_box = self.ui, self.session.black_box
        if black_box:
            ui.history_span = black_box.span
        if ui.past_time is None or not black_box:
            self.past_view = None
            return self.view, self.logs
        if (self.past_view is None or self.past_view[0] != ui.past_time) and (
            snapshot := black_box.view_at(ui.past_time)
        ):
            # keep it while it is shown: it may drop out of the ten-minute history meanwhile
            self.past_view = ui.past_time, snapshot
        if self.past_view is None:
            return self.view, self.logs
        moment, view = self.past_view
        return view, [line for line in self.logs if line.time <= moment]

    def on_resize(self, event: Resize) -> None:
        """Redraw for the new size."""
        if self.view is not EMPTY_VIEW:
            self.draw_view(event.size)

    def on_unmount(self) -> None:
        """Restore the window title and end our running commands."""
        self.write(POP_TITLE)
        for command in list(self.commands.values()):
            command.terminate_now()

    def action_leave(self) -> None:
        """Quit."""
        self.exit(self.view.exit_code)

    def action_suspend_process(self) -> None:
        """Suspend the process group as a terminal does; do nothing in a browser, where no shell could resume it."""
        if in_browser():
            return
        with self.suspend():
            handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.killpg(0, signal.SIGTSTP)
            signal.signal(signal.SIGTSTP, handler)

    def on_key(self, event: Key) -> None:
        """Handle a key. Escape followed quickly by a key arrives as alt plus that key; treat it as the two keys."""
        event.stop()
        event.prevent_default()
        key = event.key.removeprefix("alt+")
        char = event.character if event.character and event.character.isprintable() else None
        for name in [char or key] if key == event.key else ["escape", char or key]:
            if name in ("q", "Q") and self.ui.path == ["all"] and not (self.ui.typing or self.ui.pending_key):
                if self._warn_before_killing():
                    self.draw_view()
                    continue
                self.action_leave()
                return
            self.press_key(name)
            self.draw_view()
        if (choices := remembered.current_choices(self.ui)) != self.saved_choices:
            self.saved_choices = choices
            remembered.save_choices(choices)

    def _warn_before_killing(self) -> bool:
        """Warn once that quitting would kill a running stop command; return whether the warning is new."""
        stop_title = next((title for title in self.commands if " stop " in title), "")
        hint = f"`{stop_title}` is still running; press q again to kill it and quit"
        if not stop_title or self.ui.hint == hint:
            return False
        self.ui.hint = hint
        return True

    def press_key(self, name: str) -> None:
        """Handle a key for what is shown: ``press`` changes the user's choices, everything else happens here."""
        ui, context = self.ui, self.context
        action = press(ui, name, context, self.size.width, self.size.height)
        if isinstance(self.session.source, ReplaySource):
            self._replay_keys(self.session.source, action)
        elif action in ("slower", "faster"):
            ui.hint = "only a recording has a playback speed"
        if action == "error":
            self._show_first_error()
        elif action == "end":
            self.commands[ui.title].terminate(f"you ended it; {MAYBE_DONE_NOTE}")
        elif action == "copy":
            self._copy_text(context)
        elif action.startswith(ACTION_PREFIX):
            self._run_action(action.removeprefix(ACTION_PREFIX))
        elif action == "theme":
            ui.theme = THEMES[1 - THEMES.index(remembered.theme_for(ui.theme))]
            self._choose_colors()
        elif action == "read":
            self._reload()

    def _replay_keys(self, source: ReplaySource, action: str) -> None:
        """Skip in a recording, or change its speed."""
        if action == "skip":
            source.skip(SKIP_S)
        elif action in ("slower", "faster"):
            self.speed = min(MAX_SPEED, max(1 / MAX_SPEED, self.speed * (2.0 if action == "faster" else 0.5)))
            self.ui.hint = f"speed {self.speed:g}"
        speed = 0.0 if self.ui.is_paused else self.speed
        if speed != source.speed:
            source.play(speed)

    def _reload(self) -> None:
        """Restart with the changed hosts file, if there is one and no recording is being written."""
        if not self.files:
            self.ui.hint = "there is no hosts file to read"
        elif self.session.recorder:
            self.ui.hint = "not possible with --record: a recording keeps its initial hosts"
        else:
            self.exit(RELOAD_CODE)

    def _copy_text(self, context: RenderContext) -> None:
        """Copy the visible log lines, else a diagnosis, which is also shown."""
        if self.ui.reads_log:
            lines = [line.text for line in panels.shown_logs(context, self.size.height)]
            self.ui.hint = f"copied {pluralize(len(lines), 'line')}"
        else:
            verbs = ("status", "logs --first-error", "doctor")
            lines = keys.format_diagnosis(
                context, [self._command_text(verb) for verb in verbs] if self.session.fleet else ()
            )
            self._show_text("COPIED", lines)
        self.copy_to_clipboard("".join(f"{line}\n" for line in lines))

    def _command_text(self, verb: str) -> str:
        run = self.session.cluster.run if verb != "doctor" else ""
        return f"{self.session.cluster.program} {verb}{self.session.cluster.hosts_argument}{fmt_if(' --run {}', run)}"

    def _run_action(self, key: str) -> None:
        """Run a confirmed action: open a shell, or run one of our commands and show its output."""
        fleet = self.session.fleet
        if fleet is None:
            return
        if key == keys.SHELL:
            host = fleet.hosts[self.ui.selected]
            line = keys.shell_line(host.name, shell_path(fleet.workdir(host.name)))
            with self.suspend():
                subprocess.run(terminal_command(host, line), check=False)
            self.refresh()
            return
        words = keys.action_command(key, self.session.cluster.run, str(self.hosts_file))
        title = f"{self.session.cluster.program} {' '.join(words)}"
        running = self.commands.get(title)
        self._show_text(title, list(running.lines) if running else ["…"])
        if running is None:
            self._start_command(title, words, keys.ACTIONS[key].limit_s)

    def _start_command(self, title: str, words: Sequence[str], limit_s: float) -> None:
        """Run one of our commands and show its output as it arrives."""
        try:
            command = ChildProcess([*module_argv("llama405b_tools.cli"), *words], limit_s)
        except OSError as error:
            self._show_text(title, [f"cannot start it ({reason_of(error)})"])
            return
        self.commands[title] = command
        self.ui.running_titles.add(title)

        def follow() -> None:
            outcome = command.follow(lambda lines: self._post_lines(title, lines))
            if words[0] == "autopsy":
                self.ui.stacks_time, self.ui.stacks = last_stacks(self.session.cluster.run)
            self._call_on_screen(self._show_end, title, outcome)

        threading.Thread(target=follow, daemon=True).start()

    def _show_end(self, title: str, outcome: str) -> None:
        """Show how a command ended; as an event if its text is no longer shown."""
        lines = self.commands.pop(title).lines
        self.ui.running_titles.discard(title)
        if self.ui.mode != "text" or self.ui.title != title:
            self._add_event(f"`{title}`: {outcome}")
        self._update_text(title, [*lines, "", outcome])

    def _post_lines(self, title: str, lines: Sequence[str]) -> None:
        self._call_on_screen(self._update_text, title, list(lines))

    def _call_on_screen(self, act: Callable[..., None], *args: object) -> None:
        """Run a function in the app's thread, unless the app is exiting."""
        if self.is_running:
            with contextlib.suppress(RuntimeError):
                self.call_from_thread(act, *args)

    def _show_text(self, title: str, lines: list[str]) -> None:
        self.ui.show_text(title, lines)

    def _show_first_error(self) -> None:
        """Show the first error: from the live hosts, else from the recording's log lines."""
        fleet, run = self.session.fleet, self.session.cluster.requested_run or self.session.cluster.run
        if fleet is None:
            line_number = self.session.logs.first_error()
            if line_number is None:
                self._show_text(FIRST_ERROR, ["no error in the lines so far"])
            else:
                self.ui.path, self.ui.log.last_number = ["all", "log"], line_number + 3
            return
        self._show_text(FIRST_ERROR, ["asking every host …"])

        def search() -> None:
            try:
                lines = log_reader.find_first_error(ask_hosts(fleet, run or None))[1]
            except Exception as error:  # noqa: BLE001 - shown on screen, which continues
                lines = [str(error)]
            self._post_lines(FIRST_ERROR, lines)

        threading.Thread(target=search, daemon=True).start()

    def _update_text(self, title: str, lines: list[str]) -> None:
        """Update the shown text, if it is still the one with this title."""
        if self.ui.mode == "text" and self.ui.title == title:
            self._show_text(title, lines)
            self.draw_view()


def _modified_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
