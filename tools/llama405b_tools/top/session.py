"""cluster-top's session: the source of events, the state and view made from them, the logs, and the last ten minutes.

The last ten minutes are kept compressed and bounded; the screen can go back in them, and an incident writes them to a file. Logs are
folded by the same engine as ``llama405b logs``.
"""

import bisect
import collections
import contextlib
import dataclasses
import gzip
import math
import pickle
import re
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from llama405b.contract import reader
from llama405b.contract.errors import given, reason_of, remedy_of
from llama405b.contract.files import write_atomic
from llama405b.contract.paths import RunDir
from llama405b.spec.plan import RUN_NAME
from llama405b_tools.agent.messages import StreamRequest
from llama405b_tools.hosts.fleet import Fleet, state_directory
from llama405b_tools.run import query
from llama405b_tools.run.log_reader import NOT_ENDED, LogReader, entry_of
from llama405b_tools.run.query import account_of_head, incident_line
from llama405b_tools.text.words import (
    BAR,
    UNENDED,
    Entry,
    Fold,
    clean,
    fold_names,
    group_text,
    is_error,
    redact,
    where_of,
)
from llama405b_tools.top.draw.ui import LogLine, Ui
from llama405b_tools.top.event_sources import LAST_LINE, EventSource, Header, Live, Recorder, Replay, SourceEvent
from llama405b_tools.top.state import thresholds
from llama405b_tools.top.state.cluster import ClusterState
from llama405b_tools.top.state.picture import OVER, GuardShown, Picture
from llama405b_tools.top.state.trends import Trends

KEPT_S, PART_S = 600.0, 10.0
PART_BYTES = 24 << 20  # bytes of events, and as many of views
PICTURE_EVERY_S = 2.0
AFTER_S = 20.0  # write an incident's file this much later, so that it includes what followed
MOST_FILES = 10  # files per run; then the oldest is deleted


class BlackBox:
    """Keeps the events and views of the last ten minutes, bounded in bytes."""

    def __init__(self, source: EventSource) -> None:
        self.header = _packed(reader.dumps(Header(1, tuple(source.hosts), source.interval_s, source.badge)))
        self.parts = collections.deque[tuple[float, bytes]]()  # end time and compressed events
        self.lines: list[str] = []  # events of the part being filled
        self.begun = 0.0
        self.plans: dict[
            str, SourceEvent
        ] = {}  # by host, the last event with the run's plan, which a sampler sends only once
        self.pictures = collections.deque[tuple[float, bytes]]()
        self.n_bytes = self.n_picture_bytes = 0
        self.bad_at: float | None = None  # start of the incident to be written; inf: written already

    def take(self, event: SourceEvent) -> None:
        """Keep an event."""
        self.lines.append(reader.dumps(event))
        self.begun = self.begun or event.t
        if isinstance(event.frame, dict) and isinstance(run := event.frame.get("run"), dict) and run.get("nodes"):
            self.plans[event.host] = event
        if event.t > self.begun + PART_S:
            self._end_part(event.t)

    def _end_part(self, now: float) -> None:
        part = _packed("\n".join(self.lines))
        self.parts.append((now, part))
        self.n_bytes += len(part)
        self.lines, self.begun = [], 0.0
        while self.parts and (self.parts[0][0] < now - KEPT_S or self.n_bytes > PART_BYTES):
            self.n_bytes -= len(self.parts.popleft()[1])

    def see(self, pic: Picture) -> None:
        """Keep a view, unless the last one is recent."""
        if self.pictures and 0 <= pic.time - self.pictures[-1][0] < PICTURE_EVERY_S:
            return
        found = zlib.compress(pickle.dumps(pic, pickle.HIGHEST_PROTOCOL), 1)
        self.pictures.append((pic.time, found))
        self.n_picture_bytes += len(found)
        while self.pictures[0][0] < pic.time - KEPT_S or self.n_picture_bytes > PART_BYTES:
            self.n_picture_bytes -= len(self.pictures.popleft()[1])

    @property
    def span(self) -> tuple[float, float]:
        """The first and last time with a view."""
        return (self.pictures[0][0], self.pictures[-1][0]) if self.pictures else (0.0, 0.0)

    def at(self, moment: float) -> Picture | None:
        """Return the view of a moment, or the last one before it; None if there are none."""
        index = bisect.bisect_right(self.pictures, moment, key=lambda entry: entry[0])
        if not self.pictures:
            return None
        found: Picture = pickle.loads(zlib.decompress(self.pictures[max(0, index - 1)][1]))
        return found

    def incident(self, pic: Picture) -> Path | None:
        """Write the history to a file a while after a run failed, once per failure; return the file."""
        if pic.verdict.exit_code < 3 or pic.training is None or not RUN_NAME.fullmatch(pic.training.run):
            self.bad_at = None
            return None
        if self.bad_at is None:
            self.bad_at = pic.time
        if not self.bad_at <= pic.time - AFTER_S:
            return None
        self.bad_at = math.inf  # written once per incident
        place = _place(pic.training.run)
        path = place / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(pic.time))}-{pic.verdict.lower()}.gz"
        place.mkdir(parents=True, exist_ok=True, mode=0o700)  # private: it contains log lines
        write_atomic(path, self.recording())
        for old in sorted(place.glob("*.gz"))[:-MOST_FILES]:
            old.unlink()
        return path

    def recording(self) -> bytes:
        """Return the history as a recording; gzip allows concatenated compressed parts."""
        first = self.parts[0][0] - PART_S if self.parts else self.begun
        plans = [dataclasses.replace(event, t=first) for event in self.plans.values() if event.t < first]
        known = [_packed("\n".join(map(reader.dumps, plans)))] if plans else []
        rest = [_packed("\n".join(self.lines))] if self.lines else []
        return b"".join([self.header, *known, *(part for _, part in self.parts), *rest, _packed(LAST_LINE)])


def _packed(text: str) -> bytes:
    return gzip.compress(text.encode() + b"\n", 1)


def _place(run: str) -> Path:
    """Return the directory for incidents: in the run's directory if launched here, else in the state directory."""
    here = RunDir.here(run)
    if here.path.is_dir():
        return here.black_box
    return state_directory() / "black-box" / run


KEPT, KEPT_OF_HOST = 3000, 50  # newest lines kept in all, and at least per host
TAIL = 100  # lines of each file at first
MOST_BYTES = 1 << 16  # bytes of each file per read
MOST_CHARS = 1 << 16  # characters of a block
BAR_LINES = 100  # newest lines searched for the earlier state of a progress bar
LINE_CHARS = 1000  # wider than a screen


class LogPane:
    """Folds log blocks that arrive in order of time, and keeps the newest lines."""

    def __init__(self) -> None:
        self.command = "llama405b logs"  # command that shows all lines
        self.fold = Fold()
        self.lines: list[LogLine] = []
        self.count = 0  # lines so far
        self.dropped: dict[str, int] = {}  # by host, lines dropped recently
        self.dropped_at = 0.0

    def take(self, host: str, entries: Sequence[tuple[float, str, str]], first_rank: int) -> None:
        """Add blocks of one host: (operator's clock, file, text)."""
        for moment, file, text in entries:
            for group in self.fold.push(entry_of(host, moment, file, text, 0.0, first_rank)):
                self._add(group)

    def drop(self, host: str, count: int, now: float) -> None:
        """Count dropped lines of a host."""
        self.dropped[host] = self.dropped.get(host, 0) + count
        self.dropped_at = now

    def settle(self, now: float) -> None:
        """Add the groups older than the folding window, which are complete."""
        for group in self.fold.older_than(now - self.fold.window_s):
            self._add(group)
        if now > self.dropped_at + self.fold.window_s:
            self.lines.extend(self._missing())
            self.count += bool(self.dropped)
            self.dropped.clear()
        if len(self.lines) > KEPT:
            self._forget()

    def shown(self) -> list[LogLine]:
        """Return the lines; if lines were dropped recently, the last one says how many."""
        return [*self.lines, *self._missing()]

    def _missing(self) -> Iterator[LogLine]:
        if self.dropped:
            hosts, lines = sorted(self.dropped), sum(self.dropped.values())
            words = f"{lines:,} lines came too fast to be shown; `{self.command}` has them"
            yield LogLine(self.dropped_at, fold_names(hosts), words, hosts=frozenset(hosts), number=self.count + 1)

    def _forget(self) -> None:
        """Drop the oldest lines, but keep some of every host, however much the others write."""
        kept: list[LogLine] = []
        counts: collections.Counter[str] = collections.Counter()
        for line in reversed(self.lines):
            counts.update(line.hosts)
            if len(kept) < KEPT or min(counts[host] for host in line.hosts) <= KEPT_OF_HOST:
                kept.append(line)
        self.lines = kept[::-1]

    def _add(self, group: Sequence[Entry]) -> None:
        text, how = clean(group_text(group) if len(group) > 1 else group[0].text), group[0].how
        hosts, ranks = frozenset(entry.host for entry in group), frozenset(entry.rank for entry in group)
        where, error = where_of(group), is_error(group[0])
        if how == BAR:  # replace its previous state
            near = range(max(0, len(self.lines) - BAR_LINES), len(self.lines))
            for place in reversed([i for i in near if self.lines[i].is_bar and self.lines[i].where == where]):
                self.lines[place : place + 1] = []
        for line in (text + NOT_ENDED * (how == UNENDED)).split("\n"):
            self.count += 1
            self.lines.append(
                LogLine(group[0].time, where, line[:LINE_CHARS], error, hosts, ranks, self.count, how == BAR)
            )

    def first_error(self) -> int | None:
        """Return the number of the first line that is an error."""
        return next((line.number for line in self.lines if line.is_error), None)


class LogStream:
    """Reads a run's logs in a thread and queues them as events of the source."""

    def __init__(self, source: Live, fleet: Fleet, run: str, first_ranks: Mapping[str, int]) -> None:
        request = StreamRequest(run, "", follow=True, tail=TAIL, most_bytes=MOST_BYTES)
        self.intake, self.command = source.intake, fleet.command_to_type("logs", run)
        self.reader = LogReader(fleet, run, first_ranks, request)
        self.counted: dict[str, int] = {}  # by host, dropped lines already counted
        threading.Thread(target=self.reader.show, args=(self,), daemon=True).start()

    def entries(self, entries: Iterator[Entry]) -> None:
        for entry in entries:
            self.intake.put_block(dataclasses.replace(entry, text=redact(entry.text[:MOST_CHARS]) + entry.how))

    def dropped(self, counts: Mapping[str, int]) -> None:
        for host, count in counts.items():
            if more := count - self.counted.get(host, 0):
                self.intake.drop(host, more)
                self.counted[host] = count

    def note(self, text: str) -> None:
        """Queue a note without its reason, so that a network failure folds into one line for all hosts."""
        words = f"(cluster-top cannot read logs from this host; `{self.command}` says why)"
        self.intake.put_block(Entry(time.time(), text.partition(": ")[0], "", words))

    def close(self) -> None:
        """Stop the agents on the hosts."""
        self.reader.streams.close()


FIRST_S = 14.0  # for every host to answer or fail; then --once prints what it has
PLAIN_WIDTH = 120
GUARD_EVERY_S, ACCOUNT_EVERY_S = 3.0, 60.0
ACCOUNT_SOON_S = 2.0  # least time between two accounts when the run changes
ACCOUNT_SHARE = 0.01  # most of the head host's time to spend on accounts
LOGS_WAIT_S = 4.0  # for all hosts to report the run


class Turn(NamedTuple):
    """The stage of a run; a new stage triggers a new account of its time."""

    run: str
    attempt: int
    steps: bool  # whether this attempt has taken steps
    is_over: bool


class Session:
    """A source of events and the state made from them."""

    def __init__(
        self, source: EventSource, fleet: Fleet | None, hang_after_s: float, recorder: Recorder | None = None
    ) -> None:
        self.source = source
        self.fleet = fleet
        self.recorder = recorder
        self.cluster = ClusterState(source.hosts, source.interval_s, hang_after_s=hang_after_s, badge=source.badge)
        self.logs = LogPane()
        self.trends = Trends()
        self.ui = Ui()
        self.log_of: tuple[str, int] | None = None  # run and attempt
        self.log_since = 0.0
        self.log_streams: list[LogStream] = []
        self.log_hosts: set[str] = set()  # hosts that these streams read
        self.guard_at = self.account_at = self.account_soon_at = 0.0
        self.turn: Turn | None = None  # the stage at the last account
        # run, and start times of its finished incidents
        self.incidents: tuple[str, frozenset[float]] = "", frozenset()
        self.box: BlackBox | None = None  # if the program shows more than one view
        self.moment = self.awake_at = (
            source.now()
        )  # time up to which events were processed; last time this machine was awake

    def advance(self, until: float) -> None:
        """Process the events up to a moment of the source's clock; called at least every second."""
        self.moment = until
        for event in self.source.events(until):
            self._notice_sleep()
            self.take(event)
        self._notice_sleep()
        self.logs.settle(self.source.now())

    def _notice_sleep(self) -> None:
        """Detect that this machine slept, before the hosts' events are judged."""
        now = self.source.now()
        away_s, self.awake_at = now - self.awake_at, now
        if away_s > thresholds.SLEPT_S and isinstance(self.source, Live):
            self.cluster.woke(away_s, now)

    def take(self, event: SourceEvent) -> None:
        """Process one event."""
        if self.box and self.fleet:  # not for a recording, which is a file already
            self.box.take(event)
        if self.recorder:
            try:
                self.recorder.write(event)
            except OSError as error:
                self.recorder = None
                self.cluster.note(f"--record: stopped, the file cannot be written ({error.strerror})", event.t)
        if event.frame is not None:
            self.cluster.take(event.host, event.frame, event.t)
        elif event.link:
            self.cluster.link(event.host, *event.link, event.t)
        elif event.note:
            self.cluster.note(event.note, event.t)
        elif event.entries:
            self.logs.take(event.host, event.entries, self.cluster.first_rank(event.host))
        elif event.dropped:
            self.logs.drop(event.host, event.dropped, event.t)

    def look(self, event: SourceEvent) -> None:
        """Advance the state to an event's time, so that changes between two views are noticed too."""
        if event.host == self.source.hosts[-1]:
            self.cluster.advance(event.t)

    def picture(self, *, logs: bool) -> Picture:
        """Return the current view; with ``logs``, start to follow the run's logs."""
        if self.fleet and logs:
            self._follow_logs(self.fleet)
        moment = self.source.now()
        if isinstance(self.source, Replay) and not self.source.done():
            moment = self.moment
        self.cluster.advance(moment)
        if self.fleet and time.monotonic() > self.guard_at:  # after advance, which chooses the run
            self.guard_at = time.monotonic() + GUARD_EVERY_S
            self.cluster.guard = guard_shown(self.cluster.run, self.cluster.guards_heard(moment))
        elif isinstance(self.source, Replay):
            self.cluster.guard = guard_heard(self.cluster.guards_heard(moment))
        if self.fleet and self.box and self.cluster.run and self._wants_account():
            self.account_at = self.account_soon_at = math.inf  # no new request until this one returns
            threading.Thread(target=self._ask_account, args=(self.fleet, self.cluster.run), daemon=True).start()
        self._tell_incidents(moment)
        if isinstance(self.source, Live):
            self.source.stay(self.cluster.stay)
        pic = self.cluster.picture()
        self.trends.take(pic, self.cluster.steps())
        if self.box:
            self._keep(self.box, pic)
        return pic

    def keep(self) -> None:
        """Start to keep the last ten minutes."""
        self.box = BlackBox(self.source)

    def _keep(self, box: BlackBox, pic: Picture) -> None:
        box.see(pic)
        if not self.fleet:
            return
        try:
            written = box.incident(pic)
        except OSError as error:
            why = f"{given('{}: ', error.filename)}{reason_of(error)}{remedy_of(error)}"
            self.cluster.note(f"cannot save the last ten minutes ({why})", pic.time)
            return
        if written:
            words = f"the last ten minutes are in {written}: {self.cluster.program} top --replay shows them"
            self.cluster.note(words, pic.time)

    def _tell_incidents(self, now: float) -> None:
        """Report each incident once the run has resumed: cause, time to the next step, and cost."""
        run, account = self.cluster.account
        if account is None:
            return
        over = {incident.began: incident for incident in account.incidents if incident.resumed is not None}
        known, self.incidents = self.incidents, (run, frozenset(over))
        if known[0] == run:  # else they all ended before this run was shown
            unit = "GPU-h" if any(host.gpus for host in self.cluster.hosts.values()) else "rank-h"
            for began in sorted(over.keys() - known[1]):
                xids = self.cluster.xids_between(began, over[began].failed)
                self.cluster.note(f"incident: {incident_line(account, over[began], unit, xids)}", now)

    def _wants_account(self) -> bool:
        """Return whether to request a new account: every minute, and when the run's stage changes."""
        now, turn = time.monotonic(), self._turn()
        if now > self.account_at or (turn != self.turn and now > self.account_soon_at):
            self.turn = turn
            return True
        return False

    def _turn(self) -> Turn:
        found = self.cluster.found
        attempt = max((run.attempt for run in found.told.values()), default=0)
        steps = bool(found.metrics) and found.metrics[-1].attempt == attempt
        return Turn(self.cluster.run, attempt, steps, found.phase[0] in OVER)

    def _ask_account(self, fleet: Fleet, run: str) -> None:
        """Request the account of the run's time; runs in a thread."""
        began = time.monotonic()
        head = next((node for node, first, _ in self.cluster.found.nodes if first == 0), "")
        if head in fleet.hosts:
            with contextlib.suppress(Exception):  # the program may be exiting, with its connections closed
                self.cluster.account = run, account_of_head(fleet, run, head)
        took_s = time.monotonic() - began  # the head host reads the whole metrics file for it
        self.account_soon_at = time.monotonic() + ACCOUNT_SOON_S
        self.account_at = time.monotonic() + max(ACCOUNT_EVERY_S, took_s / ACCOUNT_SHARE)

    def _follow_logs(self, fleet: Fleet) -> None:
        """Read the logs of every host that reports the run; those known at the start are merged by time."""
        of, ranks = self.cluster.log_source()
        if of != self.log_of:
            self._change_logs(of)
        new = {host: rank for host, rank in ranks.items() if host not in self.log_hosts}
        waits = len(ranks) < len(self.source.hosts) and time.monotonic() < self.log_since + LOGS_WAIT_S
        if of and new and not waits and isinstance(self.source, Live):
            self.log_hosts |= set(new)
            self.log_streams.append(LogStream(self.source, fleet, of[0], new))

    def _change_logs(self, of: tuple[str, int] | None) -> None:
        self._end_logs()
        if (
            of and self.log_of and of[0] != self.log_of[0]
        ):  # else the previous run's lines would seem to belong to this one
            self.logs = LogPane()
        if of and self.fleet:
            self.logs.command = self.fleet.command_to_type("logs", of[0])
        self.log_of, self.log_since = of, time.monotonic()

    def _end_logs(self) -> None:
        for stream in self.log_streams:
            stream.close()
        self.log_streams, self.log_hosts = [], set()

    def close(self) -> None:
        """Close all streams; nothing stays on the hosts."""
        self._end_logs()
        self.source.close()


def guard_shown(run: str, heard: query.GuardReports) -> GuardShown:
    """Return the state of a run's guard, wherever it runs."""
    if not re.fullmatch(r"[\w.-]+", run) or not (found := query.guard_of_hosts(run, heard, time.time())):
        return GuardShown.NONE
    if found.gone:
        return GuardShown.GONE
    return GuardShown(found.state.state)


def guard_heard(heard: query.GuardReports) -> GuardShown:
    """Return the guard's last state as its hosts recorded it, for a replay."""
    if not heard:
        return GuardShown.NONE
    _, state = min(heard, key=lambda entry: entry[0])
    return GuardShown.GONE if state.died else GuardShown(state.state)
