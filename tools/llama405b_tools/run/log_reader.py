"""Merge and print the logs of a run's hosts, and find where a failure began.

A failure is shown with its host, rank, signal and traceback.
Logs are merged by time, with each host's clock corrected by its measured skew. For a
terminal, a pipe or files, entries are filtered, folded, colored, cleaned and redacted.
"""

import argparse
import collections
import contextlib
import json
import os
import queue
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from llama405b.contract.errors import UserError, fmt_if, parse_seconds, pluralize
from llama405b_tools.agent.messages import HostRun, StreamRequest
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Failure, failure_words
from llama405b_tools.run.query import (
    HostMessage,
    RunHandle,
    Streams,
    Unreachable,
    is_guarded,
)
from llama405b_tools.text.words import (
    BAR_MARK,
    UNENDED_MARK,
    LogEntry,
    LogFolder,
    LogMerger,
    Unfolded,
    clean,
    common_text,
    format_hosts_and_ranks,
    redact_tokens,
    split_mark,
)

ATTEMPT_LINE = re.compile(r"attempt \d+: \[")  # how the node runner begins torchrun's log
MAX_LAST_BLOCKS = 20  # blocks shown if there is no traceback
MAX_WAITING_MESSAGES = 40  # messages of a host
TAIL_BYTES = 1 << 24  # of a log in which the reason is looked for
MAX_TRIES = 3  # to read it


def find_first_error(handle: RunHandle, attempt: int = 0) -> tuple[bool, list[str]]:
    """Return whether a run failed, and where the failure began, as lines.

    ``attempt``: 0 is the newest that failed, even if the guard has restarted the run since.
    """
    run, host_runs = handle.run, handle.host_runs
    failures, failed_attempt = handle.failures(), 0
    if attempt or not failures:
        failures, failed_attempt = _past_failures(host_runs, attempt)
    if not failures:
        return False, [
            f"run {run}: no failure on {pluralize(len(handle.replies), 'host')}{fmt_if(' in attempt {}', attempt)}"
        ]
    worst = judge.first_failure(failures)
    lines = [f"run {run}{fmt_if(', attempt {}', failed_attempt)}: {worst.host}: {failure_words(worst)}"]
    if worst.host in host_runs:
        lines += _failure_output(handle.fleet, run, worst, host_runs[worst.host], failed_attempt)
    if others := sorted({failure.host for failure in failures} - {worst.host}):
        lines.append(f"and after it: {', '.join(others)}")
    return True, lines


def _failure_output(fleet: Fleet, run: str, worst: Failure, host_run: HostRun, attempt: int) -> list[str]:
    """Return the failed rank's traceback, or its last output; torchrun's own output if no rank is known."""
    rank = worst.cause.rank
    local_rank = rank - host_run.first_rank if rank is not None else -1
    texts = _read_stderr(fleet, run, worst.host, local_rank, attempt)
    return [line for text in texts for line in clean(text).split("\n")]


def _past_failures(host_runs: Mapping[str, HostRun], attempt: int) -> tuple[list[Failure], int]:
    """Return the failures of an attempt (0: the newest that has any), and its number."""
    recorded = [blame for host_run in host_runs.values() for blame in host_run.blames]
    past = {end.attempt for host_run in host_runs.values() for end in host_run.ends} | {
        blame.attempt for blame in recorded
    }
    for past_attempt in sorted(past, reverse=True):
        blame = judge.find_failure_record(past_attempt, recorded)
        if attempt in (0, past_attempt) and (
            failures := judge.apply_failure_record(_failures_in(host_runs, past_attempt), blame)
        ):
            return failures, past_attempt
    return [], attempt


def _failures_in(host_runs: Mapping[str, HostRun], attempt: int) -> list[Failure]:
    """Return the failures of an attempt, oldest first, by their age on each host's own clock."""
    ends = [
        (end.time - host_run.now, host, end)
        for host, host_run in host_runs.items()
        for end in host_run.ends
        if end.attempt == attempt
    ]
    ends.sort(key=lambda entry: entry[0])
    failures = [judge.failure_of(host, judge.state_from_status(end, alive=False)) for _, host, end in ends]
    return [failure for failure in failures if failure]


def _read_stderr(fleet: Fleet, run: str, host: str, local_rank: int, attempt: int) -> Sequence[str]:
    """Return a rank's last traceback in an attempt, else its last blocks; torchrun's log if no rank is known.

    Only the end of the log is read. A note is added where that may matter, or where the end could not be read.
    """
    request = StreamRequest(
        run, host, attempt=attempt, stderr=local_rank >= 0, agent=local_rank < 0, most_bytes=TAIL_BYTES
    )
    streams = Streams(fleet, [host], request, max_waiting=MAX_WAITING_MESSAGES)
    last_blocks = collections.deque[str](maxlen=MAX_LAST_BLOCKS)
    traceback: tuple[str, ...] = ()
    tries = skipped = 0
    try:
        while True:
            message = streams.arrivals.get().message
            if isinstance(message, Unreachable):
                tries += 1
                if tries == MAX_TRIES:
                    return [
                        *(traceback or last_blocks),
                        f"({host}: its log could not be read to the end: {message.why})",
                    ]
                continue
            if message.end:
                unread = fmt_if(
                    f"({host}: only the last {TAIL_BYTES >> 20} MiB were read, {{:,}} lines before them were not)",
                    skipped,
                )
                return traceback or [*last_blocks, *filter(None, [unread])]
            streams.release(host)
            skipped += message.skipped
            for _, file, written in message.entries:
                text = split_mark(written)[0]
                if (local_rank < 0 or f"/{local_rank}/" in file) and not ATTEMPT_LINE.match(text):
                    last_blocks.append(text)
                    traceback = (text,) if "Traceback" in text else traceback
    finally:
        streams.close()


HOLD_S = 0.8  # while following: wait this long for older lines of other hosts
MAX_ENTRIES = 20_000  # entries per host that wait for a slow terminal; then the oldest are dropped, and counted
QUIET_S = 3.0  # without messages after the guard's end, until reading stops
POLL_S = 0.2


class LogOutput(Protocol):
    """Receiver of the merged entries: a terminal, or a pane of it."""

    def entries(self, entries: Iterator[LogEntry]) -> None:
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
        self.streams = Streams(fleet, list(first_ranks), request, max_waiting=MAX_WAITING_MESSAGES)
        self.merge = LogMerger(MAX_ENTRIES if self.follow else 0)
        self.active, self.unreachable = set(first_ranks), set[str]()
        self.skew: dict[str, float] = {}  # host's clock minus this one's, seconds
        self.unreleased = dict.fromkeys(first_ranks, 0)  # messages with entries not shown yet
        for host in first_ranks:
            self.merge.begin(host)

    def show_all(self, output: LogOutput) -> None:
        """Show everything, until every host is done (or the guard, if one may restart the run)."""
        try:
            heard_at = time.monotonic()
            while self._is_reading(heard_at):
                for arrival in _read_arrivals(self.streams):
                    self._handle(arrival, output)
                    heard_at = time.monotonic()
                output.entries(self.merge.pop(time.time() - HOLD_S if self.follow else float("-inf")))
                output.dropped(self.merge.dropped)
                for host in self.unreleased:
                    while self.unreleased[host] and self.merge.size(host) < MAX_ENTRIES // 2:
                        self.unreleased[host] -= 1
                        self.streams.release(host)
            output.entries(self.merge.pop(float("inf")))
        finally:
            self.streams.close()

    def _is_reading(self, heard_at: float) -> bool:
        if not self.active or self.streams.closing.is_set():
            return False
        return not self.forever or is_guarded(self.run) or time.monotonic() < heard_at + QUIET_S

    def _handle(self, arrival: HostMessage, output: LogOutput) -> None:
        host, message = arrival.host, arrival.message
        if isinstance(message, Unreachable):
            if host not in self.unreachable:
                output.note(f"{host}: {message.why}; trying again")
            self.unreachable.add(host)
            self.merge.end(host)
            return
        if host in self.unreachable:
            self.unreachable.discard(host)
            self.merge.begin(host)
        self.unreleased[host] += 1
        if message.now is not None:  # network delay only makes the host's clock seem behind
            self.skew[host] = max(self.skew.get(host, float("-inf")), message.now - arrival.arrived_at)
        if message.skipped:
            self.merge.drop(host, message.skipped)
        if message.entries:
            skew, first_rank = self.skew.get(host, 0.0), self.first_ranks[host]
            self.merge.push(
                host, [make_entry(host, t, file, text, skew, first_rank) for t, file, text in message.entries]
            )
        elif self.follow:
            self.merge.end(host)  # it has nothing for now: the other hosts need not wait
        if message.end:
            self.active.discard(host)
            self.merge.end(host)


def make_entry(host: str, time_s: float, file: str, text: str, skew: float, first_rank: int) -> LogEntry:
    """Make an entry of a block of a host's log file, in this machine's time; the path has rank and stream."""
    parts, (text, ending) = file.split("/"), split_mark(text)
    if len(parts) < 3 or not parts[-2].isdigit():
        return LogEntry(time_s - skew, host, file, text, mark=ending)
    return LogEntry(
        time_s - skew, host, file, text, rank=first_rank + int(parts[-2]), stream=parts[-1][3:6], mark=ending
    )


def _read_arrivals(streams: Streams) -> Iterator[HostMessage]:
    """Yield what has arrived, after a short wait."""
    with contextlib.suppress(queue.Empty):
        yield streams.arrivals.get(timeout=POLL_S)
        for _ in range(1000):
            yield streams.arrivals.get_nowait()


MAX_BYTES = 1 << 20  # of each file that wait on its host while following
NOTE_EVERY_S = 5.0  # about lines that were left out
STATES = {BAR_MARK: "of a bar", UNENDED_MARK: "not ended"}
NOT_ENDED = " … (the line has not ended)"
BAR_EVERY_S = 60.0  # where its state is not shown in its place
HOST_COLORS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


class LogPrinter:
    """Filters, folds, formats and prints entries."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Check the options.

        Raises:
            UserError: An option is invalid.
        """
        self.args, self.out = args, sys.stdout
        self.include, self.exclude = (
            _compile_regexes(args.include, "--include"),
            _compile_regexes(args.exclude, "--exclude"),
        )
        self.highlight = _compile_regexes(args.highlight, "--highlight")
        self.ranks = _parse_ranks(args.rank)
        self.since_s = parse_seconds(args.since or "0", "--since")
        self.attempt = _parse_attempt(args.attempt)
        if args.tail is not None and args.tail < 0:
            raise UserError(f"--tail: {args.tail} is negative; use 0 or more")
        if args.follow and args.first_error:
            raise UserError("--first-error cannot be used with -f; omit one of them")
        self.color = args.output == "text" and self.out.isatty() and not os.environ.get("NO_COLOR")
        self.print_group = {"text": self._print_lines, "json": self._print_json, "raw": self._print_raw}[args.output]
        self.fold = LogFolder() if args.fold else Unfolded()
        self.raw_open: tuple[str, str] | None = None  # host and file of the last line, if that has not ended
        self.in_place = args.output == "text" and self.out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self.has_bar = False  # the terminal's last line is a bar's state
        self.bars = dict[tuple[str, str], float]()  # when a state was shown last, by host and file
        self.saved: set[Path] = set()
        self.hosts: dict[str, int] = {}
        self.n_dropped: dict[str, int] = {}  # lines, by host
        self.n_noted, self.note_at = dict[str, int](), 0.0

    def request(self, run: str, *, follow: bool, forever: bool) -> StreamRequest:
        """Build the request to the hosts."""
        args = self.args
        return StreamRequest(
            run,
            "",
            follow=follow,
            forever=forever,
            attempt=self.attempt,
            since_s=self.since_s,
            tail=args.tail,
            agent=args.agent,
            stderr=args.stderr,
            whole=args.output == "raw",
            most_bytes=MAX_BYTES if follow else 0,
        )

    def entries(self, entries: Iterator[LogEntry]) -> None:
        """Show entries, in order of arrival."""
        for entry in entries:
            if self.ranks and entry.rank not in self.ranks:
                continue
            if self.args.save and (self.args.output == "raw" or not entry.mark):
                self._save(entry)
            if entry.mark == BAR_MARK and not self._is_due(entry):
                continue
            if self._is_wanted(entry.text):
                for group in self.fold.push(entry):
                    self.print_group(group)
        if self.args.follow:
            for group in self.fold.pop_older_than(time.time() - self.fold.window_s):
                self.print_group(group)
        self.out.flush()

    def _is_due(self, entry: LogEntry) -> bool:
        """Return whether to show a bar's state: always in place on a terminal, elsewhere once a minute per log."""
        log_key = entry.host, entry.file
        if not self.in_place and entry.time < self.bars.get(log_key, 0.0) + BAR_EVERY_S:
            return False
        self.bars[log_key] = entry.time
        return True

    def _is_wanted(self, text: str) -> bool:
        included = not self.include or any(regex.search(text) for regex in self.include)
        return included and not any(regex.search(text) for regex in self.exclude)

    def dropped(self, counts: Mapping[str, int]) -> None:
        """Note now and then how many lines come too fast to be shown here."""
        self.n_dropped = dict(counts)
        if time.monotonic() >= self.note_at:
            self._note_dropped()

    def _note_dropped(self) -> None:
        for host, count in self.n_dropped.items():
            if n_more := count - self.n_noted.get(host, 0):
                why = "they come faster than they can be shown here; `logs` without -f shows them all"
                self.note(f"{host}: {pluralize(n_more, 'line')} left out: {why}")
                self.n_noted[host], self.note_at = count, time.monotonic() + NOTE_EVERY_S

    def note(self, text: str) -> None:
        """Print a note about the reading itself."""
        self._clear_bar()
        self.out.flush()
        print(f"- {text}", file=sys.stderr)

    def close(self) -> None:
        """Show what remains."""
        self._note_dropped()
        for group in self.fold.flush():
            self.print_group(group)
        self._clear_bar()
        with contextlib.suppress(BrokenPipeError):
            self.out.flush()

    def _print_raw(self, group: Sequence[LogEntry]) -> None:
        entry = group[0]
        log_key = entry.host, entry.file
        begin = "\n" if self.raw_open not in (None, log_key) else ""  # another file's line had not ended
        self.raw_open, end = (log_key, "") if entry.mark == UNENDED_MARK else (None, "\n")
        self.out.write(f"{begin}{clean(entry.text) if self.out.isatty() else redact_tokens(entry.text)}{end}")

    def _print_json(self, group: Sequence[LogEntry]) -> None:
        entry = group[0]
        record = {"time": round(entry.time, 3), "host": entry.host, "rank": entry.rank, "stream": entry.stream}
        if len(group) > 1:
            record |= {"hosts": sorted({e.host for e in group}), "ranks": sorted({e.rank for e in group})}
        record |= {"state": STATES[entry.mark]} if entry.mark else {}
        self.out.write(json.dumps(record | {"text": clean(common_text(group))}, ensure_ascii=False) + "\n")

    def _print_lines(self, group: Sequence[LogEntry]) -> None:
        entry = group[0]
        if self.in_place and entry.mark == BAR_MARK:
            self._print_in_place(group)
            return
        clock = time.strftime("%H:%M:%S", time.localtime(entry.time))
        prefix = f"{clock} {format_hosts_and_ranks(group)} {entry.stream:3}"
        if self.color:
            color = HOST_COLORS[self.hosts.setdefault(entry.host, len(self.hosts)) % len(HOST_COLORS)]
            prefix = f"\x1b[{color}m{prefix}\x1b[0m"
        mark = NOT_ENDED if entry.mark == UNENDED_MARK else ""
        for line in clean(common_text(group) + mark).split("\n"):
            self._clear_bar()
            self.out.write(f"{prefix} │ {self._highlighted(line)}\n")

    def _print_in_place(self, group: Sequence[LogEntry]) -> None:
        """Show a bar's state in the last line of the terminal, which the next line overwrites."""
        self._clear_bar()
        line = f"{format_hosts_and_ranks(group)} │ {clean(common_text(group))}"
        self.out.write(line[: shutil.get_terminal_size().columns - 1])
        self.has_bar = True

    def _clear_bar(self) -> None:
        if self.has_bar:
            self.out.write("\r\x1b[K")
            self.has_bar = False

    def _highlighted(self, line: str) -> str:
        for regex in self.highlight if self.color else ():
            line = regex.sub(lambda match: fmt_if("\x1b[1;7m{}\x1b[0m", match[0]), line)
        return line

    def _save(self, entry: LogEntry) -> None:
        name = f"rank-{entry.rank}.{entry.stream}.log" if entry.rank >= 0 else "torchrun.log"
        path = self.args.save / entry.host / name
        mode = "a" if path in self.saved else "w"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(mode, encoding="utf-8") as file:  # one at a time: there are many
                file.write(redact_tokens(entry.text) + "\n" * (entry.mark != UNENDED_MARK))
        except OSError as error:
            raise UserError(f"--save: {path} cannot be written ({error.strerror}); name another directory") from None
        self.saved.add(path)


def _compile_regexes(texts: Sequence[str], flag: str) -> list[re.Pattern[str]]:
    regexes = []
    for text in texts:
        try:
            regexes.append(re.compile(text))
        except re.error as error:
            raise UserError(f"{flag}: {text!r} is not a valid regular expression ({error}); correct it") from None
    return regexes


def _parse_ranks(text: str) -> set[int]:
    ranks: set[int] = set()
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if not match:
            raise UserError(f"--rank: {text!r} is not a valid rank list; write 3 or 0-7,12")
        ranks |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranks


def _parse_attempt(text: str) -> int:
    if text == "all":
        return -1
    if not text.isdecimal():
        raise UserError(f"--attempt: {text!r} is not a valid attempt; write a number, or all")
    return int(text)
