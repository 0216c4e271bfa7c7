"""The state of a cluster, folded from the hosts' frames and links. Pure: times are passed in, no clock is read.

``take``, ``link`` and ``advance`` change it; ``picture`` does not.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from llama405b.contract import reader
from llama405b.contract.accounting import Account
from llama405b.contract.phrases import given
from llama405b.contract.reader import Json
from llama405b.contract.records import GuardState
from llama405b_tools.run import judge
from llama405b_tools.text.clean import clean
from llama405b_tools.text.fold import fold_names
from llama405b_tools.top.state import overall, thresholds
from llama405b_tools.top.state.advice import advice
from llama405b_tools.top.state.frames import Frame, RunFrame, StepMetrics
from llama405b_tools.top.state.hostview import HostView
from llama405b_tools.top.state.moment import NOT_AWAY, Away, Moment, nodes_of
from llama405b_tools.top.state.past import Past
from llama405b_tools.top.state.picture import (
    ENDED,
    LINK_STATES,
    Change,
    GuardShown,
    HostState,
    Level,
    Picture,
    RunPhase,
    Verdict,
)
from llama405b_tools.top.state.run_notes import remember, run_notes
from llama405b_tools.top.state.training import NOT_LOADING, LoadBegan, training
from llama405b_tools.top.state.verdicts import BeatId, Note

DIGITS = re.compile(r"\d+", re.ASCII)
KEPT_METRICS, KEPT_EVENTS = 5000, 500
RUN_TROUBLE = (HostState.FAILED, HostState.HUNG)  # trouble of the run on a host, not of the host
LEVELS = {
    **dict.fromkeys(RUN_TROUBLE, Level.BAD),
    **dict.fromkeys((HostState.STALE, HostState.SMI_HUNG, HostState.NO_DRIVER), Level.WARNING),
}  # of states noted when a host is judged; a link's trouble is noted as it happens
LINKS = {str(state): state for state in (HostState.OK, *LINK_STATES)}


class Trouble(NamedTuple):
    """Something that is wrong now, and has been noted."""

    key: str  # text without the numbers that change
    text: str
    of_run: bool  # of the run that is shown: over when another run is shown


class ClusterState:
    """Takes what arrives; ``picture`` tells what it means."""

    def __init__(self, hosts: Sequence[str], interval_s: float, *, hang_after_s: float = 60.0, badge: str = "") -> None:
        self.hosts = {name: HostView(name) for name in hosts}
        self.interval_s = interval_s
        self.hang_after_s = hang_after_s
        self.badge = badge
        self.run = ""
        self.created = 0.0
        self.metrics_of: dict[str, collections.deque[StepMetrics]] = collections.defaultdict(
            lambda: collections.deque(maxlen=KEPT_METRICS)
        )
        self.hung: BeatId | None = None  # the heartbeat judged to be a hang
        self.load = NOT_LOADING
        self.standing: dict[tuple[str, str], Trouble] = {}  # by host and kind
        self.events: collections.deque[Change] = collections.deque(maxlen=KEPT_EVENTS)
        self.alive_at = 0.0  # when the run that is shown was last seen alive
        self.stay = ""  # the run that hosts keep reporting; "" to show the newest live run
        self.guard = GuardShown.NONE
        self.account: tuple[str, Account | None] = ("", None)  # of which run, and what its time went into
        self.wanted = ""  # the run requested by --run
        # of a command to type: its name, and what names the hosts file
        self.program, self.hosts_argument = "llama405b", ""
        self.away = NOT_AWAY
        self.past = Past()  # of the run that is shown
        self.found = self._look(0.0)  # at the moment last advanced to
        self.notes: Sequence[Note] = ()  # what stands out about the run then

    def note(self, text: str, now: float) -> None:
        """Note something that happened on the operator's machine."""
        self._event(now, "", Level.WARNING, text)

    def woke(self, away_s: float, now: float) -> None:
        """Note that nothing was taken for a while, because this machine slept or cluster-top was suspended."""
        self.away = Away(now, away_s)
        self._event(now, "", Level.NOTE, str(self.away))

    def link(self, host: str, state: str, why: str, now: float) -> None:
        """Take the state of a connection: OK, or AUTH, REFUSED, TIMEOUT or DOWN, and why."""
        known, found = self.hosts[host], LINKS.get(state, HostState.DOWN)
        if found is HostState.OK:
            self._over(host, "link", now)
        elif not self.away.lasts(now):
            self._say(host, "link", Level.BAD, found, f"{found}: {why}", now)
        known.link = found
        known.why = clean(why)
        known.linked_at = now

    def take(self, host: str, arrived: Json, now: float) -> None:
        """Take a frame, as parsed JSON."""
        try:
            frame = reader.read(Frame, arrived, "frame")
        except reader.MalformedError as error:
            self.link(host, HostState.DOWN, f"its sampler sends frames that cannot be read ({error})", now)
            return
        self._over(host, "link", now)
        self.hosts[host].take(frame, now)
        if frame.run:
            metrics = self.metrics_of[frame.run.name]
            for each in frame.run.metrics:
                if each.step_s is None and each.evaluation_loss is None:  # another trainer's line, of something else
                    continue
                while metrics and metrics[-1].step >= each.step:  # a resumed run steps back
                    metrics.pop()
                metrics.append(each)

    def advance(self, now: float) -> None:
        """Advance to a moment: choose the run to show, note what is new and what is over."""
        self._choose(now)
        found = self.found = self._look(now)
        remember(found)
        self.hung = found.hang.beat if found.hang else None
        self.notes = run_notes(found)
        if not found.hang and not found.failures:
            self._tell_of_run(self.notes, now)
        if found.hang and found.states[found.hang.host][0] is not HostState.HUNG:  # which says so itself
            words = f"HUNG: {found.hang.host}: {found.hang.words}"
            self._say("", "hang", Level.BAD, "hang", words, now, of_run=True)
        elif not found.hang:
            self._over("", "hang", now)
        self._tell_if("others", given("also live on these hosts: {}", ", ".join(found.others)), now)
        gone = self.guard is GuardShown.GONE and found.phase[0] not in ENDED
        self._tell_if("guard", "the run's guard is gone" if gone else "", now)
        for name, (state, why) in found.states.items():
            self._tell(name, state, why, found.notes[name], now)
        self._fold_events(now)
        if found.phase[0] is not RunPhase.LOADING:
            self.load = NOT_LOADING
        elif self.load.total_bytes != found.loaded[1]:
            self.load = LoadBegan(now, *found.loaded)

    def guards_heard(self, now: float) -> list[tuple[float, GuardState]]:
        """Return what the hosts last heard from the guard of the run that is shown, and how many seconds ago."""
        told = [(host, host.run(self.run)) for host in self.hosts.values()]
        return [
            (host.clock(now) - run.guard.time, run.guard)
            for host, run in told
            if run and run.guard and run.guard.run == run.name
        ]

    def picture(self) -> Picture:
        """Return the picture at the moment last passed to ``advance``."""
        found = self.found
        rows = [host.row(self.run, found.judged(name), found.now) for name, host in self.hosts.items()]
        account = self.account[1] if self.account[0] == self.run else None
        shown = training(found, self.notes, self.guard, self.load, account)
        verdict, why, about = overall.verdict(found, self.notes, rows, shown)
        if self.wanted and not shown and verdict in (Verdict.NO_RUN, Verdict.DEGRADED):
            verdict, why, about = Verdict.DOWN, f"no host knows a run {self.wanted!r}", ""
        return Picture(
            time=found.now,
            interval_s=self.interval_s,
            badge=self.badge,
            verdict=verdict,
            why=why,
            about=about,
            exit_code=verdict.exit_code,
            hosts=tuple(rows),
            training=shown,
            events=tuple(self.events),
            fresh=len(found.fresh),
            gpus_seen=_in_all(found.fresh, lambda host: sum(not gpu.fault for gpu in host.gpus)),
            gpus_expected=_in_all(self.hosts.values(), lambda host: host.expected_gpus),
            advice=advice(found, self.notes, rows, shown, verdict, about, f"{self.program} {{}}{self.hosts_argument}"),
            workdirs=tuple(sorted({host.frame.cwd for host in found.fresh} - {""})),
        )

    def _look(self, now: float) -> Moment:
        return Moment(
            now,
            self.interval_s,
            self.hang_after_s,
            self.hosts,
            self.run,
            tuple(self.metrics_of[self.run]),
            self.hung,
            self.away,
            self.past,
        )

    def steps(self) -> Iterator[tuple[float, StepMetrics]]:
        """Yield the shown run's steps, newest first, each with its time by the clock of the pictures."""
        head = self.found.head
        if head is None:
            return
        ahead_s = head.clock(self.found.now) - self.found.now
        for each in reversed(self.found.metrics):
            if each.time is not None:
                yield each.time - ahead_s, each

    def xids_between(self, began: float, until: float) -> list[str]:
        """Return the Xids that the run's hosts reported in some time by the clock of its head, in order, each once."""
        if self.found.head is None:
            return []
        now, found = self.found.now, []
        for host in (self.hosts[name] for name, _, _ in self.found.nodes if name in self.hosts):
            ahead_s = self.found.head.clock(now) - host.clock(now)
            found += [(xid.time + ahead_s, f"{host.name}: {xid.words}") for xid in host.xids]
        return list(dict.fromkeys(words for moment, words in sorted(found) if began <= moment <= until))

    def first_rank(self, host: str) -> int:
        """Return a host's first rank; 0 if unknown."""
        return next((first for name, first, _ in nodes_of(self.hosts, self.run) if name == host), 0)

    def log_source(self) -> tuple[tuple[str, int] | None, dict[str, int]]:
        """Return the run and attempt whose logs to read, and the first rank of each host that has them."""
        told = self.found.told
        if not told or not self.found.nodes:
            return None, {}
        attempt = max(run.attempt for run in told.values())
        return (self.run, attempt), {name: self.first_rank(name) for name in told}

    def _choose(self, now: float) -> None:
        """Choose the run to show."""
        told = [host.frame.run for host in self.hosts.values() if host.frame.run]
        if not told:
            return
        best = max(self._eligible(told, now), key=lambda run: (run.alive, run.created))
        if (best.name, best.created) != (self.run, self.created):
            self._go_over(best, now)

    def _go_over(self, best: RunFrame, now: float) -> None:
        """Switch to another run, or to another attempt of the same run."""
        if self.run and best.name != self.run:
            self._event(now, "", Level.NOTE, f"now showing run {best.name} instead of {self.run}")
            self.standing = {key: said for key, said in self.standing.items() if not said.of_run}
        if best.name == self.run and best.created > self.created and best.attempt > 1:
            self._event(now, "", Level.NOTE, f"{best.name}: attempt {best.attempt} began")
        if best.name != self.run:
            self.past = Past()
        self.load = NOT_LOADING
        self.run = best.name
        self.created = best.created

    def _eligible(self, told: Sequence[RunFrame], now: float) -> Sequence[RunFrame]:
        """Return the shown run while it is live or may come back, and while no other is live; else all runs."""
        ours = [run for run in told if run.name == self.run]
        lives = any(run.alive for run in ours)
        if lives:
            self.alive_at = now
        failed = any(not judge.state_of(run.status, alive=False).is_good for run in ours)
        waits = failed and 2 * len(ours) > len(told) and now < self.alive_at + thresholds.STAY_S
        others = any(run.others or (run.alive and run.name != self.run) for run in told)
        if ours and (lives or waits or not others):
            self.stay = self.run
            return ours
        self.stay = ""
        return told

    def _tell_of_run(self, notes: Sequence[Note], now: float) -> None:
        """Note what is new about the run as a whole, and what is over."""
        keys = {note.key for note in notes}
        for host, kind in list(self.standing):
            if not host and kind not in keys and self.standing[host, kind].of_run:
                self._over("", kind, now)
        for note in notes:
            self._say("", note.key, Level.WARNING, note.key, note.words, now, of_run=True)

    def _tell_if(self, kind: str, words: str, now: float) -> None:
        """Note something about the run as a whole, if there are words for it; else that it is over."""
        if words:
            self._say("", kind, Level.WARNING, words, words, now)
        else:
            self._over("", kind, now)

    def _tell(self, name: str, state: HostState, why: str, notes: Sequence[Note], now: float) -> None:
        """Note what is new about a host."""
        if state in LEVELS:
            self._say(name, "state", LEVELS[state], state, f"{state}: {why}", now, of_run=state in RUN_TROUBLE)
        else:
            self._over(name, "state", now)
        if notes:
            words = "; ".join(note.words for note in notes)
            self._say(name, "notes", Level.WARNING, "; ".join(note.key for note in notes), words, now)
        else:
            self._over(name, "notes", now)

    def _say(
        self, host: str, kind: str, level: Level, key: str, text: str, now: float, *, of_run: bool = False
    ) -> None:
        """Note that something is wrong, if that is new; numbers that change do not count."""
        before = self.standing.get((host, kind))
        if before is None or before.key != key:
            self._event(now, host, level, text)
        self.standing[host, kind] = Trouble(key, text, of_run)

    def _over(self, host: str, kind: str, now: float) -> None:
        """Note that something is no longer wrong."""
        if before := self.standing.pop((host, kind), None):
            self._event(now, host, Level.NOTE, f"no longer: {before.text}")

    def _fold_events(self, now: float) -> None:
        """Make one of what was noted now of several hosts alike, such as that they lost contact."""
        alike: dict[tuple[Level, str], list[Change]] = {}
        while self.events and self.events[-1].time == now:
            event = self.events.pop()
            alike.setdefault((event.level, DIGITS.sub("", event.text)), []).append(event)
        for each in reversed(alike.values()):
            names = {event.host for event in each}
            if len(names) == len(each) > 1:
                each = [dataclasses.replace(each[-1], host=fold_names(sorted(names)))]
            self.events.extend(reversed(each))

    def _event(self, now: float, host: str, level: Level, text: str) -> None:
        self.events.append(Change(now, host, level, clean(text).replace("\n", " ")))


def _in_all(hosts: Iterable[HostView], count: Callable[[HostView], int]) -> int:
    """Sum over machines: two names in the hosts file may be the same machine."""
    machines: dict[str, int] = {}
    for host in hosts:
        machines[host.frame.machine] = max(machines.get(host.frame.machine, 0), count(host))
    return sum(machines.values())
