"""One of our own commands that runs beside the screen: its lines as they come, and its end, after its time limit at the latest."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

from llama405b_tools.text.clean import clean
from llama405b_tools.text.figures import span

KILL_AFTER_S = 5.0  # between SIGTERM and SIGKILL
REST_S = 1.0  # for the last lines, which a process outside of its group may hold back for ever
UNDONE = "what it asked for may still be done"  # by the hosts: they are not asked to take it back


class Command:
    """A process group of its own, so that all of it can be ended."""

    def __init__(self, argv: Sequence[str], limit_s: float) -> None:
        """Start it.

        Raises:
            OSError: It cannot be started.
        """
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
