"""The state of a cluster, folded from the hosts' frames and links; its verdict, and what to do next. Pure.

``take``, ``link`` and ``advance`` change it; ``picture`` does not.
"""

import collections
import dataclasses
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from llama405b.contract import reader
from llama405b.contract.accounting import Account
from llama405b.contract.errors import counted, given
from llama405b.contract.reader import Json
from llama405b.contract.records import GuardState, Phase
from llama405b_tools.parsers import THERMAL
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Failure, first_failure
from llama405b_tools.text.figures import stopwatch
from llama405b_tools.text.words import clean, fold_names
from llama405b_tools.top.state import thresholds, verdicts
from llama405b_tools.top.state.frames import Frame, RunFrame, StepMetrics
from llama405b_tools.top.state.hostview import NOT_ODD, HostView
from llama405b_tools.top.state.moment import (
    NOT_AWAY,
    NOT_LOADING,
    UNSAVED,
    Away,
    LoadBegan,
    Moment,
    nodes_of,
    remember,
    run_notes,
    training,
)
from llama405b_tools.top.state.picture import (
    ENDED,
    GUARDED,
    LINK_STATES,
    Change,
    GuardShown,
    HostRow,
    HostState,
    Level,
    Picture,
    RunPhase,
    TrainingStatus,
    Verdict,
    known,
)
from llama405b_tools.top.state.verdicts import BEHIND, FREE, HALTED, HEAT, MISSING, BeatId, Note, Past, full_disks

LESS_POWER = 0.8  # share of its power limit to suggest for a hot GPU
ABOUT_HOSTS = {
    HostState.AUTH: "check its user and key with `ssh {host}`; cluster-top tries again every few seconds",
    HostState.REFUSED: "start sshd on {host}, or correct its port in the hosts file; cluster-top tries again by itself",
    HostState.TIMEOUT: "see whether {host} is up, in your provider's console; cluster-top tries again by itself",
    HostState.DOWN: "`{doctor}` says what is wrong with {host}; cluster-top tries again by itself",
    HostState.STALE: "see whether {host} answers `ssh {host}`; a frozen host may need a restart from your provider's console",
    HostState.SMI_HUNG: "a GPU or the driver of {host} hangs: `dmesg` there says which; only a restart of the host helps",
    HostState.NO_DRIVER: "`{doctor}` says what is wrong with the driver of {host}",
}
ABOUT_NOTES = {  # by the beginning of a note's key
    UNSAVED: "make room where the checkpoints go: the next save tries again, and until then the steps are at risk",
    "loss": "if it does not come down again, stop, and resume from a checkpoint before it with a lower learning rate",
    "stall": "wait: it is a hang if it lasts; 3 shows the ranks, and which one is behind",
    "step_s": "2, 3 and 4 show GPUs, ranks and network: one that is slower delays all; a step's parts tell what takes longer",
    "retries": "a smaller batch or sequence, or more offload, makes room: `{plan}` says what fits",
    "power fell": "wait for a step: if none comes, a rank waits for something; 3 shows which is behind",
    "rdma fell": "wait for a step: if none comes, a rank waits for something; 4 shows the network",
    "metrics": "the log of rank 0 (5) may say why it writes no metrics",
    "long": "wait, or look at the disks: what it reads or writes is slow; 5 shows the log",
}


def advice(
    found: Moment,
    notes: Sequence[Note],
    rows: Sequence[HostRow],
    run: TrainingStatus | None,
    verdict: Verdict,
    about: str,
    form: str,
) -> str:
    """Return advice on what to do; "" if there is none.

    ``about``: the host that the verdict is about. ``form``: of a command, with ``{}`` for the verb.
    """
    commands = {verb: form.format(verb) for verb in ("doctor", "plan", "stop", "status")}
    of_run = given(" --run {}", run.run if run else "")
    again = f"launch it again with `--resume auto`{given(', from step {:,}', run.checkpoint_step if run else None)}"
    checked = f"check {found.culprit} (`{commands['doctor']}`), then {again}" if found.culprit else again
    guarded = run is not None and run.guard in GUARDED
    if verdict is Verdict.HUNG:
        woken = given("{}; ", _wake(found))
        if guarded:
            soon = guard_acts_in_s(found)
            when = "" if soon is None else f" in {stopwatch(soon)}"
            return woken + (
                f"its guard ends it{when}, and starts it again from the newest checkpoint; a shows what hangs and why"
            )
        return f"{woken}a says why; `{commands['stop']}{of_run}` ends it; {checked}"
    if verdict is Verdict.FAILED:
        first = judge.first_failure(found.failures) if found.failures and not found.is_unblamed else None
        log = judge.log_words(first, f"{form.format('logs')}{of_run}")
        return f"e shows the first error; {'its guard starts it again' if guarded else checked}{log}"
    if verdict is Verdict.RESTARTING and found.restart_by:
        return "nothing: its guard starts the next attempt from the newest checkpoint"
    if verdict is Verdict.RESTARTING:
        return "nothing: its guard starts the next attempt; e shows the first error"
    if verdict is Verdict.LOST:
        return f"make room where the checkpoints go; {again}"
    if verdict is Verdict.STOPPED and run and run.phase is RunPhase.STOPPED:
        return again
    if verdict not in (Verdict.DOWN, Verdict.DEGRADED):
        return ""
    worst = next((row for row in rows if row.name == (about or _worst(rows))), None)
    return _about(found, notes, worst, run).format(**commands, host=worst.name if worst else "")


def guard_acts_in_s(found: Moment) -> float | None:
    """Return the seconds until the run's guard ends a hang between steps; None: unknown, or another phase."""
    limits = [run.guard.hang_after_s for run in found.told.values() if run.guard and run.guard.hang_after_s]
    silent = judge.silent_rank(found.telling, 0.0, math.inf)
    if not (limits and silent) or silent.beat.phase is not Phase.TRAIN:
        return None
    longest_s = max((each.step_s for each in found.metrics if each.step_s), default=0.0)
    return max(0.0, judge.between_steps(longest_s, max(limits)).hang_s - silent.age_s)


def _wake(found: Moment) -> str:
    """Return the command that continues the first rank stopped by a signal; "" if there is none."""
    for name, beat, note in found.halted[:1]:
        if note is HALTED["T"]:
            return f"`kill -CONT {beat.pid}` on {name} lets rank {beat.rank} go on"
    return ""


def _about(found: Moment, notes: Sequence[Note], worst: HostRow | None, run: TrainingStatus | None) -> str:
    """Return advice on the verdict's first reason; ``worst``: the host it is about."""
    if found.halted:
        of_run = given(" --run {}", run.run if run else "")
        return _wake(found) or f"a says what the other ranks wait for; `{{stop}}{of_run}` ends it"
    if worst and worst.state in LINK_STATES:
        return ABOUT_HOSTS[worst.state]
    if notes and notes[0].key == UNSAVED:
        full = next((host for host in found.ours if full_disks(host.frame)), None)
        return ABOUT_NOTES[UNSAVED] + (f"; {_verbatim(_what_fills(full))}" if full else "")
    if run and run.network == "SOCKET":
        return "`{doctor}` says why the training does not use RDMA"
    if any(note.key == BEHIND for _, _, note in found.slow_ranks):
        return "look at the GPU of that rank (3, Enter): a slow one costs every step; replace its host if it stays so"
    for note in notes:
        for key, words in ABOUT_NOTES.items():
            if note.key.startswith(key):
                return words
    if run and run.is_unguarded:
        return "`{status}" + given(" --run {}", run.run) + "` prints the command that guards it again"
    if worst and worst.state in ABOUT_HOSTS:
        return ABOUT_HOSTS[worst.state]
    if worst and (words := _about_note(found, worst)):
        return _verbatim(words)
    return "Enter shows the host with everything that stands out; `{doctor}` tests it" if worst else ""


def _verbatim(words: str) -> str:
    """Escape braces for ``str.format``: a path may contain them."""
    return words.replace("{", "{{").replace("}", "}}")


def _about_note(found: Moment, row: HostRow) -> str:
    """Return advice on a host's first note, if it is about a hot GPU or a full disk; else ""."""
    host, note = found.hosts[row.name], next(iter(found.notes[row.name]), NOT_ODD)
    if FREE in note.fields:
        return f"{_what_fills(host)}; delete what is not needed, such as checkpoints of earlier runs"
    odd = [(gpu, found.odd[row.name, gpu.index]) for gpu in host.gpus if (row.name, gpu.index) in found.odd]
    hot = [gpu for gpu, why in odd if HEAT in why.fields or {*gpu.slowed} & {*THERMAL}]
    if not hot or odd[0][0] is not hot[0]:
        return ""
    words = f"check the fans and the inlet air of {row.name}"
    if limits_w := known(gpu.power_limit_w for gpu in hot):
        which = "" if len(hot) == len(host.gpus) else f" -i {','.join(str(gpu.index) for gpu in hot)}"
        command = f"sudo nvidia-smi{which} -pl {LESS_POWER * min(limits_w):.0f}"
        words += f"; until then, `{command}` there makes less heat (the limit is {min(limits_w):.0f} W)"
    return words


def _what_fills(host: HostView) -> str:
    """Return a sentence with the command that shows what fills a host's disk."""
    path, _ = full_disks(host.frame)[0]
    return f"`du -xhd2 {shlex.quote(path)} | sort -h | tail` on {host.name} shows what fills it"


def _worst(rows: Sequence[HostRow]) -> str:
    """Return the host with the most severe problem; "" if there is none."""
    bad = [row for row in rows if row.severity or row.notes]
    return max(bad, key=lambda row: (row.severity, len(row.notes))).name if bad else ""


PHASES = {
    RunPhase.RUNNING: Verdict.RUNNING,
    RunPhase.STARTING: Verdict.STARTING,
    RunPhase.LOADING: Verdict.LOADING,
    RunPhase.SAVING: Verdict.SAVING,
    RunPhase.EVALUATING: Verdict.EVALUATING,
}


class Reason(NamedTuple):
    """A reason for the verdict."""

    host: str  # host that it is about; "" for the run
    words: str


def overall_verdict(
    found: Moment, notes: Sequence[Note], rows: Sequence[HostRow], training: TrainingStatus | None
) -> tuple[Verdict, str, str]:
    """Return the verdict, its reason, and the host that it is about ("": none).

    Order: what ends a run, what slows it, what is not known yet, its phase.
    ``notes``: what stands out about the run.
    """
    if found.hang:
        return Verdict.HUNG, f"{found.hang.host}: {found.hang.words}", found.hang.host
    if found.failures:
        return Verdict.FAILED, _failure(found), found.culprit
    used = {name for name, _, _ in found.nodes} or {row.name for row in rows}
    if lost := [_of_state(row) for row in rows if row.severity == 2 and row.name in used]:
        return Verdict.DOWN, _first(lost), lost[0].host
    if found.awaited:
        return Verdict.CONNECTING, str(found.away), ""
    if found.restart_by and training and training.guard in GUARDED:
        return (
            Verdict.RESTARTING,
            f"asked for by {found.restart_by}; its guard starts attempt {training.attempt + 1}",
            "",
        )
    if training and training.phase in ENDED:
        return *_end(found, training), found.blamed.host if found.blamed and not found.restart_by else ""
    if reasons := _reasons(found, notes, rows, training):
        return Verdict.DEGRADED, _first(reasons), reasons[0].host
    if waiting := [row for row in rows if row.state is HostState.CONNECTING]:
        return Verdict.CONNECTING, f"hosts that have not answered: {len(waiting)}", ""
    return *_phase(found, training), ""


def _failure(found: Moment) -> str:
    """Describe where the run failed, or that the origin is not known yet."""
    if found.is_unblamed:
        hosts = counted(len({failure.host for failure in found.failures}), "host")
        return f"ranks on {hosts} lost contact with others; which one failed first is not known yet"
    worst = first_failure(found.failures)
    return f"{worst.host}: {verdicts.trouble_words(worst)}"


def _end(found: Moment, run: TrainingStatus) -> tuple[Verdict, str]:
    """Return the verdict on a run that ended, and the reason."""
    if found.restart_by:
        return Verdict.STOPPED, f"for a restart that {found.restart_by} asked for, and no guard starts the next attempt"
    if found.blamed and run.phase is RunPhase.STOPPED:
        words = f"{found.blamed.host}: {clean(judge.failure_words(Failure(found.blamed.host, found.blamed.cause)))}"
        if run.guard in GUARDED:
            return Verdict.RESTARTING, f"attempt {run.attempt} was ended ({words}); its guard starts the next"
        return Verdict.FAILED, words
    by = next((status.cause.by for run in found.heard.values() if (status := run.status) and status.cause), "")
    words = given("by {}", by) + given(" after step {:,}", run.step)
    lost = f"{counted(run.lost_steps, 'step', grouped=True)} lost" if run.lost_steps else ""
    if lost and (found.unsaved or run.checkpoint_step is not None):
        return Verdict.LOST, f"{words}: {lost}{given('; not saved: {}', found.unsaved)}".strip()
    if run.phase is RunPhase.DONE:
        return Verdict.DONE, given("{:,} steps", run.step)
    return Verdict.STOPPED, f"{words}{given('; {}', lost)}".strip()


def _phase(found: Moment, run: TrainingStatus | None) -> tuple[Verdict, str]:
    """Return the verdict on a run without problems; it is healthy only if it trains at the expected pace."""
    if run is None:
        return Verdict.NO_RUN, ""
    if run.phase is RunPhase.TRAINING:
        if not (pace := found.paces.pace):
            return Verdict.TRAINING, "too few steps to judge the pace"
        return Verdict.HEALTHY, pace.words
    if run.phase not in PHASES:
        return Verdict.CONNECTING, "not all hosts of the run report"
    return PHASES[run.phase], found.stay.words if found.stay else ""


def _first(reasons: Sequence[Reason]) -> str:
    return reasons[0].words + given(", and {} more", len(reasons) - 1)


def _of_state(row: HostRow) -> Reason:
    return Reason(row.name, f"{row.name}: {row.state} {row.why}")


def _reasons(
    found: Moment, notes: Sequence[Note], rows: Sequence[HostRow], training: TrainingStatus | None
) -> list[Reason]:
    """Return what slows the run or may slow it, worst first; causes come before symptoms such as slow steps."""
    reasons = [Reason(name, f"{name}: rank {beat.rank}: {note.words}") for name, beat, note in found.halted]
    missing = [(name, note) for name, each in found.notes.items() for note in each if note.key.startswith(MISSING)]
    reasons += [Reason(name, f"{name}: {note.words}") for name, note in missing]
    reasons += [Reason("", note.words) for note in notes if note.key == UNSAVED]
    if training and training.network == "SOCKET":
        reasons.append(Reason("", "training runs over TCP sockets"))
    behind = [each for each in found.slow_ranks if each[2].key == BEHIND]
    reasons += [Reason(name, f"{name}: rank {rank}: {note.words}") for name, rank, note in behind]
    reasons += [Reason("", note.words) for note in notes if note.key != UNSAVED]
    if training and training.is_unguarded:
        reasons.append(Reason("", "its guard is gone, so nothing restarts this run"))
    reasons += [_of_state(row) for row in rows if row.severity]
    of_hosts = [Reason(row.name, f"{row.name}: {row.notes[0]}") for row in rows if row.notes]
    return [*reasons, *(reason for reason in of_hosts if reason not in reasons)]


DIGITS = re.compile(r"\d+", re.ASCII)
KEPT_METRICS, KEPT_EVENTS = 5000, 500
RUN_TROUBLE = (HostState.FAILED, HostState.HUNG)  # states that come from the run, not from the host itself
LEVELS = {
    **dict.fromkeys(RUN_TROUBLE, Level.BAD),
    **dict.fromkeys((HostState.STALE, HostState.SMI_HUNG, HostState.NO_DRIVER), Level.WARNING),
}  # event level by state; link states are reported as they happen, not here
LINKS = {str(state): state for state in (HostState.OK, *LINK_STATES)}


class Trouble(NamedTuple):
    """A problem that exists now and has been reported as an event."""

    key: str  # text without the numbers that change
    text: str
    of_run: bool  # belongs to the shown run, and ends when another run is shown


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
        self.alive_at = 0.0  # when the shown run was last alive
        self.stay = ""  # the run that hosts keep reporting; "" to show the newest live run
        self.guard = GuardShown.NONE
        self.account: tuple[str, Account | None] = ("", None)  # run name, and the account of its time
        self.wanted = ""  # the run requested by --run
        # parts of a command for the user to type: program name, and hosts file argument
        self.program, self.hosts_argument = "llama405b", ""
        self.away = NOT_AWAY
        self.past = Past()  # of the run that is shown
        self.found = self._look(0.0)  # at the moment last advanced to
        self.notes: Sequence[Note] = ()  # what stands out about the run then

    def note(self, text: str, now: float) -> None:
        """Add an event of the operator's machine."""
        self._event(now, "", Level.WARNING, text)

    def woke(self, away_s: float, now: float) -> None:
        """Record that this machine slept or cluster-top was suspended for a while."""
        self.away = Away(now, away_s)
        self._event(now, "", Level.NOTE, str(self.away))

    def link(self, host: str, state: str, why: str, now: float) -> None:
        """Set the state of a host's connection: OK, AUTH, REFUSED, TIMEOUT or DOWN, with the reason."""
        known, found = self.hosts[host], LINKS.get(state, HostState.DOWN)
        if found is HostState.OK:
            self._over(host, "link", now)
        elif not self.away.lasts(now):
            self._say(host, "link", Level.BAD, found, f"{found}: {why}", now)
        known.link = found
        known.why = clean(why)
        known.linked_at = now

    def take(self, host: str, arrived: Json, now: float) -> None:
        """Process a frame, given as parsed JSON."""
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
                if each.step_s is None and each.evaluation_loss is None:  # another trainer's line about something else
                    continue
                while metrics and metrics[-1].step >= each.step:  # a resumed run repeats steps: drop the old ones
                    metrics.pop()
                metrics.append(each)

    def advance(self, now: float) -> None:
        """Advance to a moment: choose the run to show, and report new and resolved problems."""
        self._choose(now)
        found = self.found = self._look(now)
        remember(found)
        self.hung = found.hang.beat if found.hang else None
        self.notes = run_notes(found)
        if not found.hang and not found.failures:
            self._tell_of_run(self.notes, now)
        if (
            found.hang and found.states[found.hang.host][0] is not HostState.HUNG
        ):  # the host's own state reports it otherwise
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
        """Return each host's last report from the shown run's guard, with its age in seconds."""
        told = [(host, host.run(self.run)) for host in self.hosts.values()]
        return [
            (host.clock(now) - run.guard.time, run.guard)
            for host, run in told
            if run and run.guard and run.guard.run == run.name
        ]

    def picture(self) -> Picture:
        """Return the view at the moment last passed to ``advance``."""
        found = self.found
        rows = [host.row(self.run, found.judged(name), found.now) for name, host in self.hosts.items()]
        account = self.account[1] if self.account[0] == self.run else None
        shown = training(found, self.notes, self.guard, self.load, account)
        verdict, why, about = overall_verdict(found, self.notes, rows, shown)
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
        """Yield the shown run's steps, newest first, with their time by the operator's clock."""
        head = self.found.head
        if head is None:
            return
        ahead_s = head.clock(self.found.now) - self.found.now
        for each in reversed(self.found.metrics):
            if each.time is not None:
                yield each.time - ahead_s, each

    def xids_between(self, began: float, until: float) -> list[str]:
        """Return the distinct Xids of the run's hosts in a time span by the head's clock, in order."""
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
        """Return the run and attempt whose logs to read, and each host's first rank."""
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
        """Return the shown run's reports if it is live, may restart, or no other run is live; else all reports."""
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
        """Report new and resolved notes about the run as a whole."""
        keys = {note.key for note in notes}
        for host, kind in list(self.standing):
            if not host and kind not in keys and self.standing[host, kind].of_run:
                self._over("", kind, now)
        for note in notes:
            self._say("", note.key, Level.WARNING, note.key, note.words, now, of_run=True)

    def _tell_if(self, kind: str, words: str, now: float) -> None:
        """Report a problem of the run if there is text for it; else report it as resolved."""
        if words:
            self._say("", kind, Level.WARNING, words, words, now)
        else:
            self._over("", kind, now)

    def _tell(self, name: str, state: HostState, why: str, notes: Sequence[Note], now: float) -> None:
        """Report new and resolved problems of a host."""
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
        """Report a problem if its key is new; changing numbers in the text do not count."""
        before = self.standing.get((host, kind))
        if before is None or before.key != key:
            self._event(now, host, level, text)
        self.standing[host, kind] = Trouble(key, text, of_run)

    def _over(self, host: str, kind: str, now: float) -> None:
        """Report a problem as resolved."""
        if before := self.standing.pop((host, kind), None):
            self._event(now, host, Level.NOTE, f"no longer: {before.text}")

    def _fold_events(self, now: float) -> None:
        """Merge events of this moment that are equal on several hosts."""
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
    """Sum over machines, since two names in the hosts file may be the same machine."""
    machines: dict[str, int] = {}
    for host in hosts:
        machines[host.frame.machine] = max(machines.get(host.frame.machine, 0), count(host))
    return sum(machines.values())
