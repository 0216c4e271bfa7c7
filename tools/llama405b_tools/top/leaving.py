"""The end of cluster-top: soon after a signal or ``q``, whatever else it is doing."""

import contextlib
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
READ_AGAIN = -1  # instead of an exit code: the hosts file has changed, and is to be read
LEAVE_WITHIN_S = 1.5  # then the process exits without cleanup; samplers end with their standard input
LEAVE_SCREEN = b"\x1b[23;2t\x1b[<u\x1b[?2004l\x1b[?1004l\x1b[?1049l\x1b[?25h"  # undoes what textual sets (xterm's control sequences)


def leave_soon(code: int, restore: Callable[[], None] = lambda: None) -> None:
    """Have the process exit with this code, if it has not by then, after ``restore``."""

    def leave() -> None:
        with contextlib.suppress(Exception):
            restore()
        os._exit(code)

    last_resort = threading.Timer(LEAVE_WITHIN_S, leave)
    last_resort.daemon = True
    last_resort.start()


def on_signals(end: Callable[[int], None], restore: Callable[[], None] = lambda: None) -> None:
    """Call ``end`` with the exit code when a signal asks for the end, between any two steps of the main thread."""

    def handle(number: int, _: FrameType | None) -> None:
        leave_soon(128 + number, restore)
        end(128 + number)

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as after nohup
            signal.signal(number, handle)


def in_browser() -> bool:
    """Whether the screen is shown by textual-serve."""
    return "WebDriver" in os.environ.get("TEXTUAL_DRIVER", "")


def terminal_keeper() -> Callable[[], None]:
    """Return a function that gives the terminal back as it is now, without waiting for it; in a browser there is none."""
    if in_browser():
        return lambda: None
    before = termios.tcgetattr(sys.stdin)

    def restore() -> None:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
        os.set_blocking(sys.stderr.fileno(), False)
        os.write(sys.stderr.fileno(), LEAVE_SCREEN)

    return restore
