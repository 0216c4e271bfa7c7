"""What a run says on every host, as one queue of events. A connection that breaks is made again, where it left off."""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import HostError, Stream

RETRY_S = 2.0
Event = tuple[str, dict[str, Any]]  # host, news: as agent.stream prints it, or {"unreachable": why}


class Dialogue:
    """A program on a host that answers with lines of JSON; every answer has a limit of time."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.last_words = ""  # what it said that was no answer
        threading.Thread(target=self._read, daemon=True).start()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            HostError: There is none within ``timeout_s``, or there will be none.
        """
        try:
            found = self.answers.get(timeout=timeout_s)
        except queue.Empty:
            raise HostError(f"did not answer within {timeout_s:.0f} s") from None
        if found is None:
            words = f" ({self.last_words})" if self.last_words else ""
            raise HostError(f"the connection broke, or the program there failed, before it answered{words}")
        return found

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
            try:
                found = json.loads(line)
            except ValueError:
                self.last_words = line.strip()[:200] or self.last_words
                continue
            if isinstance(found, dict):
                self.answers.put(found | {"heard": time.time()})
        self.answers.put(None)


class Streams:
    """A stream a host, each with its thread, until the host says that its run is over (``{"end": true}``).

    ``asks``: what the agent's ``stream`` is asked for, beside run and host.
    """

    def __init__(
        self, fleet: Fleet, run: str, hosts: Sequence[str], asks: Mapping[str, Any], metrics_of: str = "", most: int = 0
    ) -> None:
        """``metrics_of``: the host that writes them; ``most``: messages kept of one host, then it has to wait (0: all)."""
        self.fleet, self.run, self.asks, self.metrics_of = fleet, run, asks, metrics_of
        self.news: queue.Queue[Event] = queue.Queue()
        self.room = {host: threading.Semaphore(most) for host in hosts} if most else {}
        self.closing = threading.Event()
        self.open: dict[str, Stream] = {}
        for host in hosts:
            threading.Thread(target=self._pump, args=(host,), daemon=True).start()

    def close(self) -> None:
        """End the agents on the hosts."""
        self.closing.set()
        for stream in list(self.open.values()):
            stream.close()

    def _pump(self, host: str) -> None:
        marks: dict[str, Any] = {}  # how far each file was read
        while not self.closing.is_set():
            asked = {"run": self.run, "host": host, "metrics": host == self.metrics_of, "marks": marks}
            request = {**self.asks, **asked}
            why, ended = "the connection to it broke, or nothing can be run there", True
            try:
                self.open[host] = self.fleet.stream(host, "stream", request)
                if self.closing.is_set():  # meanwhile
                    self.open[host].close()
                    return
                if self._read(host, self.open[host], marks):
                    return
            except HostError as error:
                why, ended = str(error), False
            if self.closing.is_set():
                return
            self.fleet.forget(host, unless_open=ended)
            self.news.put((host, {"unreachable": why}))
            self.closing.wait(RETRY_S)

    def done(self, host: str) -> None:
        """A message of a host was dealt with: there is room for another."""
        if self.room:
            self.room[host].release()

    def _read(self, host: str, stream: Stream, marks: dict[str, Any]) -> bool:
        """Put the stream's news on the queue; whether it came to its end."""
        for line in stream:
            try:
                item = json.loads(line)
            except ValueError:
                continue
            if self.room:
                self.room[host].acquire()
            if "marks" in item:
                marks.update(item["marks"])
            item["heard"] = time.time()
            self.news.put((host, item))
            if "end" in item:
                return True
        return False
