"""Many sources' log blocks as one sequence in time. Pure: takes entries and a clock's value, returns entries.

A source is a file on a host, or a host at the operator's machine. Each keeps its own order.
"""

import collections
import dataclasses
import heapq
from collections.abc import Iterator, Sequence


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
        self.waiting: dict[str, collections.deque[Entry]] = {}
        self.last: dict[str, float] = {}
        self.open: set[str] = set()
        self.most = most
        self.dropped: dict[str, int] = {}

    def begin(self, source: str) -> None:
        """A source may have something to say: what the others say later waits for it."""
        self.open.add(source)
        self.waiting.setdefault(source, collections.deque(maxlen=self.most or None))

    def end(self, source: str) -> None:
        """A source has nothing more to say for now: the others do not wait for it."""
        self.open.discard(source)

    def push(self, source: str, entries: Sequence[Entry]) -> None:
        """Take what a source says; its times never go back."""
        self.begin(source)
        over = self.size(source) + len(entries) - self.most
        if self.most and over > 0:
            self.dropped[source] = self.dropped.get(source, 0) + over
        for entry in entries:
            last = max(entry.time, self.last.get(source, entry.time))
            self.last[source] = last
            self.waiting[source].append(entry if entry.time == last else entry.at(last))

    def size(self, source: str) -> int:
        """How many entries of a source wait."""
        return len(self.waiting.get(source, ()))

    def pop(self, until: float = float("-inf")) -> Iterator[Entry]:
        """Hand out, in order, all that nothing older can follow any more; up to ``until`` even without that certainty."""
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
