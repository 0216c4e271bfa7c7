"""cluster-top's state: a source of events, and the picture made from them."""

import contextlib
import math
import re
import threading
import time
from typing import NamedTuple

from llama405b.contract.phrases import given, reason_of, remedy_of
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.run import guard_record
from llama405b_tools.run.accounts import account_of_head, incident_line
from llama405b_tools.top.blackbox import BlackBox
from llama405b_tools.top.draw.ui import Ui
from llama405b_tools.top.event_sources import EventSource, Live, Recorder, Replay
from llama405b_tools.top.intake import SourceEvent
from llama405b_tools.top.logpane import LogPane, LogStream
from llama405b_tools.top.state import thresholds
from llama405b_tools.top.state.cluster import ClusterState
from llama405b_tools.top.state.picture import OVER, GuardShown, Picture
from llama405b_tools.top.state.trends import Trends

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


def guard_shown(run: str, heard: guard_record.GuardReports) -> GuardShown:
    """Return what a run's guard does, wherever it runs."""
    if not re.fullmatch(r"[\w.-]+", run) or not (found := guard_record.of_hosts(run, heard, time.time())):
        return GuardShown.NONE
    if found.gone:
        return GuardShown.GONE
    return GuardShown(found.state.state)


def guard_heard(heard: guard_record.GuardReports) -> GuardShown:
    """Return what a run's guard did, as its hosts last heard: a recording knows no more."""
    if not heard:
        return GuardShown.NONE
    _, state = min(heard, key=lambda entry: entry[0])
    return GuardShown.GONE if state.died else GuardShown(state.state)
