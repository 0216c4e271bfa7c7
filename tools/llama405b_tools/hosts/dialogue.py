"""A program on a host that answers with lines of JSON; every answer has a time limit."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from llama405b.contract import reader
from llama405b.contract.phrases import given
from llama405b_tools.hosts.transport import HostError, Stream

T = TypeVar("T")


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
        try:
            return reader.loads(kind, text, "its answer")
        except reader.MalformedError as error:
            raise HostError(f"{error}; do both ends run the same version?") from None

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
