"""Merge log blocks from many sources into one sequence in time. Pure: takes entries and a time, returns entries.

On a host a source is a file; on the operator's machine it is a host. Each source keeps its own order.
"""

import collections
import dataclasses
import heapq
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One block of one log."""

    time: float  # seconds since the epoch: host's clock on a host, operator's clock on the operator's machine
    host: str
    file: str  # relative to the host's log directory
    text: str
    end: int = 0  # offset in the file, in bytes
    rank: int = -1  # -1: torchrun's own log
    stream: str = ""  # out | err; "" for torchrun's own

    def at(self, time: float) -> "Entry":
        """Return a copy with another time."""
        return dataclasses.replace(self, time=time)


class Merge:
    """Takes entries source by source, and returns them in order of time as far as the order is certain."""

    def __init__(self, most: int = 0) -> None:
        """``most``: entries to keep per source; older ones are dropped and counted (0: no limit)."""
        self.waiting: dict[str, collections.deque[Entry]] = {}
        self.last: dict[str, float] = {}
        self.open: set[str] = set()
        self.most = most
        self.dropped: dict[str, int] = {}

    def begin(self, source: str) -> None:
        """Mark a source that may have entries: later entries of other sources wait for it."""
        self.open.add(source)
        self.waiting.setdefault(source, collections.deque(maxlen=self.most or None))

    def end(self, source: str) -> None:
        """Mark a source that has no more entries for now: the others do not wait for it."""
        self.open.discard(source)

    def push(self, source: str, entries: Sequence[Entry]) -> None:
        """Take a source's entries; its times never go backward."""
        self.begin(source)
        over = self.size(source) + len(entries) - self.most
        if self.most and over > 0:
            self.drop(source, over)
        for entry in entries:
            last = max(entry.time, self.last.get(source, entry.time))
            self.last[source] = last
            self.waiting[source].append(entry if entry.time == last else entry.at(last))

    def drop(self, source: str, count: int) -> None:
        """Count entries of a source that are missing."""
        self.dropped[source] = self.dropped.get(source, 0) + count

    def size(self, source: str) -> int:
        """Return how many entries of a source are waiting."""
        return len(self.waiting.get(source, ()))

    def pop(self, until: float = float("-inf")) -> Iterator[Entry]:
        """Yield, in order, the entries that nothing older can follow; up to ``until`` even if that is uncertain."""
        heap = [(entries[0].time, source) for source, entries in self.waiting.items() if entries]
        heapq.heapify(heap)
        lacking = {source for source in self.open if not self.waiting[source]}
        while heap and not (lacking and heap[0][0] > until):
            source = heap[0][1]
            entries = self.waiting[source]
            entry = entries.popleft()
            if entries:
                heapq.heapreplace(heap, (entries[0].time, source))
            else:
                heapq.heappop(heap)
                lacking |= {source} & self.open
            yield entry
