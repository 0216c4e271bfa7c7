"""cluster-top's state: its source of events, the picture made from them, its logs, and its last ten minutes.

The last ten minutes of cluster-top, compressed and bounded: the screen goes back in them, and an incident has them written to a file.

The logs in cluster-top: the newest lines, folded, by the same engine as ``llama405b logs``.
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
PART_BYTES = 24 << 20  # of events; as many of pictures
PICTURE_EVERY_S = 2.0
AFTER_S = 20.0  # an incident's file has what followed, too
MOST_FILES = 10  # of a run; then the oldest is deleted


class BlackBox:
    """Takes every event and picture; forgets those that are older than ten minutes, or more than there is room for."""

    def __init__(self, source: EventSource) -> None:
        self.header = _packed(reader.dumps(Header(1, tuple(source.hosts), source.interval_s, source.badge)))
        self.parts = collections.deque[tuple[float, bytes]]()  # when each ends, and its events
        self.lines: list[str] = []  # of the part that is being filled
        self.begun = 0.0
        self.plans: dict[str, SourceEvent] = {}  # by host, the last event that tells the run's plan: it is sent once
        self.pictures = collections.deque[tuple[float, bytes]]()
        self.n_bytes = self.n_picture_bytes = 0
        self.bad_at: float | None = None  # when the incident began that is to be written

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
        """Keep a picture, unless the last one is as good as new."""
        if self.pictures and 0 <= pic.time - self.pictures[-1][0] < PICTURE_EVERY_S:
            return
        found = zlib.compress(pickle.dumps(pic, pickle.HIGHEST_PROTOCOL), 1)
        self.pictures.append((pic.time, found))
        self.n_picture_bytes += len(found)
        while self.pictures[0][0] < pic.time - KEPT_S or self.n_picture_bytes > PART_BYTES:
            self.n_picture_bytes -= len(self.pictures.popleft()[1])

    @property
    def span(self) -> tuple[float, float]:
        """From when until when there are pictures."""
        return (self.pictures[0][0], self.pictures[-1][0]) if self.pictures else (0.0, 0.0)

    def at(self, moment: float) -> Picture | None:
        """Return the picture of a moment, or the one before it; None if there is none."""
        index = bisect.bisect_right(self.pictures, moment, key=lambda entry: entry[0])
        if not self.pictures:
            return None
        found: Picture = pickle.loads(zlib.decompress(self.pictures[max(0, index - 1)][1]))
        return found

    def incident(self, pic: Picture) -> Path | None:
        """Write what is kept to a file a while after a run went wrong, once for each time; returns the file."""
        if pic.verdict.exit_code < 3 or pic.training is None or not RUN_NAME.fullmatch(pic.training.run):
            self.bad_at = None
            return None
        if self.bad_at is None:
            self.bad_at = pic.time
        if not self.bad_at <= pic.time - AFTER_S:
            return None
        self.bad_at = math.inf  # it is written only once
        place = _place(pic.training.run)
        path = place / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(pic.time))}-{pic.verdict.lower()}.gz"
        place.mkdir(parents=True, exist_ok=True, mode=0o700)  # it has lines of logs
        write_atomic(path, self.recording())
        for old in sorted(place.glob("*.gz"))[:-MOST_FILES]:
            old.unlink()
        return path

    def recording(self) -> bytes:
        """Return what is kept as a recording; each part of it is compressed by itself, as gzip allows."""
        first = self.parts[0][0] - PART_S if self.parts else self.begun
        plans = [dataclasses.replace(event, t=first) for event in self.plans.values() if event.t < first]
        known = [_packed("\n".join(map(reader.dumps, plans)))] if plans else []
        rest = [_packed("\n".join(self.lines))] if self.lines else []
        return b"".join([self.header, *known, *(part for _, part in self.parts), *rest, _packed(LAST_LINE)])


def _packed(text: str) -> bytes:
    return gzip.compress(text.encode() + b"\n", 1)


def _place(run: str) -> Path:
    """Where a run's files are: beside its others if it was launched from here, else among what this user's programs keep."""
    here = RunDir.here(run)
    if here.path.is_dir():
        return here.black_box
    return state_directory() / "black-box" / run


KEPT, KEPT_OF_HOST = 3000, 50  # newest lines in all, and at least of each host
TAIL = 100  # lines of each file at first
MOST_BYTES = 1 << 16  # of each file at a time
MOST_CHARS = 1 << 16  # of a block
BAR_LINES = 100  # at the end, among which the earlier state of a bar is looked for
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
        text, how = clean(group_text(group) if len(group) > 1 else group[0].text), group[0].how
        hosts, ranks = frozenset(entry.host for entry in group), frozenset(entry.rank for entry in group)
        where, error = where_of(group), is_error(group[0])
        if how == BAR:  # in the place of its state before
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
    """Reads the logs of a run in a thread, and adds them to the source's events."""

    def __init__(self, source: Live, fleet: Fleet, run: str, first_ranks: Mapping[str, int]) -> None:
        request = StreamRequest(run, "", follow=True, tail=TAIL, most_bytes=MOST_BYTES)
        self.intake, self.command = source.intake, fleet.command_to_type("logs", run)
        self.reader = LogReader(fleet, run, first_ranks, request)
        self.counted: dict[str, int] = {}  # by host, lines that are known to be missing
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
        """See ``logs.Sink``. Omits the reason, so that a network failure folds into one line for all hosts."""
        words = f"(cluster-top cannot read logs from this host; `{self.command}` says why)"
        self.intake.put_block(Entry(time.time(), text.partition(": ")[0], "", words))

    def close(self) -> None:
        """End the agents on the hosts."""
        self.reader.streams.close()


FIRST_S = 14.0  # for every host to answer or fail; then --once prints what it has
PLAIN_WIDTH = 120
GUARD_EVERY_S, ACCOUNT_EVERY_S = 3.0, 60.0
ACCOUNT_SOON_S = 2.0  # between two, when something has happened that changes it
ACCOUNT_SHARE = 0.01  # of the head's time, at most, for accounts
LOGS_WAIT_S = 4.0  # for all hosts to report the run


class Turn(NamedTuple):
    """What a run has come to: another one changes what its time went into."""

    run: str
    attempt: int
    steps: bool  # whether this attempt has taken a step
    is_over: bool


class Session:
    """A source of events, and the state made from them."""

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
        self.log_hosts: set[str] = set()  # hosts they read
        self.guard_at = self.account_at = self.account_soon_at = 0.0
        self.turn: Turn | None = None  # of which there is an account
        # of which run, and when those began that are over
        self.incidents: tuple[str, frozenset[float]] = "", frozenset()
        self.box: BlackBox | None = None  # if more than one picture is looked at
        self.moment = self.awake_at = source.now()  # up to which events were taken; and when it last was awake

    def advance(self, until: float) -> None:
        """Take the events up to a moment of the source's clock; it is called at least every second."""
        self.moment = until
        for event in self.source.events(until):
            self._notice_sleep()
            self.take(event)
        self._notice_sleep()
        self.logs.settle(self.source.now())

    def _notice_sleep(self) -> None:
        """Notice that this machine slept, before what the hosts did meanwhile is judged."""
        now = self.source.now()
        away_s, self.awake_at = now - self.awake_at, now
        if away_s > thresholds.SLEPT_S and isinstance(self.source, Live):
            self.cluster.woke(away_s, now)

    def take(self, event: SourceEvent) -> None:
        """Take one event."""
        if self.box and self.fleet:  # a recording is a file already
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
        """Judge the moment of an event, so that what begins and ends between two pictures is noticed too."""
        if event.host == self.source.hosts[-1]:
            self.cluster.advance(event.t)

    def picture(self, *, logs: bool) -> Picture:
        """Return the current picture; with ``logs``, start to follow the run's logs."""
        if self.fleet and logs:
            self._follow_logs(self.fleet)
        moment = self.source.now()
        if isinstance(self.source, Replay) and not self.source.done():
            moment = self.moment
        self.cluster.advance(moment)
        if self.fleet and time.monotonic() > self.guard_at:  # of the run that was just chosen
            self.guard_at = time.monotonic() + GUARD_EVERY_S
            self.cluster.guard = guard_shown(self.cluster.run, self.cluster.guards_heard(moment))
        elif isinstance(self.source, Replay):
            self.cluster.guard = guard_heard(self.cluster.guards_heard(moment))
        if self.fleet and self.box and self.cluster.run and self._wants_account():
            self.account_at = self.account_soon_at = math.inf  # until this one is answered
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
        """Keep the last ten minutes from now on."""
        self.box = BlackBox(self.source)

    def _keep(self, box: BlackBox, pic: Picture) -> None:
        box.see(pic)
        if not self.fleet:
            return
        try:
            written = box.incident(pic)
        except OSError as error:
            why = f"{given('{}: ', error.filename)}{reason_of(error)}{remedy_of(error)}"
            self.cluster.note(f"the last ten minutes could not be written ({why})", pic.time)
            return
        if written:
            words = f"the last ten minutes are in {written}: {self.cluster.program} top --replay shows them"
            self.cluster.note(words, pic.time)

    def _tell_incidents(self, now: float) -> None:
        """Note each incident once its run goes on, in one line: what, how long until the next step, and what that cost."""
        run, account = self.cluster.account
        if account is None:
            return
        over = {incident.began: incident for incident in account.incidents if incident.resumed is not None}
        known, self.incidents = self.incidents, (run, frozenset(over))
        if known[0] == run:  # else all of them were over before it was looked at
            unit = "GPU-h" if any(host.gpus for host in self.cluster.hosts.values()) else "rank-h"
            for began in sorted(over.keys() - known[1]):
                xids = self.cluster.xids_between(began, over[began].failed)
                self.cluster.note(f"incident: {incident_line(account, over[began], unit, xids)}", now)

    def _wants_account(self) -> bool:
        """Whether it is time to ask what the run's time went into: every minute, and when an attempt begins, steps or ends."""
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
        """Ask what the run's time went into; the screen does not wait for it."""
        began = time.monotonic()
        head = next((node for node, first, _ in self.cluster.found.nodes if first == 0), "")
        if head in fleet.hosts:
            with contextlib.suppress(Exception):  # the screen was left meanwhile, and its connections closed
                self.cluster.account = run, account_of_head(fleet, run, head)
        took_s = time.monotonic() - began  # the head reads all that its steps wrote
        self.account_soon_at = time.monotonic() + ACCOUNT_SOON_S
        self.account_at = time.monotonic() + max(ACCOUNT_EVERY_S, took_s / ACCOUNT_SHARE)

    def _follow_logs(self, fleet: Fleet) -> None:
        """Read the logs of every host that reports the run; those present at the start are merged in order of time."""
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
        if of and self.log_of and of[0] != self.log_of[0]:  # or another run's lines would seem to be its own
            self.logs = LogPane()
        if of and self.fleet:
            self.logs.command = self.fleet.command_to_type("logs", of[0])
        self.log_of, self.log_since = of, time.monotonic()

    def _end_logs(self) -> None:
        for stream in self.log_streams:
            stream.close()
        self.log_streams, self.log_hosts = [], set()

    def close(self) -> None:
        """End everything; nothing stays on the hosts."""
        self._end_logs()
        self.source.close()


def guard_shown(run: str, heard: query.GuardReports) -> GuardShown:
    """Return what a run's guard does, wherever it runs."""
    if not re.fullmatch(r"[\w.-]+", run) or not (found := query.guard_of_hosts(run, heard, time.time())):
        return GuardShown.NONE
    if found.gone:
        return GuardShown.GONE
    return GuardShown(found.state.state)


def guard_heard(heard: query.GuardReports) -> GuardShown:
    """Return what a run's guard did, as its hosts last heard: a recording knows no more."""
    if not heard:
        return GuardShown.NONE
    _, state = min(heard, key=lambda entry: entry[0])
    return GuardShown.GONE if state.died else GuardShown(state.state)
