"""The logs of a run on several hosts, merged by time: each host's clock is corrected by its measured skew."""

import contextlib
import queue
import time
from collections.abc import Iterator, Mapping
from typing import Protocol

from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.remote.messages.stream import StreamRequest
from llama405b_tools.run.guard_record import is_guarded
from llama405b_tools.run.streams import HostMessage, Streams, Unreachable
from llama405b_tools.text.merge import Entry, Merge

HOLD_S = 0.8  # while following: wait this long for older lines of other hosts
MOST = 20_000  # entries per host that wait for a slow terminal; then the oldest are dropped, and counted
QUIET_S = 3.0  # without messages after the guard's end, until reading stops
MESSAGES = 40  # per host, read ahead
POLL_S = 0.2


class Sink(Protocol):
    """Receiver of the merged entries: a terminal, or a pane of it."""

    def entries(self, entries: Iterator[Entry]) -> None:
        """Take entries, in order."""

    def dropped(self, counts: Mapping[str, int]) -> None:
        """Take the number of entries dropped so far, by host."""

    def note(self, text: str) -> None:
        """Take a note about the reading itself."""


class LogReader:
    """The logs of a run on these hosts, merged by time."""

    def __init__(self, fleet: Fleet, run: str, first_ranks: Mapping[str, int], request: StreamRequest) -> None:
        """``first_ranks``: by host to read; ``request``: sent to each host."""
        self.run = run
        self.first_ranks = first_ranks
        self.follow = request.follow
        self.forever = request.forever
        self.streams = Streams(fleet, list(first_ranks), request, most=MESSAGES)
        self.merge = Merge(MOST if self.follow else 0)
        self.going, self.away = set(first_ranks), set[str]()
        self.skew: dict[str, float] = {}  # host's clock minus this one's, seconds
        self.owed = dict.fromkeys(first_ranks, 0)  # messages with entries not shown yet
        for host in first_ranks:
            self.merge.begin(host)

    def show(self, show: Sink) -> None:
        """Show everything, until every host is done (or the guard, if one may restart the run)."""
        try:
            heard_at = time.monotonic()
            while self._goes_on(heard_at):
                for arrival in _arrived(self.streams):
                    self._take(arrival, show)
                    heard_at = time.monotonic()
                show.entries(self.merge.pop(time.time() - HOLD_S if self.follow else float("-inf")))
                show.dropped(self.merge.dropped)
                for host in self.owed:
                    while self.owed[host] and self.merge.size(host) < MOST // 2:
                        self.owed[host] -= 1
                        self.streams.done(host)
            show.entries(self.merge.pop(float("inf")))
        finally:
            self.streams.close()

    def _goes_on(self, heard_at: float) -> bool:
        if not self.going or self.streams.closing.is_set():
            return False
        return not self.forever or is_guarded(self.run) or time.monotonic() < heard_at + QUIET_S

    def _take(self, arrival: HostMessage, show: Sink) -> None:
        host, news = arrival.host, arrival.news
        if isinstance(news, Unreachable):
            if host not in self.away:
                show.note(f"{host}: {news.why}; trying again")
            self.away.add(host)
            self.merge.end(host)
            return
        if host in self.away:
            self.away.discard(host)
            self.merge.begin(host)
        self.owed[host] += 1
        if news.now is not None:  # network delay only makes the host's clock seem behind
            self.skew[host] = max(self.skew.get(host, float("-inf")), news.now - arrival.at)
        if news.skipped:
            self.merge.drop(host, news.skipped)
        if news.entries:
            skew, first_rank = self.skew.get(host, 0.0), self.first_ranks[host]
            self.merge.push(host, [entry_of(host, t, file, text, skew, first_rank) for t, file, text in news.entries])
        elif self.follow:
            self.merge.end(host)  # it has nothing for now: the other hosts need not wait
        if news.end:
            self.going.discard(host)
            self.merge.end(host)


def entry_of(host: str, moment: float, file: str, text: str, skew: float, first_rank: int) -> Entry:
    """Make an entry of a block of a host's log file, in this machine's time; the path has rank and stream."""
    parts = file.split("/")
    if len(parts) < 3 or not parts[-2].isdigit():
        return Entry(moment - skew, host, file, text)
    return Entry(moment - skew, host, file, text, rank=first_rank + int(parts[-2]), stream=parts[-1][3:6])


def _arrived(streams: Streams) -> Iterator[HostMessage]:
    """Yield what has arrived, after a short wait."""
    with contextlib.suppress(queue.Empty):
        yield streams.arrivals.get(timeout=POLL_S)
        for _ in range(1000):
            yield streams.arrivals.get_nowait()
