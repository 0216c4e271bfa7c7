"""A program on a host that answers with lines of JSON; every answer has a limit of time."""

import contextlib
import queue
import threading
import time
from typing import TypeVar

from llama405b.contract import reader
from llama405b.contract.phrases import given
from llama405b_tools.hosts.transport import HostError, Stream

T = TypeVar("T")


class Dialogue:
    """Says and hears, over a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.answers: queue.Queue[tuple[str, float] | None] = queue.Queue()
        self.heard_at = 0.0  # when the last answer arrived; this machine's clock
        self.last_words = ""  # what it said that was no answer
        threading.Thread(target=self._read, daemon=True).start()

    def answer(self, kind: type[T], timeout_s: float) -> T:
        """The next answer.

        Raises:
            HostError: There is none within ``timeout_s``, there will be none, or it is malformed.
        """
        try:
            found = self.answers.get(timeout=timeout_s)
        except queue.Empty:
            raise HostError(f"did not answer within {timeout_s:.0f} s") from None
        if found is None:
            said = given(" ({})", self.last_words)
            raise HostError(f"the connection broke, or the program there failed, before it answered{said}")
        text, self.heard_at = found
        try:
            return reader.loads(kind, text, "its answer")
        except reader.MalformedError as error:
            raise HostError(f"{error}; are both ends of one version?") from None

    def say(self, text: str) -> None:
        """Write to its standard input.

        Raises:
            HostError: It is gone.
        """
        self.stream.send(text)

    def end_input(self) -> None:
        """Close its standard input, upon which it ends."""
        self.stream.end_input()

    def close(self, within_s: float = 15.0) -> None:
        """Wait for its end, after ``end_input``; let go of it after that time."""
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
