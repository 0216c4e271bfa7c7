"""The logs in cluster-top: the newest lines, folded, by the same engine as ``llama405b logs``."""

import collections
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.logs.log_reader import LogReader, entry_of
from llama405b_tools.remote.messages.stream import StreamRequest
from llama405b_tools.text.clean import clean, redact
from llama405b_tools.text.fold import Fold, fold_names, group_text, is_error, where_of
from llama405b_tools.text.merge import Entry
from llama405b_tools.top.draw.lines import LogLine
from llama405b_tools.top.event_sources import Live

KEPT, KEPT_OF_HOST = 3000, 50  # newest lines in all, and at least of each host
TAIL = 100  # lines of each file at first
MOST_BYTES = 1 << 16  # of each file at a time
MOST_CHARS = 1 << 16  # of a block
LINE_CHARS = 1000  # wider than a screen


class LogPane:
    """Takes log blocks in order of time, and keeps the folded lines."""

    def __init__(self) -> None:
        self.command = "llama405b logs"  # what to type for all lines
        self.fold = Fold()
        self.lines: list[LogLine] = []
        self.count = 0  # lines so far
        self.dropped: dict[str, int] = {}  # by host, lines that are missing from what came last
        self.dropped_at = 0.0

    def take(self, host: str, entries: Sequence[tuple[float, str, str]], first_rank: int) -> None:
        """Take blocks of one host: [operator's clock, file, text]."""
        for moment, file, text in entries:
            for group in self.fold.push(entry_of(host, moment, file, text, 0.0, first_rank)):
                self._add(group)

    def drop(self, host: str, count: int, now: float) -> None:
        """Count lines of a host that came too fast."""
        self.dropped[host] = self.dropped.get(host, 0) + count
        self.dropped_at = now

    def settle(self, now: float) -> None:
        """Add the groups that are older than the fold's window: they are complete."""
        for group in self.fold.older_than(now - self.fold.window_s):
            self._add(group)
        if now > self.dropped_at + self.fold.window_s:
            self.lines.extend(self._missing())
            self.count += bool(self.dropped)
            self.dropped.clear()
        if len(self.lines) > KEPT:
            self._forget()

    def shown(self) -> list[LogLine]:
        """Return the lines; while lines are missing, the last one says how many."""
        return [*self.lines, *self._missing()]

    def _missing(self) -> Iterator[LogLine]:
        if self.dropped:
            hosts, lines = sorted(self.dropped), sum(self.dropped.values())
            words = f"{lines:,} lines came too fast to be shown; `{self.command}` has them"
            yield LogLine(self.dropped_at, fold_names(hosts), words, hosts=frozenset(hosts), number=self.count + 1)

    def _forget(self) -> None:
        """Forget the oldest lines, but not all those of a quiet host because another one talks."""
        kept: list[LogLine] = []
        counts: collections.Counter[str] = collections.Counter()
        for line in reversed(self.lines):
            counts.update(line.hosts)
            if len(kept) < KEPT or min(counts[host] for host in line.hosts) <= KEPT_OF_HOST:
                kept.append(line)
        self.lines = kept[::-1]

    def _add(self, group: Sequence[Entry]) -> None:
        text = clean(group_text(group) if len(group) > 1 else group[0].text)
        hosts, ranks = frozenset(entry.host for entry in group), frozenset(entry.rank for entry in group)
        where, error = where_of(group), is_error(group[0])
        for line in text.split("\n"):
            self.count += 1
            self.lines.append(LogLine(group[0].time, where, line[:LINE_CHARS], error, hosts, ranks, self.count))

    def first_error(self) -> int | None:
        """Return the number of the first line that is an error."""
        return next((line.number for line in self.lines if line.is_error), None)


class LogStream:
    """Reads the logs of a run in a thread, and adds them to the source's events."""

    def __init__(self, source: Live, fleet: Fleet, run: str, first_ranks: Mapping[str, int]) -> None:
        request = StreamRequest(run, "", follow=True, tail=TAIL, most_bytes=MOST_BYTES)
        self.intake, self.command = source.intake, fleet.command_to_type("logs", run)
        self.reader = LogReader(fleet, run, first_ranks, request)
        self.counted: dict[str, int] = {}  # by host, lines that are known to be missing
        threading.Thread(target=self.reader.show, args=(self,), daemon=True).start()

    def entries(self, entries: Iterator[Entry]) -> None:
        """See ``logs.Sink``."""
        for entry in entries:
            self.intake.put_block(dataclasses.replace(entry, text=redact(entry.text[:MOST_CHARS])))

    def dropped(self, counts: Mapping[str, int]) -> None:
        """See ``logs.Sink``."""
        for host, count in counts.items():
            if more := count - self.counted.get(host, 0):
                self.intake.drop(host, more)
                self.counted[host] = count

    def note(self, text: str) -> None:
        """See ``logs.Sink``. Omits the reason, so that a network failure folds into one line for all hosts."""
        words = f"(cluster-top cannot read logs from this host; `{self.command}` says why)"
        self.intake.put_block(Entry(time.time(), text.partition(": ")[0], "", words))

    def close(self) -> None:
        """End the agents on the hosts."""
        self.reader.streams.close()
