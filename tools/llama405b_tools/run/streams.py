"""The messages of a run from every host, in one queue. A broken connection is reopened and resumes where it was."""

import dataclasses
import os
import queue
import threading
import time
from collections.abc import Sequence

from llama405b.contract.paths import RunDir
from llama405b.contract.plan import read_plan
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import HostError, Stream, read_message
from llama405b_tools.remote.messages.stream import Marks, StreamMessage, StreamRequest
from llama405b_tools.text.clean import hide_in_json, pieces_of

RETRY_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Unreachable:
    """The host cannot be reached now; it is tried again."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class HostMessage:
    """One message, and when it arrived."""

    host: str
    news: StreamMessage | Unreachable
    at: float  # this machine's clock, seconds since the epoch


class Streams:
    """One stream per host, each with its own thread, until the host reports that its run is over."""

    def __init__(
        self, fleet: Fleet, hosts: Sequence[str], request: StreamRequest, records_of: str = "", most: int = 0
    ) -> None:
        """Send ``request`` to each host.

        ``records_of``: the host that writes metrics and events; ``most``: messages kept per host before it has to wait
        (0: all).
        """
        self.fleet = fleet
        self.request = request
        self.records_of = records_of
        self.arrivals: queue.Queue[HostMessage] = queue.Queue()
        self.room = {host: threading.Semaphore(most) for host in hosts} if most else {}
        names = read_plan(RunDir.here(request.run)).secrets  # none if it was not launched from here
        self.secrets = pieces_of(os.environ[name] for name in names if name in os.environ)
        self.closing = threading.Event()
        self.open: dict[str, Stream] = {}
        for host in hosts:
            threading.Thread(target=self._pump, args=(host,), daemon=True).start()

    def close(self) -> None:
        """End the agents on the hosts."""
        self.closing.set()
        for stream in list(self.open.values()):
            stream.close()

    def done(self, host: str) -> None:
        """Note that a host's message was handled, so that there is room for another."""
        if self.room:
            self.room[host].release()

    def _pump(self, host: str) -> None:
        marks: dict[str, tuple[int, int]] = {}  # how far each file was read
        while not self.closing.is_set():
            ended = False
            try:
                self.open[host] = self.fleet.stream(host, "stream", self._request(host, marks))
                if self.closing.is_set():  # meanwhile
                    self.open[host].close()
                    return
                last = self._read(host, self.open[host], marks)
                if last is None:
                    return
                why, ended = str(self.fleet.fault_of(host, last)), True
            except HostError as error:
                why = str(error)
            if self.closing.is_set():
                return
            self.fleet.forget(host, unless_open=ended)
            self.arrivals.put(HostMessage(host, Unreachable(why), time.time()))
            self.closing.wait(RETRY_S)

    def _request(self, host: str, marks: Marks) -> StreamRequest:
        return dataclasses.replace(self.request, host=host, records=host == self.records_of, marks=marks)

    def _read(self, host: str, stream: Stream, marks: dict[str, tuple[int, int]]) -> str | None:
        """Put the stream's messages on the queue; returns None at its end, or the last words of an agent that failed."""
        last = ""
        for line in stream:
            if not line.startswith("{"):
                last = line.strip()[:200] or last
                continue
            news = read_message(StreamMessage, hide_in_json(line, self.secrets), "its news")
            if self.room:
                self.room[host].acquire()
            marks.update(news.marks)
            self.arrivals.put(HostMessage(host, news, time.time()))
            if news.end:
                return None
        return last
