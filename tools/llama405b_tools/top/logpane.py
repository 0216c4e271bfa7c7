"""The logs in cluster-top: the newest lines, folded, by the same engine as ``llama405b logs``."""

import collections
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.logs.reader import Reader, entry_of
from llama405b_tools.remote.messages.stream import StreamRequest
from llama405b_tools.text.clean import clean, redact
from llama405b_tools.text.fold import Fold, is_error, text_of, where_of
from llama405b_tools.text.merge import Entry
from llama405b_tools.top.draw.lines import LogLine
from llama405b_tools.top.sources import Live, SourceEvent

KEPT = 3000
TAIL = 100  # lines of each file at first


class LogPane:
    """Takes log blocks in order of time, and keeps the folded lines."""

    def __init__(self) -> None:
        self.fold = Fold()
        self.lines: collections.deque[LogLine] = collections.deque(maxlen=KEPT)

    def take(self, host: str, entries: Sequence[tuple[float, str, str]], first_rank: int) -> None:
        """Take blocks of one host: [operator's clock, file, text]."""
        for moment, file, text in entries:
            for group in self.fold.push(entry_of(host, moment, file, text, 0.0, first_rank)):
                self._add(group)

    def settle(self, now: float) -> None:
        """Add the groups that are older than the fold's window: they are complete."""
        for group in self.fold.older_than(now - self.fold.window_s):
            self._add(group)

    def _add(self, group: Sequence[Entry]) -> None:
        text = clean(text_of(group) if len(group) > 1 else group[0].text)
        for line in text.split("\n"):
            hosts = frozenset(entry.host for entry in group)
            self.lines.append(LogLine(group[0].time, where_of(group), line, is_error(group[0]), hosts))

    def first_error(self) -> int | None:
        """Return how many lines up from the newest the first error is."""
        ups = (up for up, line in enumerate(reversed(self.lines)) if line.is_error)
        return max(ups, default=None)


class LogStream:
    """Reads the logs of a run in a thread, and adds them to the source's events."""

    def __init__(self, source: Live, fleet: Fleet, run: str, first_ranks: Mapping[str, int]) -> None:
        request = StreamRequest(run, "", follow=True, tail=TAIL)
        self.source = source
        self.reader = Reader(fleet, run, first_ranks, request)
        threading.Thread(target=self.reader.show, args=(self,), daemon=True).start()

    def entries(self, entries: Iterator[Entry]) -> None:
        """See ``logs.Sink``."""
        for entry in entries:
            block = (entry.time, entry.file, redact(entry.text))
            self.source.arrived.put(SourceEvent(time.time(), entry.host, entries=(block,)))

    def dropped(self, counts: Mapping[str, int]) -> None:
        """See ``logs.Sink``; this pane drops the oldest anyway."""

    def note(self, text: str) -> None:
        """See ``logs.Sink``. Omits the reason, so that a network failure folds into one line for all hosts."""
        host = text.partition(": ")[0]
        block = (time.time(), "", "(cluster-top cannot read logs from this host; `llama405b logs` says why)")
        self.source.arrived.put(SourceEvent(time.time(), host, entries=(block,)))

    def close(self) -> None:
        """End the agents on the hosts."""
        self.reader.streams.close()
