"""Many sources' log blocks as one sequence in time. Pure: takes entries and a clock's value, returns entries.

A source is a file on a host, or a host at the operator's machine. Each keeps its own order.
"""

import dataclasses
import heapq
from collections.abc import Iterator, Sequence

TRIM = 1000  # entries that are out before their memory is given back


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One block of one log."""

    time: float  # seconds since the epoch: of the host's clock there, of the operator's here
    host: str
    file: str  # below the host's log directory
    text: str
    end: int = 0  # bytes into the file
    rank: int = -1  # -1: torchrun's own log
    stream: str = ""  # out | err; "" for torchrun's own

    def at(self, time: float) -> "Entry":
        """The same at another time."""
        return dataclasses.replace(self, time=time)


class Merge:
    """Takes entries source by source, and hands them out in order of time as far as that is certain."""

    def __init__(self, most: int = 0) -> None:
        """``most``: entries kept of one source; older ones are then dropped, and counted (0: none)."""
        self.waiting: dict[str, list[Entry]] = {}
        self.taken: dict[str, int] = {}  # of ``waiting``: how many are out already
        self.last: dict[str, float] = {}
        self.open: set[str] = set()
        self.most = most
        self.dropped: dict[str, int] = {}

    def begin(self, source: str) -> None:
        """A source may have something to say: what the others say later waits for it."""
        self.open.add(source)
        self.waiting.setdefault(source, [])
        self.taken.setdefault(source, 0)

    def end(self, source: str) -> None:
        """A source has nothing more to say for now: the others do not wait for it."""
        self.open.discard(source)

    def push(self, source: str, entries: Sequence[Entry]) -> None:
        """Take what a source says; its times never go back."""
        self.begin(source)
        for entry in entries:
            last = max(entry.time, self.last.get(source, entry.time))
            self.last[source] = last
            self.waiting[source].append(entry if entry.time == last else entry.at(last))
        if self.most and (over := self.size(source) - self.most) > 0:
            self.taken[source] += over
            self.dropped[source] = self.dropped.get(source, 0) + over

    def size(self, source: str) -> int:
        """How many entries of a source wait."""
        return len(self.waiting.get(source, ())) - self.taken.get(source, 0)

    def pop(self, until: float = float("-inf")) -> Iterator[Entry]:
        """Hand out, in order, all that nothing older can follow any more; up to ``until`` even without that certainty."""
        heap = [(self.waiting[source][self.taken[source]].time, source) for source in self.waiting if self.size(source)]
        heapq.heapify(heap)
        lacking = {source for source in self.open if not self.size(source)}
        while heap and not (lacking and heap[0][0] > until):
            source = heap[0][1]
            entry = self.waiting[source][self.taken[source]]
            self.taken[source] += 1
            if self.taken[source] > TRIM:
                del self.waiting[source][: self.taken[source]]
                self.taken[source] = 0
            if self.size(source):
                heapq.heapreplace(heap, (self.waiting[source][self.taken[source]].time, source))
            else:
                heapq.heappop(heap)
                self.waiting[source], self.taken[source] = [], 0
                lacking |= {source} & self.open
            yield entry
