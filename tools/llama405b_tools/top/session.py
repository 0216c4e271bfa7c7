"""cluster-top's session: the source of events, the state and view made from them, the logs, and the last ten minutes.

The last ten minutes are kept compressed and bounded; the screen can go back in them, and an incident writes them to a file. Logs are
folded by the same engine as ``llama405b logs``.
"""

import bisect
import collections
import contextlib
import dataclasses
import functools
import gzip
import math
import pickle
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from llama405b.contract import reader
from llama405b.contract.errors import fmt_if, reason_of, remedy_of
from llama405b.contract.files import write_atomic
from llama405b.contract.paths import RunDir
from llama405b.spec.plan import RUN_NAME
from llama405b_tools.agent.messages import StreamRequest
from llama405b_tools.hosts.fleet import Fleet, state_directory
from llama405b_tools.run import query
from llama405b_tools.run.log_reader import NOT_ENDED, LogReader, make_entry
from llama405b_tools.run.query import account_of_head, incident_line
from llama405b_tools.text.figures import hour_unit
from llama405b_tools.text.words import (
    BAR_MARK,
    UNENDED_MARK,
    LogEntry,
    LogFolder,
    clean,
    common_text,
    fold_names,
    format_hosts_and_ranks,
    is_error,
    redact_tokens,
)
from llama405b_tools.top.draw.ui import LogLine, Ui
from llama405b_tools.top.event_sources import (
    LAST_LINE,
    EventSource,
    LiveSource,
    Recorder,
    RecordingHeader,
    ReplaySource,
    SourceEvent,
)
from llama405b_tools.top.state import thresholds
from llama405b_tools.top.state.cluster import ClusterState
from llama405b_tools.top.state.picture import OVER_PHASES, ClusterView, GuardShown
from llama405b_tools.top.state.trends import Trends

HISTORY_S, PART_S = 600.0, 10.0
PART_BYTES = 24 << 20  # bytes of events, and as many of views
PICTURE_EVERY_S = 2.0
INCIDENT_DELAY_S = 20.0  # write an incident's file this much later, so that it includes what followed
MAX_FILES = 10  # files per run; then the oldest is deleted


class BlackBox:
    """Keeps the events and views of the last ten minutes, bounded in bytes."""

    def __init__(self, source: EventSource) -> None:
        self.header = _compress(reader.dumps(RecordingHeader(1, tuple(source.hosts), source.interval_s, source.badge)))
        self.parts = collections.deque[tuple[float, bytes]]()  # end time and compressed events
        self.lines: list[str] = []  # events of the part being filled
        self.part_begin = 0.0
        self.plans: dict[
            str, SourceEvent
        ] = {}  # by host, the last event with the run's plan, which a sampler sends only once
        self.views = collections.deque[tuple[float, bytes]]()
        self.n_bytes = self.n_view_bytes = 0
        self.incident_start: float | None = None  # start of the incident to be written; inf: written already

    def add_event(self, event: SourceEvent) -> None:
        """Keep an event."""
        self.lines.append(reader.dumps(event))
        self.part_begin = self.part_begin or event.t
        if isinstance(event.frame, dict) and isinstance(run := event.frame.get("run"), dict) and run.get("nodes"):
            self.plans[event.host] = event
        if event.t > self.part_begin + PART_S:
            self._end_part(event.t)

    def _end_part(self, now: float) -> None:
        part = _compress("\n".join(self.lines))
        self.parts.append((now, part))
        self.n_bytes += len(part)
        self.lines, self.part_begin = [], 0.0
        while self.parts and (self.parts[0][0] < now - HISTORY_S or self.n_bytes > PART_BYTES):
            self.n_bytes -= len(self.parts.popleft()[1])

    def add_view(self, view: ClusterView) -> None:
        """Keep a view, unless the last one is recent."""
        if self.views and 0 <= view.time - self.views[-1][0] < PICTURE_EVERY_S:
            return
        packed = zlib.compress(pickle.dumps(view, pickle.HIGHEST_PROTOCOL), 1)
        self.views.append((view.time, packed))
        self.n_view_bytes += len(packed)
        while self.views[0][0] < view.time - HISTORY_S or self.n_view_bytes > PART_BYTES:
            self.n_view_bytes -= len(self.views.popleft()[1])

    @property
    def span(self) -> tuple[float, float]:
        """The first and last time with a view."""
        return (self.views[0][0], self.views[-1][0]) if self.views else (0.0, 0.0)

    def view_at(self, moment: float) -> ClusterView | None:
        """Return the view of a moment, or the last one before it; None if there are none."""
        index = bisect.bisect_right(self.views, moment, key=lambda entry: entry[0])
        if not self.views:
            return None
        view: ClusterView = pickle.loads(zlib.decompress(self.views[max(0, index - 1)][1]))
        return view

    def write_incident(self, view: ClusterView) -> Path | None:
        """Write the history to a file a while after a run failed, once per failure; return the file."""
        if view.verdict.exit_code < 3 or view.training is None or not RUN_NAME.fullmatch(view.training.run):
            self.incident_start = None
            return None
        if self.incident_start is None:
            self.incident_start = view.time
        if not self.incident_start <= view.time - INCIDENT_DELAY_S:
            return None
        self.incident_start = math.inf  # written once per incident
        directory = _incident_directory(view.training.run)
        path = directory / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(view.time))}-{view.verdict.lower()}.gz"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # private: it contains log lines
        write_atomic(path, self.recording())
        for old_file in sorted(directory.glob("*.gz"))[:-MAX_FILES]:
            old_file.unlink()
        return path

    def recording(self) -> bytes:
        """Return the history as a recording; gzip allows concatenated compressed parts."""
        first = self.parts[0][0] - PART_S if self.parts else self.part_begin
        plans = [dataclasses.replace(event, t=first) for event in self.plans.values() if event.t < first]
        plan_parts = [_compress("\n".join(map(reader.dumps, plans)))] if plans else []
        open_part = [_compress("\n".join(self.lines))] if self.lines else []
        return b"".join([self.header, *plan_parts, *(part for _, part in self.parts), *open_part, _compress(LAST_LINE)])


def _compress(text: str) -> bytes:
    return gzip.compress(text.encode() + b"\n", 1)


def _incident_directory(run: str) -> Path:
    """Return the directory for incidents: in the run's directory if launched here, else in the state directory."""
    run_dir = RunDir.from_name(run)
    if run_dir.path.is_dir():
        return run_dir.black_box
    return state_directory() / "black-box" / run


MAX_LINES, MIN_HOST_LINES = 3000, 50  # newest lines kept in all, and at least per host
TAIL_LINES = 100  # lines of each file at first
MAX_FILE_BYTES = 1 << 16  # bytes of each file per read
MAX_BLOCK_CHARS = 1 << 16  # characters of a block
BAR_LINES = 100  # newest lines searched for the earlier state of a progress bar
LINE_CHARS = 1000  # wider than a screen


class LogPane:
    """Folds log blocks that arrive in order of time, and keeps the newest lines."""

    def __init__(self) -> None:
        self.command = "llama405b logs"  # command that shows all lines
        self.fold = LogFolder()
        self.lines: list[LogLine] = []
        self.count = 0  # lines so far
        self.dropped: dict[str, int] = {}  # by host, lines dropped recently
        self.dropped_at = 0.0

    def take(self, host: str, entries: Sequence[tuple[float, str, str]], first_rank: int) -> None:
        """Add blocks of one host: (operator's clock, file, text)."""
        for moment, file, text in entries:
            for group in self.fold.push(make_entry(host, moment, file, text, 0.0, first_rank)):
                self._add(group)

    def drop(self, host: str, count: int, now: float) -> None:
        """Count dropped lines of a host."""
        self.dropped[host] = self.dropped.get(host, 0) + count
        self.dropped_at = now

    def add_complete(self, now: float) -> None:
        """Add the groups older than the folding window, which are complete."""
        for group in self.fold.pop_older_than(now - self.fold.window_s):
            self._add(group)
        if now > self.dropped_at + self.fold.window_s:
            self.lines.extend(self._missing_lines())
            self.count += bool(self.dropped)
            self.dropped.clear()
        if len(self.lines) > MAX_LINES:
            self._drop_oldest()

    def shown_lines(self) -> list[LogLine]:
        """Return the lines; if lines were dropped recently, the last one says how many."""
        return [*self.lines, *self._missing_lines()]

    def _missing_lines(self) -> Iterator[LogLine]:
        if self.dropped:
            hosts, lines = sorted(self.dropped), sum(self.dropped.values())
            words = f"{lines:,} lines came too fast to be shown; `{self.command}` has them"
            yield LogLine(self.dropped_at, fold_names(hosts), words, hosts=frozenset(hosts), number=self.count + 1)

    def _drop_oldest(self) -> None:
        """Drop the oldest lines, but keep some of every host, however much the others write."""
        newest: list[LogLine] = []
        counts: collections.Counter[str] = collections.Counter()
        for line in reversed(self.lines):
            counts.update(line.hosts)
            if len(newest) < MAX_LINES or min(counts[host] for host in line.hosts) <= MIN_HOST_LINES:
                newest.append(line)
        self.lines = newest[::-1]

    def _add(self, group: Sequence[LogEntry]) -> None:
        text, mark = clean(common_text(group) if len(group) > 1 else group[0].text), group[0].mark
        hosts, ranks = frozenset(entry.host for entry in group), frozenset(entry.rank for entry in group)
        location, error = format_hosts_and_ranks(group), is_error(group[0])
        if mark == BAR_MARK:  # replace its previous state
            nearby = range(max(0, len(self.lines) - BAR_LINES), len(self.lines))
            for index in reversed([i for i in nearby if self.lines[i].is_bar and self.lines[i].where == location]):
                self.lines[index : index + 1] = []
        for line in (text + NOT_ENDED * (mark == UNENDED_MARK)).split("\n"):
            self.count += 1
            self.lines.append(
                LogLine(group[0].time, location, line[:LINE_CHARS], error, hosts, ranks, self.count, mark == BAR_MARK)
            )

    def first_error(self) -> int | None:
        """Return the number of the first line that is an error."""
        return next((line.number for line in self.lines if line.is_error), None)


class LogStream:
    """Reads a run's logs in a thread and queues them as events of the source."""

    def __init__(self, source: LiveSource, fleet: Fleet, run: str, first_ranks: Mapping[str, int]) -> None:
        request = StreamRequest(run, "", follow=True, tail=TAIL_LINES, most_bytes=MAX_FILE_BYTES)
        self.intake, self.command = source.intake, fleet.command_to_type("logs", run)
        self.reader = LogReader(fleet, run, first_ranks, request)
        self.n_reported: dict[str, int] = {}  # by host, dropped lines already counted
        threading.Thread(target=self.reader.show_all, args=(self,), daemon=True).start()

    def entries(self, entries: Iterator[LogEntry]) -> None:
        for entry in entries:
            self.intake.put_block(
                dataclasses.replace(entry, text=redact_tokens(entry.text[:MAX_BLOCK_CHARS]) + entry.mark)
            )

    def dropped(self, counts: Mapping[str, int]) -> None:
        for host, count in counts.items():
            if more := count - self.n_reported.get(host, 0):
                self.intake.drop(host, more)
                self.n_reported[host] = count

    def note(self, text: str) -> None:
        """Queue a note without its reason, so that a network failure folds into one line for all hosts."""
        words = f"(cluster-top cannot read logs from this host; `{self.command}` says why)"
        self.intake.put_block(LogEntry(time.time(), text.partition(": ")[0], "", words))

    def close(self) -> None:
        """Stop the agents on the hosts."""
        self.reader.streams.close()


FIRST_S = 14.0  # for every host to answer or fail; then --once prints what it has
PLAIN_WIDTH = 120
GUARD_EVERY_S, ACCOUNT_EVERY_S = 3.0, 60.0
ACCOUNT_SOON_S = 2.0  # least time between two accounts when the run changes
ACCOUNT_SHARE = 0.01  # most of the head host's time to spend on accounts
LOGS_WAIT_S = 4.0  # for all hosts to report the run


class RunStage(NamedTuple):
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
        # what is told of each event, and of each view
        self.on_event: list[Callable[[SourceEvent], object]] = [self._record] if recorder else []
        self.on_view: list[Callable[[ClusterView], object]] = []
        self.cluster = ClusterState(source.hosts, source.interval_s, hang_after_s=hang_after_s, badge=source.badge)
        self.logs = LogPane()
        self.trends = Trends()
        self.ui = Ui()
        self.log_run: tuple[str, int] | None = None  # run and attempt
        self.log_since = 0.0
        self.log_streams: list[LogStream] = []
        self.log_hosts: set[str] = set()  # hosts that these streams read
        self.guard_at = self.account_at = self.account_soon_at = 0.0
        self.run_stage: RunStage | None = None  # the stage at the last account
        # run, and start times of its finished incidents
        self.incidents: tuple[str, frozenset[float]] = "", frozenset()
        self.black_box: BlackBox | None = None  # if the program shows more than one view
        self.taken_until = self.awake_at = (
            source.now()
        )  # time up to which events were processed; last time this machine was awake

    def advance(self, until: float) -> None:
        """Process the events up to a moment of the source's clock; called at least every second."""
        self.taken_until = until
        for event in self.source.events(until):
            self._notice_sleep()
            self.take(event)
        self._notice_sleep()
        self.logs.add_complete(self.source.now())

    def _notice_sleep(self) -> None:
        """Detect that this machine slept, before the hosts' events are judged."""
        now = self.source.now()
        away_s, self.awake_at = now - self.awake_at, now
        if away_s > thresholds.SLEPT_S and isinstance(self.source, LiveSource):
            self.cluster.note_sleep(away_s, now)

    def take(self, event: SourceEvent) -> None:
        """Process one event."""
        for tell in self.on_event:
            tell(event)
        if event.frame is not None:
            self.cluster.take_frame(event.host, event.frame, event.t)
        elif event.link:
            self.cluster.set_link(event.host, *event.link, event.t)
        elif event.note:
            self.cluster.note(event.note, event.t)
        elif event.entries:
            self.logs.take(event.host, event.entries, self.cluster.first_rank(event.host))
        elif event.dropped:
            self.logs.drop(event.host, event.dropped, event.t)

    def _record(self, event: SourceEvent) -> None:
        if not self.recorder:
            return
        try:
            self.recorder.write(event)
        except OSError as error:
            self.recorder = None
            self.cluster.note(f"--record: stopped, the file cannot be written ({error.strerror})", event.t)

    def judge(self, event: SourceEvent) -> None:
        """Advance the state to an event's time, so that changes between two views are noticed too."""
        if event.host == self.source.hosts[-1]:
            self.cluster.advance(event.t)

    def make_view(self, *, logs: bool) -> ClusterView:
        """Return the current view; with ``logs``, start to follow the run's logs."""
        if self.fleet and logs:
            self._follow_logs(self.fleet)
        moment = self.source.now()
        if isinstance(self.source, ReplaySource) and not self.source.is_done():
            moment = self.taken_until
        self.cluster.advance(moment)
        if self.fleet and time.monotonic() > self.guard_at:  # after advance, which chooses the run
            self.guard_at = time.monotonic() + GUARD_EVERY_S
            self.cluster.guard = current_guard(self.cluster.run, self.cluster.guard_reports(moment))
        elif isinstance(self.source, ReplaySource):
            self.cluster.guard = recorded_guard(self.cluster.guard_reports(moment))
        if self.fleet and self.black_box and self.cluster.run and self._needs_account():
            self.account_at = self.account_soon_at = math.inf  # no new request until this one returns
            threading.Thread(target=self._ask_account, args=(self.fleet, self.cluster.run), daemon=True).start()
        self._note_incidents(moment)
        if isinstance(self.source, LiveSource):
            self.source.follow_run(self.cluster.followed_run)
        view = self.cluster.make_view()
        self.trends.take(view, self.cluster.steps())
        for tell in self.on_view:
            tell(view)
        return view

    def start_history(self) -> None:
        """Start to keep the last ten minutes."""
        self.black_box = black_box = BlackBox(self.source)
        self.on_view.append(black_box.add_view)
        if self.fleet:  # a recording is a file already
            self.on_event.append(black_box.add_event)
            self.on_view.append(functools.partial(self._write_incident, black_box))

    def _write_incident(self, black_box: BlackBox, view: ClusterView) -> None:
        try:
            path = black_box.write_incident(view)
        except OSError as error:
            why = f"{fmt_if('{}: ', error.filename)}{reason_of(error)}{remedy_of(error)}"
            self.cluster.note(f"cannot save the last ten minutes ({why})", view.time)
            return
        if path:
            words = f"the last ten minutes are in {path}: {self.cluster.program} top --replay shows them"
            self.cluster.note(words, view.time)

    def _note_incidents(self, now: float) -> None:
        """Report each incident once the run has resumed: cause, time to the next step, and cost."""
        run, account = self.cluster.account
        if account is None:
            return
        finished = {incident.began: incident for incident in account.incidents if incident.resumed is not None}
        noted, self.incidents = self.incidents, (run, frozenset(finished))
        if noted[0] == run:  # else they all ended before this run was shown
            unit = hour_unit(any(host.gpus for host in self.cluster.hosts.values()))
            for began in sorted(finished.keys() - noted[1]):
                xids = self.cluster.xids_between(began, finished[began].failed)
                self.cluster.note(f"incident: {incident_line(account, finished[began], unit, xids)}", now)

    def _needs_account(self) -> bool:
        """Return whether to request a new account: every minute, and when the run's stage changes."""
        now, stage = time.monotonic(), self._current_stage()
        if now > self.account_at or (stage != self.run_stage and now > self.account_soon_at):
            self.run_stage = stage
            return True
        return False

    def _current_stage(self) -> RunStage:
        snapshot = self.cluster.snapshot
        attempt = max((run.attempt for run in snapshot.last_reports.values()), default=0)
        has_steps = bool(snapshot.metrics) and snapshot.metrics[-1].attempt == attempt
        return RunStage(self.cluster.run, attempt, has_steps, snapshot.phase[0] in OVER_PHASES)

    def _ask_account(self, fleet: Fleet, run: str) -> None:
        """Request the account of the run's time; runs in a thread."""
        began = time.monotonic()
        head = next((node for node, first, _ in self.cluster.snapshot.nodes if first == 0), "")
        if head in fleet.hosts:
            with contextlib.suppress(Exception):  # the program may be exiting, with its connections closed
                self.cluster.account = run, account_of_head(fleet, run, head)
        took_s = time.monotonic() - began  # the head host reads the whole metrics file for it
        self.account_soon_at = time.monotonic() + ACCOUNT_SOON_S
        self.account_at = time.monotonic() + max(ACCOUNT_EVERY_S, took_s / ACCOUNT_SHARE)

    def _follow_logs(self, fleet: Fleet) -> None:
        """Read the logs of every host that reports the run; those known at the start are merged by time."""
        log_run, ranks = self.cluster.log_source()
        if log_run != self.log_run:
            self._change_logs(log_run)
        new_hosts = {host: rank for host, rank in ranks.items() if host not in self.log_hosts}
        is_waiting = len(ranks) < len(self.source.hosts) and time.monotonic() < self.log_since + LOGS_WAIT_S
        if log_run and new_hosts and not is_waiting and isinstance(self.source, LiveSource):
            self.log_hosts |= set(new_hosts)
            self.log_streams.append(LogStream(self.source, fleet, log_run[0], new_hosts))

    def _change_logs(self, log_run: tuple[str, int] | None) -> None:
        self._end_logs()
        if (
            log_run and self.log_run and log_run[0] != self.log_run[0]
        ):  # else the previous run's lines would seem to belong to this one
            self.logs = LogPane()
        if log_run and self.fleet:
            self.logs.command = self.fleet.command_to_type("logs", log_run[0])
        self.log_run, self.log_since = log_run, time.monotonic()

    def _end_logs(self) -> None:
        for stream in self.log_streams:
            stream.close()
        self.log_streams, self.log_hosts = [], set()

    def close(self) -> None:
        """Close all streams; nothing stays on the hosts."""
        self._end_logs()
        self.source.close()


def current_guard(run: str, reports: query.GuardReports) -> GuardShown:
    """Return the state of a run's guard, wherever it runs."""
    if not re.fullmatch(r"[\w.-]+", run) or not (guard := query.guard_of_hosts(run, reports, time.time())):
        return GuardShown.NONE
    if guard.is_gone:
        return GuardShown.GONE
    return GuardShown(guard.state.state)


def recorded_guard(reports: query.GuardReports) -> GuardShown:
    """Return the guard's last state as its hosts recorded it, for a replay."""
    if not reports:
        return GuardShown.NONE
    _, state = min(reports, key=lambda entry: entry[0])
    return GuardShown.GONE if state.died else GuardShown(state.state)
