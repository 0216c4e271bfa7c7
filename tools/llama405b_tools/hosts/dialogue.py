"""A program on a host while it runs: its answers, lines of JSON with a time limit each, or its output as it comes."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from llama405b.contract.phrases import given
from llama405b_tools.hosts.transport import Connection, HostError, Stream, read_message
from llama405b_tools.text.clean import clean

T = TypeVar("T")
END = "llama405b-exit-code "  # after the output
# All that the line starts is in this shell's process group, whose other processes end with standard input. On one line, for csh.
WHILE_OPEN = (
    "trap : TERM; exec 3<&0 </dev/null 2>&1; {{ while read -r _; do :; done <&3; kill 0; }} >/dev/null 2>&1 & watcher=$!; "
    "({line}) 3<&-; code=$?; exec 2>/dev/null; kill $watcher; echo; echo {end}$code"
)


def _failed(said: str) -> HostError:
    return HostError(
        f"the connection was lost, or the program on the host failed, before it answered{given(' ({})', said)}"
    )


class Dialogue:
    """Sends and receives over a stream."""

    def __init__(self, stream: Stream, fault_of: Callable[[str], HostError] = _failed) -> None:
        """``fault_of``: says why the program ended, from its last words."""
        self.stream, self.fault_of = stream, fault_of
        self.answers: queue.Queue[tuple[str, float] | None] = queue.Queue()
        self.heard_at = 0.0  # when the last answer arrived, by this machine's clock
        self.last_words = ""  # its last output that was not an answer
        threading.Thread(target=self._read, daemon=True).start()

    def answer(self, kind: type[T], timeout_s: float) -> T:
        """Return the next answer.

        Raises:
            HostError: It does not come within ``timeout_s``, the stream ends, or it is malformed.
        """
        try:
            found = self.answers.get(timeout=timeout_s)
        except queue.Empty:
            raise HostError(f"did not answer within {timeout_s:.0f} s") from None
        if found is None:
            raise self.fault_of(self.last_words)
        text, self.heard_at = found
        return read_message(kind, text, "its answer")

    def say(self, text: str) -> None:
        """Write to its standard input.

        Raises:
            HostError: The program is gone.
        """
        self.stream.send(text)

    def end_input(self) -> None:
        """Close its standard input, which ends it."""
        self.stream.end_input()

    def close(self, within_s: float = 15.0) -> None:
        """Wait for it to end after ``end_input``; give up after ``within_s``."""
        deadline = time.monotonic() + max(0.0, within_s)
        with contextlib.suppress(queue.Empty):
            while self.answers.get(timeout=max(0.0, deadline - time.monotonic())) is not None:
                pass
        self.stream.close()

    def _read(self) -> None:
        for line in self.stream:
            if line.startswith("{"):
                self.answers.put((line, time.time()))
            else:
                self.last_words = line.strip()[:200] or self.last_words
        self.answers.put(None)


def run_streaming(
    connection: Connection,
    line: str,
    seen: Callable[[str], object],
    began: Callable[[Stream], object] = lambda _stream: None,
) -> str:
    """Run a shell line, however long it takes while the connection holds; returns its exit code, '' if that broke.

    It ends, with all that it started and that heeds SIGTERM, when its standard input is closed or the connection breaks.

    ``seen``: gets each line of its output that is not empty, cleaned; ``began``: gets its stream.

    Raises:
        HostError: It cannot be run.
    """
    code = ""
    stream = connection.stream(WHILE_OPEN.format(line=line, end=END), "")
    began(stream)
    for each in stream:
        text = clean(each.rstrip())
        if text.startswith(END):
            code = text.removeprefix(END)
        elif text:
            seen(text)
    return code
