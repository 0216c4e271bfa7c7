"""``llama405b logs``: every rank of every host as one stream, in order of time.

Times are put on this machine's clock by each host's measured skew. A connection that breaks is made again and goes on
at the right byte. Exit code 1 where a host could not be reached.
"""

import argparse
import contextlib
import queue
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from llama405b.contract.errors import FAILED, GOOD, STOPPED_FOLLOWING, UserError
from llama405b_tools import first_error, guard, slurm
from llama405b_tools.fleet import Fleet
from llama405b_tools.merge import Entry, Merge
from llama405b_tools.show import Show
from llama405b_tools.status import ask, hosts_asked, verb_parser
from llama405b_tools.streams import Streams
from llama405b_tools.transport import HostError

HOLD_S = 0.8  # while following: for a line of another host that is older
MOST = 20_000  # entries of a host that wait for a slow terminal; then the oldest are dropped, and counted
QUIET_S = 3.0  # after the guard's end, until nothing more is on its way
MESSAGES = 40  # of a host, read ahead
POLL_S = 0.2


def _parser() -> argparse.ArgumentParser:
    parser = verb_parser("logs", __doc__)
    add = parser.add_argument
    add("-f", "--follow", action="store_true", help="go on as the logs grow, until the run (and its guard) ends")
    add("--first-error", action="store_true", help="only the first failure: host, rank, signal, traceback")
    add("--fold", action="store_true", help="the same line of many ranks as one; errors are never folded")
    add("--host", action="append", default=[], help="only this host (may be given again)")
    add("--rank", default="", help="only these ranks: 3 or 0-7,12")
    add("--stderr", action="store_true", help="only standard error")
    add("--agent", action="store_true", help="torchrun's own log too")
    add("--attempt", default="0", help="a number, or all [the newest, and those that follow it]")
    add("--since", default="", metavar="TIME", help="only what came in the last 30s, 10m, 2h")
    add("--tail", type=int, metavar="N", help="only the last N lines of each file")
    add("-i", "--include", action="append", default=[], metavar="REGEX", help="only lines that match any")
    add("-e", "--exclude", action="append", default=[], metavar="REGEX", help="no line that matches any")
    add("-H", "--highlight", action="append", default=[], metavar="REGEX", help="show what matches in colour")
    add("-o", "--output", choices=("text", "json", "raw"), default="text", help="text | json | raw [text]")
    add("--save", type=Path, metavar="DIR", help="write DIR/<host>/rank-<N>.<out|err>.log as well")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = _parser().parse_args(argv)
    show = Show(args)
    hosts = hosts_asked(args)
    for name in args.host:
        if name not in [host.name for host in hosts]:
            names = ", ".join(host.name for host in hosts)
            raise UserError(f"--host: {name!r} is not in {args.hosts}; take one of {names}")
    with Fleet(hosts) as fleet:
        run, seen = ask(fleet, args.run or slurm.run_asked(args.run, args.hosts))
        if args.first_error:
            failed, lines = first_error.find(fleet, run, seen, max(0, show.attempt))
            print("\n".join(lines))
            return FAILED if failed else GOOD
        lost = {name: found for name, found in seen.items() if isinstance(found, HostError)}
        for name, fault in lost.items():
            print(f"- {name}: {fault}", file=sys.stderr)
        first_ranks = {
            name: found["first_rank"]
            for name, found in seen.items()
            if isinstance(found, dict) and name in (args.host or seen)
        }
        asks = show.asks() | {"follow": args.follow, "forever": args.follow and guarded(run)}
        try:
            with contextlib.closing(show):
                Reader(fleet, run, first_ranks, asks).show(show)
        except KeyboardInterrupt:
            return STOPPED_FOLLOWING
    return FAILED if lost else GOOD


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
    found = guard.of_run(run)
    return bool(found and found[1])
