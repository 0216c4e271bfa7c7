"""What a run says on every host, as one queue of events. A connection that breaks is made again, where it left off."""

import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from llama405b_tools.fleet import Fleet
from llama405b_tools.transport import HostError, Stream

RETRY_S = 2.0
Event = tuple[str, dict[str, Any]]  # host, news: as agent.stream prints it, or {"unreachable": why}


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
            why = "the connection to it broke"
            try:
                self.open[host] = self.fleet.stream(host, "stream", request)
                if self._read(host, self.open[host], marks):
                    return
            except HostError as error:
                why = str(error)
            self.fleet.forget(host)
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
