"""What a run says on every host, as one queue of events. A connection that breaks is made again, where it left off."""

import json
import queue
import threading
from collections.abc import Sequence
from typing import Any

from llama405b_tools.fleet import Fleet
from llama405b_tools.transport import HostError, Stream

RETRY_S = 2.0
Event = tuple[str, dict[str, Any]]  # host, news: as agent.stream prints it, or {"unreachable": why}


class Streams:
    """A stream a host, each with its thread, until the host says that its run is over (``{"end": true}``)."""

    def __init__(
        self, fleet: Fleet, run: str, hosts: Sequence[str], *, follow: bool, metrics_of: str = "", beats: bool = False
    ) -> None:
        self.fleet, self.run, self.follow, self.metrics_of, self.beats = fleet, run, follow, metrics_of, beats
        self.news: queue.Queue[Event] = queue.Queue()
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
        seen: dict[str, int] = {}  # lines by file
        while not self.closing.is_set():
            request = {
                "run": self.run,
                "host": host,
                "follow": self.follow,
                "metrics": host == self.metrics_of,
                "beats": self.beats,
                "seen": seen,
            }
            why = "the connection to it broke"
            try:
                self.open[host] = self.fleet.stream(host, "stream", request)
                if self._read(host, self.open[host], seen):
                    return
            except HostError as error:
                why = str(error)
            self.fleet.forget(host)
            self.news.put((host, {"unreachable": why}))
            self.closing.wait(RETRY_S)

    def _read(self, host: str, stream: Stream, seen: dict[str, int]) -> bool:
        """Put the stream's news on the queue; whether it came to its end."""
        for line in stream:
            try:
                item = json.loads(line)
            except ValueError:
                continue
            if "file" in item:
                seen[item["file"]] = seen.get(item["file"], 0) + len(item["lines"])
            self.news.put((host, item))
            if "end" in item:
                return True
        return False
