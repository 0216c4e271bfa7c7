"""What arrived from the hosts and waits to be taken. Bounded per host: whoever sends most delays nobody else."""

import collections
import dataclasses
import itertools
import math
import threading
import time

from llama405b.contract.reader import Json
from llama405b_tools.text.merge import Entry, Merge

NEWS = 4  # frames and links per host that wait; then the host has to
BLOCKS = 2000  # log blocks per host that wait; then the oldest are dropped, and counted
BLOCKS_AT_ONCE = 4000  # of all hosts that are taken at once: about a tenth of a second's work


@dataclasses.dataclass(frozen=True, slots=True)
class SourceEvent:
    """Something that arrived, or happened on this machine."""

    t: float  # operator's clock, seconds since the epoch
    host: str
    frame: Json = None  # JSON from the sampler; the cluster parses it
    link: tuple[str, str] | None = None  # state and why
    entries: tuple[tuple[float, str, str], ...] = ()  # log blocks: operator's clock, file, text
    dropped: int = 0  # log lines of the host that came too fast to be shown
    note: str = ""


class Intake:
    """Filled by many threads, emptied by one."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.news: dict[str, collections.deque[SourceEvent]] = collections.defaultdict(collections.deque)
        self.blocks = Merge(BLOCKS)
        self.closed = False

    def put(self, event: SourceEvent) -> None:
        """Add a host's news; wait while there is no room for it."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.news[event.host]) < NEWS)
            self.news[event.host].append(event)
            self.changed.notify_all()

    def put_block(self, entry: Entry) -> None:
        """Add a log block; never waits."""
        with self.changed:
            self.blocks.push(entry.host, [entry])
            self.changed.notify_all()

    def drop(self, host: str, lines: int) -> None:
        """Count lines that were dropped on the way here."""
        with self.changed:
            self.blocks.drop(host, lines)
            self.changed.notify_all()

    def take(self, timeout_s: float) -> list[SourceEvent]:
        """Wait for something, and return what there is, oldest first: a bounded number of events."""
        with self.changed:
            self.changed.wait_for(self._holds_any, timeout_s)
            news = sorted(itertools.chain.from_iterable(self.news.values()), key=lambda event: event.t)
            self.news.clear()
            blocks = list(itertools.islice(self.blocks.pop(math.inf), BLOCKS_AT_ONCE))
            dropped, self.blocks.dropped = self.blocks.dropped, {}
            self.changed.notify_all()
        now = time.time()
        news += [SourceEvent(now, each.host, entries=((each.time, each.file, each.text),)) for each in blocks]
        return news + [SourceEvent(now, host, dropped=lines) for host, lines in dropped.items()]

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _holds_any(self) -> bool:
        return bool(self.blocks.dropped or any(self.news.values()) or any(self.blocks.waiting.values()))
