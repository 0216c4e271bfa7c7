"""The logs of a run on several hosts, merged in time: each host's clock is corrected by its measured skew."""

import contextlib
import queue
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.run import guard_record
from llama405b_tools.run.streams import Streams
from llama405b_tools.text.merge import Entry, Merge

HOLD_S = 0.8  # while following: for a line of another host that is older
MOST = 20_000  # entries of a host that wait for a slow terminal; then the oldest are dropped, and counted
QUIET_S = 3.0  # after the guard's end, until nothing more is on its way
MESSAGES = 40  # of a host, read ahead
POLL_S = 0.2


class Sink(Protocol):
    """Where the merged entries go: a terminal, or a pane of it."""

    def entries(self, entries: Iterator[Entry]) -> None:
        """Take entries in the order in which they come."""

    def dropped(self, counts: Mapping[str, int]) -> None:
        """Hear how many entries of each host were too many."""

    def note(self, text: str) -> None:
        """Hear something about the reading itself."""


class Reader:
    """The logs of a run on these hosts, merged in time."""

    def __init__(self, fleet: Fleet, run: str, first_ranks: Mapping[str, int], asks: Mapping[str, Any]) -> None:
        self.run, self.first_ranks, self.follow, self.forever = run, first_ranks, asks["follow"], asks["forever"]
        self.streams = Streams(fleet, run, list(first_ranks), asks, most=MESSAGES)
        self.merge = Merge(MOST if self.follow else 0)
        self.going, self.away = set(first_ranks), set[str]()
        self.skew: dict[str, float] = {}  # host's clock minus this one's, seconds
        self.owed = dict.fromkeys(first_ranks, 0)  # messages whose entries still wait
        for host in first_ranks:
            self.merge.begin(host)

    def show(self, show: Sink) -> None:
        """Show everything, until every host is done (or the guard, where one may bring the run back)."""
        try:
            heard_at = time.monotonic()
            while self.going and (not self.forever or guarded(self.run) or time.monotonic() < heard_at + QUIET_S):
                for host, item in _arrived(self.streams):
                    self._take(host, item, show)
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

    def _take(self, host: str, item: Mapping[str, Any], show: Sink) -> None:
        if "unreachable" in item:
            if host not in self.away:
                show.note(f"{host}: {item['unreachable']}; trying again")
            self.away.add(host)
            self.merge.end(host)
            return
        if host in self.away:
            self.away.discard(host)
            self.merge.begin(host)
        self.owed[host] += 1
        if "now" in item:  # the way here only makes it seem behind
            self.skew[host] = max(self.skew.get(host, float("-inf")), item["now"] - item["heard"])
        if "entries" in item:
            skew, first_rank = self.skew.get(host, 0.0), self.first_ranks[host]
            self.merge.push(
                host, [entry_of(host, t, file, text, skew, first_rank) for t, file, text in item["entries"]]
            )
        elif self.follow:
            self.merge.end(host)  # it has nothing more for now: the others need not wait
        if "end" in item:
            self.going.discard(host)
            self.merge.end(host)


def entry_of(host: str, moment: float, file: str, text: str, skew: float, first_rank: int) -> Entry:
    """A block of a file of a host, in this machine's time; rank and stream are in the file's path."""
    parts = file.split("/")
    is_rank = len(parts) >= 3 and parts[-2].isdigit()
    rank, name = (first_rank + int(parts[-2]), parts[-1][3:6]) if is_rank else (-1, "")
    return Entry(moment - skew, host, file, text, rank=rank, stream=name)


def _arrived(streams: Streams) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is there, after waiting a moment for it."""
    with contextlib.suppress(queue.Empty):
        yield streams.news.get(timeout=POLL_S)
        for _ in range(1000):
            yield streams.news.get_nowait()


def guarded(run: str) -> bool:
    """Whether a guard of this machine may bring the run back."""
    found = guard_record.of_run(run)
    return bool(found and found[1])
