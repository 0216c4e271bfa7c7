"""Print to the operator's terminal, with a live line for a followed run, and build a tmux session.

Nothing else depends on whether anybody reads the output. The only module that imports libtmux.
"""

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from llama405b.contract.errors import UserError, fmt_if, reason_of
from llama405b.contract.paths import RunDir
from llama405b_tools.agent.processes import remove_dead_sockets, tmux_session, tmux_socket
from llama405b_tools.hosts.fleet import command_to_type, find_hosts_file, is_local
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import wrap_in_sh

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_unwritable: dict[TextIO, str] = {}  # standard streams that could not be written, and why; '': nobody reads them
STEP = re.compile(r"step (\d+)/(\d+)  (loss \S+)  .*?([\d,]+ tokens/s)")
PRINT_EVERY_STEPS = 10  # the log has every step, the terminal above its last line every tenth
BAR_WIDTH = 20


class NoReaderError(Exception):
    """Standard output is closed, broken or full, and printing was all that was left to do."""


def show(text: str, *, end: str = "\n", error: bool = False) -> bool:
    """Print to standard output (or standard error); return whether it can be read."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, end=end, file=stream, flush=True)
    except BrokenPipeError:
        _unwritable[stream] = ""
        _discard(stream)
    except (OSError, ValueError) as fault:
        _unwritable[stream] = reason_of(fault)
        return False
    return _unwritable.get(stream) != ""


def null_stream(number: int) -> TextIO:
    """Return a file for a standard stream that was closed at the start (``>&-``)."""
    stream = os.fdopen(number, "w", closefd=False)
    _unwritable[stream] = ""
    return stream


def flush_output() -> str:
    """Flush stdout and stderr; drop what cannot be written, so that exit does not fail.

    Returns why output was lost; '' if none was, or nobody reads it.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as fault:
            if not isinstance(fault, BrokenPipeError):
                _unwritable[stream] = reason_of(fault)
            _discard(stream)
    return _unwritable.get(sys.stdout) or _unwritable.get(sys.stderr, "")


def _discard(stream: TextIO) -> None:
    # the interpreter flushes the stream again at exit: that must not fail
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Printer(Protocol):
    """Prints lines; ``show`` returns whether they can be read."""

    def show(self, lines: Sequence[str]) -> bool:
        """Print some lines."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainPrinter:
    """Prints every line as it is."""

    def show(self, lines: Sequence[str]) -> bool:
        """Print some lines."""
        return show("".join(f"{line}\n" for line in lines), end="")

    def close(self) -> None:
        """Do nothing."""


class LivePrinter:
    """Keeps the newest step in the last line of the terminal."""

    def __init__(self, console: "Console") -> None:
        from rich.live import Live

        self.live = Live(console=console, auto_refresh=False, transient=True, redirect_stderr=False)
        self.live.start()
        self.first_step: tuple[int, float] | None = None  # step, and when it was seen
        self.last_step = 0

    def show(self, lines: Sequence[str]) -> bool:
        """Print lines above the live line, or update it; every tenth step stays above."""
        from rich.text import Text

        try:
            for line in lines:
                step = STEP.match(line)
                if step:
                    self.live.update(self._line(int(step[1]), int(step[2]), f"{step[3]}  {step[4]}"))
                if not step or int(step[1]) % PRINT_EVERY_STEPS == 0 or step[1] in ("1", step[2]):
                    self.live.console.print(Text(line), soft_wrap=True)
            self.live.refresh()
        except (OSError, ValueError):
            return False
        return True

    def close(self) -> None:
        """Remove the live line."""
        self.live.stop()

    def _line(self, step: int, steps: int, details: str) -> "Table":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = time.monotonic()
        if step <= self.last_step:  # the run was resumed
            self.first_step = None
        self.last_step = step
        first, since = self.first_step = self.first_step or (step, now)
        line = Table.grid(padding=(0, 1))
        eta = f"  ETA {_format_clock((now - since) / (step - first) * (steps - step))}" if step > first else ""
        line.add_row(ProgressBar(steps, step, BAR_WIDTH), Text(f"{step}/{steps}{eta}  {details}", no_wrap=True))
        return line


def make_printer(*, plain: bool) -> Printer:
    """Return a printer of a followed run: on a terminal, and unless ``plain``, with a live line."""
    if plain or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return PlainPrinter()
    from rich.console import Console

    console = Console(highlight=False)
    return PlainPrinter() if not console.is_terminal or console.is_dumb_terminal else LivePrinter(console)


def _format_clock(seconds: float) -> str:
    """``1:02:03``, or ``2:03``."""
    minutes, remainder_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder_s:02}" if hours else f"{minutes}:{remainder_s:02}"


def operator_socket(run: str) -> str:
    """Name the operator's own tmux server for a run: never the run's, which may be on this machine too."""
    return f"{tmux_socket(RunDir.from_name(run))}-attach"


def window_command(host: Host, socket: str, *, writable: bool) -> str:
    """Return the shell line that attaches to a host's session; ``socket``: of the run's tmux server there."""
    inner = ["tmux", "-u", "-L", socket, "attach", "-t", f"={tmux_session(host.name)}"]
    if not writable:
        inner.append("-r")
    return f"unset TMUX; exec {shlex.join(terminal_command(host, shlex.join(inner)))}"


# Override settings of a user's config that keep a command from running; an older ssh ignores those it does not know.
SSH_COMMAND_OPTIONS = (
    "BatchMode=yes", "IgnoreUnknown=RemoteCommand,SessionType,ForkAfterAuthentication,StdinNull", "RemoteCommand=none",
    "SessionType=default", "ForkAfterAuthentication=no", "StdinNull=no", "ClearAllForwardings=yes",
)  # fmt: skip


def terminal_command(host: Host, line: str) -> list[str]:
    """Return the command that runs a shell line on a host, with this terminal."""
    if is_local(host):
        return ["sh", "-c", line]
    options = {"-F": os.environ.get("LLAMA405B_SSH_CONFIG", ""), "-p": fmt_if("{}", host.port)}
    words = [word for option, value in options.items() if value for word in (option, value)]
    target = fmt_if("{}@", host.user) + host.name
    ssh_options = [word for option in SSH_COMMAND_OPTIONS for word in ("-o", option)]
    return ["ssh", "-t", *ssh_options, *words, "--", target, wrap_in_sh(line)]


def build_session(sockets: Mapping[Host, str], run: str) -> str:
    """Create the session afresh, with one window per host; returns its name.

    ``sockets``: of the run's tmux server on each host where it is alive.

    Raises:
        UserError: tmux is not installed on this machine, or fails.
    """
    import libtmux
    from libtmux.exc import LibTmuxException, TmuxCommandNotFound

    os.environ.pop("TMUX", None)
    remove_dead_sockets()
    first, *others = sockets
    name, logs = tmux_session(run), command_to_type("logs", find_hosts_file(first), run)
    try:
        server = libtmux.Server(socket_name=operator_socket(run), config_file="/dev/null")
        session = server.new_session(
            name,
            attach=False,
            kill_session=True,
            window_name=first.name,
            window_command=window_command(first, sockets[first], writable=False),
        )
        session.set_option("status-right-length", 60)
        session.set_option("status-right", "Ctrl-b d detaches; the run keeps going")
        for host in others:
            session.new_window(
                host.name, attach=False, window_shell=window_command(host, sockets[host], writable=False)
            )
    except TmuxCommandNotFound:
        raise UserError(f"attach: this machine has no tmux; install it, or use `{logs} -f`") from None
    except LibTmuxException as error:
        raise UserError(f"attach: tmux could not create the session ({error}); try `{logs} -f`") from None
    return name
