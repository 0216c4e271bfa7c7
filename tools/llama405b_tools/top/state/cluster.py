"""The state of a cluster, folded from the hosts' frames and links; its verdict, and what to do next. Pure.

``take``, ``link`` and ``advance`` change it; ``make_view`` does not.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from llama405b.contract import reader
from llama405b.contract.accounting import Account
from llama405b.contract.errors import fmt_if, pluralize
from llama405b.contract.reader import Json
from llama405b.contract.records import GuardState, Phase
from llama405b_tools.agent.messages import RunFrame, StepMetrics
from llama405b_tools.run import hang, judge
from llama405b_tools.run.hang import Pace
from llama405b_tools.run.judge import Failure, first_failure
from llama405b_tools.text.figures import format_stopwatch
from llama405b_tools.text.words import clean, fold_names
from llama405b_tools.top.state import thresholds, verdicts
from llama405b_tools.top.state.frames import HostFrame
from llama405b_tools.top.state.hostview import HostView
from llama405b_tools.top.state.moment import (
    NO_SLEEP_GAP,
    NOT_LOADING,
    UNSAVED_KEY,
    ClusterSnapshot,
    LoadStart,
    SleepGap,
    extend_history,
    nodes_of,
    run_notes,
    training_status,
)
from llama405b_tools.top.state.picture import (
    ENDED_PHASES,
    GUARDING_STATES,
    LINK_STATES,
    ClusterEvent,
    ClusterVerdict,
    ClusterView,
    GuardShown,
    HostRow,
    HostState,
    RunPhase,
    Severity,
    TrainingStatus,
)
from llama405b_tools.top.state.verdicts import (
    BEHIND_KEY,
    HALTED_NOTES,
    NO_HEARTBEAT,
    BeatId,
    Note,
    RunHistory,
)

HOST_ADVICE = {
    HostState.AUTH: "check its user and key with `ssh {host}`; cluster-top tries again every few seconds",
    HostState.REFUSED: "start sshd on {host}, or correct its port in the hosts file; cluster-top tries again by itself",
    HostState.TIMEOUT: "see whether {host} is up, in your provider's console; cluster-top tries again by itself",
    HostState.DOWN: "`{doctor}` says what is wrong with {host}; cluster-top tries again by itself",
    HostState.STALE: "see whether {host} answers `ssh {host}`; a frozen host may need a restart from your provider's console",
    HostState.SMI_HUNG: "a GPU or the driver of {host} hangs: `dmesg` there says which; only a restart of the host helps",
    HostState.NO_DRIVER: "`{doctor}` says what is wrong with the driver of {host}",
}


def advice(
    snapshot: ClusterSnapshot,
    reasons: Sequence["VerdictReason"],
    run: TrainingStatus | None,
    verdict: ClusterVerdict,
    command_format: str,
) -> str:
    """Return advice on what to do; "" if there is none. ``command_format``: of a command, with ``{}`` for the verb."""
    commands = {verb: command_format.replace("{}", verb, 1) for verb in ("doctor", "plan", "stop", "status")}
    of_run = fmt_if(" --run {}", run.run if run else "")
    relaunch = f"launch it again with `--resume auto`{fmt_if(', from step {:,}', run.checkpoint_step if run else None)}"
    check_first = (
        f"check {snapshot.culprit_host} (`{commands['doctor']}`), then {relaunch}"
        if snapshot.culprit_host
        else relaunch
    )
    is_guarded = run is not None and run.guard in GUARDING_STATES
    if verdict is ClusterVerdict.HUNG:
        wake_note = fmt_if("{}; ", _wake_command(snapshot))
        if is_guarded:
            acts_in_s = guard_acts_in_s(snapshot)
            when = "" if acts_in_s is None else f" in {format_stopwatch(acts_in_s)}"
            return wake_note + (
                f"its guard ends it{when}, and starts it again from the newest checkpoint; a shows what hangs and why"
            )
        return f"{wake_note}a says why; `{commands['stop']}{of_run}` ends it; {check_first}"
    if verdict is ClusterVerdict.FAILED:
        failure = (
            judge.first_failure(snapshot.failures) if snapshot.failures and not snapshot.is_cause_unknown else None
        )
        log = judge.log_words(failure, f"{command_format.replace('{}', 'logs', 1)}{of_run}")
        return f"e shows the first error; {'its guard starts it again' if is_guarded else check_first}{log}"
    if verdict is ClusterVerdict.RESTARTING and snapshot.restart_requester:
        return "nothing: its guard starts the next attempt from the newest checkpoint"
    if verdict is ClusterVerdict.RESTARTING:
        return "nothing: its guard starts the next attempt; e shows the first error"
    if verdict is ClusterVerdict.LOST:
        return f"make room where the checkpoints go; {relaunch}"
    if verdict is ClusterVerdict.STOPPED and run and run.phase is RunPhase.STOPPED:
        return relaunch
    if verdict not in (ClusterVerdict.DOWN, ClusterVerdict.DEGRADED) or not reasons:
        return ""
    first = reasons[0]
    if first.remedy or not first.host:
        return first.remedy.format(**commands, host=first.host)
    return f"Enter shows the host with everything that stands out; `{commands['doctor']}` tests it"


def guard_acts_in_s(snapshot: ClusterSnapshot) -> float | None:
    """Return the seconds until the run's guard ends a hang between steps; None: unknown, or another phase."""
    limits = [run.guard.hang_after_s for run in snapshot.last_reports.values() if run.guard and run.guard.hang_after_s]
    silent = hang.quietest_rank(snapshot.informative_beats)
    if not (limits and silent) or silent.beat.phase is not Phase.TRAIN:
        return None
    longest_s = max((step.step_s for step in snapshot.metrics if step.step_s), default=0.0)
    return max(0.0, Pace(longest_s, min_hang_s=max(limits)).steps.hang_s - silent.age_s)


def _wake_command(snapshot: ClusterSnapshot) -> str:
    """Return the command that continues the first rank stopped by a signal; "" if there is none."""
    for name, beat, note in snapshot.halted_ranks[:1]:
        if note is HALTED_NOTES["T"]:
            return f"`kill -CONT {beat.pid}` on {name} lets rank {beat.rank} go on"
    return ""


PHASE_VERDICTS = {
    RunPhase.RUNNING: ClusterVerdict.RUNNING,
    RunPhase.STARTING: ClusterVerdict.STARTING,
    RunPhase.LOADING: ClusterVerdict.LOADING,
    RunPhase.SAVING: ClusterVerdict.SAVING,
    RunPhase.EVALUATING: ClusterVerdict.EVALUATING,
}


class VerdictReason(NamedTuple):
    """A reason for the verdict."""

    host: str  # host that it is about; "" for the run
    words: str
    remedy: str = ""  # as a note's


def overall_verdict(
    snapshot: ClusterSnapshot,
    reasons: Sequence[VerdictReason],
    rows: Sequence[HostRow],
    training: TrainingStatus | None,
) -> tuple[ClusterVerdict, str, str]:
    """Return the verdict, its reason, and the host that it is about ("": none).

    Order: what ends a run, what slows it, what is not known yet, its phase.
    ``reasons``: what slows it or may slow it; those of a lost host come first.
    """
    if snapshot.hang:
        return ClusterVerdict.HUNG, f"{snapshot.hang.host}: {snapshot.hang.words}", snapshot.hang.host
    if snapshot.failures:
        return ClusterVerdict.FAILED, _failure_text(snapshot), snapshot.culprit_host
    if lost_hosts := _lost_hosts(snapshot, rows):
        return ClusterVerdict.DOWN, _first_reason(reasons[: len(lost_hosts)]), reasons[0].host
    if snapshot.reconnecting_hosts:
        return ClusterVerdict.CONNECTING, str(snapshot.sleep_gap), ""
    if snapshot.restart_requester and training and training.guard in GUARDING_STATES:
        return (
            ClusterVerdict.RESTARTING,
            f"asked for by {snapshot.restart_requester}; its guard starts attempt {training.attempt + 1}",
            "",
        )
    if training and training.phase in ENDED_PHASES:
        return *_end_verdict(
            snapshot, training
        ), snapshot.recorded_failure.host if snapshot.recorded_failure and not snapshot.restart_requester else ""
    if reasons:
        return ClusterVerdict.DEGRADED, _first_reason(reasons), reasons[0].host
    if unanswered := [row for row in rows if row.state is HostState.CONNECTING]:
        return ClusterVerdict.CONNECTING, f"hosts that have not answered: {len(unanswered)}", ""
    return *_phase_verdict(snapshot, training), ""


def _failure_text(snapshot: ClusterSnapshot) -> str:
    """Describe where the run failed, or that the origin is not known yet."""
    if snapshot.is_cause_unknown:
        hosts = pluralize(len({failure.host for failure in snapshot.failures}), "host")
        return f"ranks on {hosts} lost contact with others; which one failed first is not known yet"
    worst = first_failure(snapshot.failures)
    return f"{worst.host}: {verdicts.describe_failure(worst)}"


def _end_verdict(snapshot: ClusterSnapshot, run: TrainingStatus) -> tuple[ClusterVerdict, str]:
    """Return the verdict on a run that ended, and the reason."""
    if snapshot.restart_requester:
        return (
            ClusterVerdict.STOPPED,
            f"for a restart that {snapshot.restart_requester} asked for, and no guard starts the next attempt",
        )
    if snapshot.recorded_failure and run.phase is RunPhase.STOPPED:
        failure = Failure(snapshot.recorded_failure.host, snapshot.recorded_failure.cause)
        words = f"{failure.host}: {clean(judge.failure_words(failure))}"
        if run.guard in GUARDING_STATES:
            return ClusterVerdict.RESTARTING, f"attempt {run.attempt} was ended ({words}); its guard starts the next"
        return ClusterVerdict.FAILED, words
    stopped_by = next(
        (status.cause.by for run in snapshot.fresh_reports.values() if (status := run.status) and status.cause), ""
    )
    words = fmt_if("by {}", stopped_by) + fmt_if(" after step {:,}", run.step)
    lost_text = f"{pluralize(run.lost_steps, 'step', thousands=True)} lost" if run.lost_steps else ""
    if lost_text and (snapshot.save_failure or run.checkpoint_step is not None):
        return ClusterVerdict.LOST, f"{words}: {lost_text}{fmt_if('; not saved: {}', snapshot.save_failure)}".strip()
    if run.phase is RunPhase.DONE:
        return ClusterVerdict.DONE, fmt_if("{:,} steps", run.step)
    return ClusterVerdict.STOPPED, f"{words}{fmt_if('; {}', lost_text)}".strip()


def _phase_verdict(snapshot: ClusterSnapshot, run: TrainingStatus | None) -> tuple[ClusterVerdict, str]:
    """Return the verdict on a run without problems; it is healthy only if it trains at the expected pace."""
    if run is None:
        return ClusterVerdict.NO_RUN, ""
    if run.phase is RunPhase.TRAINING:
        if not (pace := snapshot.paces.pace):
            return ClusterVerdict.TRAINING, "too few steps to judge the pace"
        return ClusterVerdict.HEALTHY, pace.words
    if run.phase not in PHASE_VERDICTS:
        return ClusterVerdict.CONNECTING, "not all hosts of the run report"
    return PHASE_VERDICTS[run.phase], snapshot.phase_duration.words if snapshot.phase_duration else ""


def _first_reason(reasons: Sequence[VerdictReason]) -> str:
    return reasons[0].words + fmt_if(", and {} more", len(reasons) - 1)


def _state_reason(row: HostRow) -> VerdictReason:
    return VerdictReason(row.name, f"{row.name}: {row.state} {row.why}", HOST_ADVICE.get(row.state, ""))


def _lost_hosts(snapshot: ClusterSnapshot, rows: Sequence[HostRow]) -> list[HostRow]:
    """Return the hosts that are useless to the run; without a run, to anybody."""
    run_hosts = {name for name, _, _ in snapshot.nodes} or {row.name for row in rows}
    return [row for row in rows if row.severity == 2 and row.name in run_hosts]


def list_reasons(
    snapshot: ClusterSnapshot, notes: Sequence[Note], rows: Sequence[HostRow], training: TrainingStatus | None
) -> list[VerdictReason]:
    """Return what slows the run or may slow it, worst first; causes come before symptoms such as slow steps."""
    of_run = fmt_if(" --run {}", training.run if training else "")
    wake_command = _wake_command(snapshot) or f"a says what the other ranks wait for; `{{stop}}{of_run}` ends it"
    reasons = [_state_reason(row) for row in _lost_hosts(snapshot, rows)]
    reasons += [
        VerdictReason(name, f"{name}: rank {beat.rank}: {note.words}", wake_command)
        for name, beat, note in snapshot.halted_ranks
    ]
    missing_notes = [
        (name, note)
        for name, host_notes in snapshot.host_notes.items()
        for note in host_notes
        if note.key.startswith(NO_HEARTBEAT)
    ]
    reasons += [VerdictReason(name, f"{name}: {note.words}", note.remedy) for name, note in missing_notes]
    reasons += [VerdictReason("", note.words, note.remedy) for note in notes if note.key == UNSAVED_KEY]
    if training and training.network == "SOCKET":
        remedy = "`{doctor}` says why the training does not use RDMA"
        reasons.append(VerdictReason("", "training runs over TCP sockets", remedy))
    slow_ranks = [entry for entry in snapshot.slow_ranks if entry[2].key == BEHIND_KEY]
    reasons += [
        VerdictReason(name, f"{name}: rank {rank}: {note.words}", note.remedy) for name, rank, note in slow_ranks
    ]
    reasons += [VerdictReason("", note.words, note.remedy) for note in notes if note.key != UNSAVED_KEY]
    if training and training.is_unguarded:
        remedy = f"`{{status}}{of_run}` prints the command that guards it again"
        reasons.append(VerdictReason("", "its guard is gone, so nothing restarts this run", remedy))
    reasons += [_state_reason(row) for row in rows if row.severity]
    for row in rows:
        if row.notes:
            remedy = snapshot.host_notes[row.name][0].remedy
            reasons.append(VerdictReason(row.name, f"{row.name}: {row.notes[0]}", remedy))
    by_words: dict[str, VerdictReason] = {}
    for reason in reasons:
        by_words.setdefault(reason.words, reason)
    return [*by_words.values()]


DIGITS = re.compile(r"\d+", re.ASCII)
MAX_METRICS, MAX_EVENTS = 5000, 500
RUN_STATES = (HostState.FAILED, HostState.HUNG)  # states that come from the run, not from the host itself
LEVELS = {
    **dict.fromkeys(RUN_STATES, Severity.BAD),
    **dict.fromkeys((HostState.STALE, HostState.SMI_HUNG, HostState.NO_DRIVER), Severity.WARNING),
}  # event level by state; link states are reported as they happen, not here
LINKS = {str(state): state for state in (HostState.OK, *LINK_STATES)}


class OpenProblem(NamedTuple):
    """A problem that exists now and has been reported as an event."""

    key: str  # text without the numbers that change
    text: str
    of_run: bool  # belongs to the shown run, and ends when another run is shown


class ClusterState:
    """Takes what arrives; ``make_view`` tells what it means."""

    def __init__(self, hosts: Sequence[str], interval_s: float, *, hang_after_s: float = 60.0, badge: str = "") -> None:
        self.hosts = {name: HostView(name) for name in hosts}
        self.interval_s = interval_s
        self.hang_after_s = hang_after_s
        self.badge = badge
        self.run = ""
        self.created = 0.0
        self.metrics_of: dict[str, collections.deque[StepMetrics]] = collections.defaultdict(
            lambda: collections.deque(maxlen=MAX_METRICS)
        )
        self.hung_beat: BeatId | None = None  # the heartbeat judged to be a hang
        self.load_start = NOT_LOADING
        self.open_problems: dict[tuple[str, str], OpenProblem] = {}  # by host and kind
        self.events: collections.deque[ClusterEvent] = collections.deque(maxlen=MAX_EVENTS)
        self.alive_at = 0.0  # when the shown run was last alive
        self.followed_run = ""  # the run that hosts keep reporting; "" to show the newest live run
        self.guard = GuardShown.NONE
        self.account: tuple[str, Account | None] = ("", None)  # run name, and the account of its time
        self.requested_run = ""  # the run requested by --run
        # parts of a command for the user to type: program name, and hosts file argument
        self.program, self.hosts_argument = "llama405b", ""
        self.sleep_gap = NO_SLEEP_GAP
        self.history = RunHistory()  # of the run that is shown
        self.snapshot = self._take_snapshot(0.0)  # at the moment last advanced to
        self.notes: Sequence[Note] = ()  # what stands out about the run then

    def note(self, text: str, now: float) -> None:
        """Add an event of the operator's machine."""
        self._add_event(now, "", Severity.WARNING, text)

    def note_sleep(self, away_s: float, now: float) -> None:
        """Record that this machine slept or cluster-top was suspended for a while."""
        self.sleep_gap = SleepGap(now, away_s)
        self._add_event(now, "", Severity.NOTE, str(self.sleep_gap))

    def set_link(self, host: str, state: str, why: str, now: float) -> None:
        """Set the state of a host's connection: OK, AUTH, REFUSED, TIMEOUT or DOWN, with the reason."""
        host_view, link_state = self.hosts[host], LINKS.get(state, HostState.DOWN)
        if link_state is HostState.OK:
            self._close_problem(host, "link", now)
        elif not self.sleep_gap.is_reconnecting(now):
            self._open_problem(host, "link", Severity.BAD, link_state, f"{link_state}: {why}", now)
        host_view.link = link_state
        host_view.why = clean(why)
        host_view.linked_at = now

    def take_frame(self, host: str, message: Json, now: float) -> None:
        """Process a frame, given as parsed JSON."""
        try:
            frame = reader.build_record(HostFrame, message, "frame")
        except reader.MalformedError as error:
            self.set_link(host, HostState.DOWN, f"its sampler sends frames that cannot be read ({error})", now)
            return
        self._close_problem(host, "link", now)
        self.hosts[host].take(frame, now)
        if frame.run:
            metrics = self.metrics_of[frame.run.name]
            for step in frame.run.metrics:
                if step.step_s is None and step.evaluation_loss is None:  # another trainer's line about something else
                    continue
                while metrics and metrics[-1].step >= step.step:  # a resumed run repeats steps: drop the old ones
                    metrics.pop()
                metrics.append(step)

    def advance(self, now: float) -> None:
        """Advance to a moment: choose the run to show, and report new and resolved problems."""
        self._choose_run(now)
        snapshot = self.snapshot = self._take_snapshot(now)
        extend_history(snapshot)
        self.hung_beat = snapshot.hang.beat if snapshot.hang else None
        self.notes = run_notes(snapshot)
        if not snapshot.hang and not snapshot.failures:
            self._note_run(self.notes, now)
        if (
            snapshot.hang and snapshot.host_states[snapshot.hang.host][0] is not HostState.HUNG
        ):  # the host's own state reports it otherwise
            words = f"HUNG: {snapshot.hang.host}: {snapshot.hang.words}"
            self._open_problem("", "hang", Severity.BAD, "hang", words, now, of_run=True)
        elif not snapshot.hang:
            self._close_problem("", "hang", now)
        self._note_if("others", fmt_if("also live on these hosts: {}", ", ".join(snapshot.other_runs)), now)
        is_guard_gone = self.guard is GuardShown.GONE and snapshot.phase[0] not in ENDED_PHASES
        self._note_if("guard", "the run's guard is gone" if is_guard_gone else "", now)
        for name, (state, why) in snapshot.host_states.items():
            self._note_host(name, state, why, snapshot.host_notes[name], now)
        self._fold_events(now)
        if snapshot.phase[0] is not RunPhase.LOADING:
            self.load_start = NOT_LOADING
        elif self.load_start.total_bytes != snapshot.loaded_bytes[1]:
            self.load_start = LoadStart(now, *snapshot.loaded_bytes)

    def guard_reports(self, now: float) -> list[tuple[float, GuardState]]:
        """Return each host's last report from the shown run's guard, with its age in seconds."""
        last_reports = [(host, host.run_report(self.run)) for host in self.hosts.values()]
        return [
            (host.clock(now) - run.guard.time, run.guard)
            for host, run in last_reports
            if run and run.guard and run.guard.run == run.name
        ]

    def make_view(self) -> ClusterView:
        """Return the view at the moment last passed to ``advance``."""
        snapshot = self.snapshot
        rows = [host.make_row(self.run, snapshot.judgment_of(name), snapshot.now) for name, host in self.hosts.items()]
        account = self.account[1] if self.account[0] == self.run else None
        status = training_status(snapshot, self.notes, self.guard, self.load_start, account)
        reasons = list_reasons(snapshot, self.notes, rows, status)
        verdict, why, subject_host = overall_verdict(snapshot, reasons, rows, status)
        if self.requested_run and not status and verdict in (ClusterVerdict.NO_RUN, ClusterVerdict.DEGRADED):
            verdict, why, subject_host = ClusterVerdict.DOWN, f"no host knows a run {self.requested_run!r}", ""
        return ClusterView(
            time=snapshot.now,
            interval_s=self.interval_s,
            badge=self.badge,
            verdict=verdict,
            why=why,
            about=subject_host,
            exit_code=verdict.exit_code,
            hosts=tuple(rows),
            training=status,
            events=tuple(self.events),
            fresh=len(snapshot.fresh_hosts),
            gpus_seen=_sum_over_machines(snapshot.fresh_hosts, lambda host: sum(not gpu.fault for gpu in host.gpus)),
            gpus_expected=_sum_over_machines(self.hosts.values(), lambda host: host.n_expected_gpus),
            advice=advice(snapshot, reasons, status, verdict, f"{self.program} {{}}{self.hosts_argument}"),
            workdirs=tuple(sorted({host.frame.cwd for host in snapshot.fresh_hosts} - {""})),
        )

    def _take_snapshot(self, now: float) -> ClusterSnapshot:
        return ClusterSnapshot(
            now,
            self.interval_s,
            self.hang_after_s,
            self.hosts,
            self.run,
            tuple(self.metrics_of[self.run]),
            self.hung_beat,
            self.sleep_gap,
            self.history,
        )

    def steps(self) -> Iterator[tuple[float, StepMetrics]]:
        """Yield the shown run's steps, newest first, with their time by the operator's clock."""
        head = self.snapshot.head_host
        if head is None:
            return
        ahead_s = head.clock(self.snapshot.now) - self.snapshot.now
        for step in reversed(self.snapshot.metrics):
            if step.time is not None:
                yield step.time - ahead_s, step

    def xids_between(self, begin: float, end: float) -> list[str]:
        """Return the distinct Xids of the run's hosts in a time span by the head's clock, in order."""
        if self.snapshot.head_host is None:
            return []
        now, timed_words = self.snapshot.now, []
        for host in (self.hosts[name] for name, _, _ in self.snapshot.nodes if name in self.hosts):
            ahead_s = self.snapshot.head_host.clock(now) - host.clock(now)
            timed_words += [(xid.time + ahead_s, f"{host.name}: {xid.words}") for xid in host.xids]
        return list(dict.fromkeys(words for moment, words in sorted(timed_words) if begin <= moment <= end))

    def first_rank(self, host: str) -> int:
        """Return a host's first rank; 0 if unknown."""
        return next((first for name, first, _ in nodes_of(self.hosts, self.run) if name == host), 0)

    def log_source(self) -> tuple[tuple[str, int] | None, dict[str, int]]:
        """Return the run and attempt whose logs to read, and each host's first rank."""
        last_reports = self.snapshot.last_reports
        if not last_reports or not self.snapshot.nodes:
            return None, {}
        attempt = max(run.attempt for run in last_reports.values())
        return (self.run, attempt), {name: self.first_rank(name) for name in last_reports}

    def _choose_run(self, now: float) -> None:
        """Choose the run to show."""
        reports = [host.frame.run for host in self.hosts.values() if host.frame.run]
        if not reports:
            return
        best = max(self._eligible_runs(reports, now), key=lambda run: (run.alive, run.created))
        if (best.name, best.created) != (self.run, self.created):
            self._switch_run(best, now)

    def _switch_run(self, best: RunFrame, now: float) -> None:
        """Switch to another run, or to another attempt of the same run."""
        if self.run and best.name != self.run:
            self._add_event(now, "", Severity.NOTE, f"now showing run {best.name} instead of {self.run}")
            self.open_problems = {key: problem for key, problem in self.open_problems.items() if not problem.of_run}
        if best.name == self.run and best.created > self.created and best.attempt > 1:
            self._add_event(now, "", Severity.NOTE, f"{best.name}: attempt {best.attempt} began")
        if best.name != self.run:
            self.history = RunHistory()
        self.load_start = NOT_LOADING
        self.run = best.name
        self.created = best.created

    def _eligible_runs(self, reports: Sequence[RunFrame], now: float) -> Sequence[RunFrame]:
        """Return the shown run's reports if it is live, may restart, or no other run is live; else all reports."""
        shown_reports = [run for run in reports if run.name == self.run]
        is_alive = any(run.alive for run in shown_reports)
        if is_alive:
            self.alive_at = now
        has_failed = any(not judge.state_from_status(run.status, alive=False).is_good for run in shown_reports)
        may_restart = (
            has_failed and 2 * len(shown_reports) > len(reports) and now < self.alive_at + thresholds.RESTART_WAIT_S
        )
        has_others = any(run.others or (run.alive and run.name != self.run) for run in reports)
        if shown_reports and (is_alive or may_restart or not has_others):
            self.followed_run = self.run
            return shown_reports
        self.followed_run = ""
        return reports

    def _note_run(self, notes: Sequence[Note], now: float) -> None:
        """Report new and resolved notes about the run as a whole."""
        keys = {note.key for note in notes}
        for host, kind in list(self.open_problems):
            if not host and kind not in keys and self.open_problems[host, kind].of_run:
                self._close_problem("", kind, now)
        for note in notes:
            self._open_problem("", note.key, Severity.WARNING, note.key, note.words, now, of_run=True)

    def _note_if(self, kind: str, words: str, now: float) -> None:
        """Report a problem of the run if there is text for it; else report it as resolved."""
        if words:
            self._open_problem("", kind, Severity.WARNING, words, words, now)
        else:
            self._close_problem("", kind, now)

    def _note_host(self, name: str, state: HostState, why: str, notes: Sequence[Note], now: float) -> None:
        """Report new and resolved problems of a host."""
        if state in LEVELS:
            self._open_problem(name, "state", LEVELS[state], state, f"{state}: {why}", now, of_run=state in RUN_STATES)
        else:
            self._close_problem(name, "state", now)
        if notes:
            words = "; ".join(note.words for note in notes)
            self._open_problem(name, "notes", Severity.WARNING, "; ".join(note.key for note in notes), words, now)
        else:
            self._close_problem(name, "notes", now)

    def _open_problem(
        self, host: str, kind: str, level: Severity, key: str, text: str, now: float, *, of_run: bool = False
    ) -> None:
        """Report a problem if its key is new; changing numbers in the text do not count."""
        previous = self.open_problems.get((host, kind))
        if previous is None or previous.key != key:
            self._add_event(now, host, level, text)
        self.open_problems[host, kind] = OpenProblem(key, text, of_run)

    def _close_problem(self, host: str, kind: str, now: float) -> None:
        """Report a problem as resolved."""
        if problem := self.open_problems.pop((host, kind), None):
            self._add_event(now, host, Severity.NOTE, f"no longer: {problem.text}")

    def _fold_events(self, now: float) -> None:
        """Merge events of this moment that are equal on several hosts."""
        groups: dict[tuple[Severity, str], list[ClusterEvent]] = {}
        while self.events and self.events[-1].time == now:
            event = self.events.pop()
            groups.setdefault((event.level, DIGITS.sub("", event.text)), []).append(event)
        for group in reversed(groups.values()):
            names = {event.host for event in group}
            if len(names) == len(group) > 1:
                group = [dataclasses.replace(group[-1], host=fold_names(sorted(names)))]
            self.events.extend(reversed(group))

    def _add_event(self, now: float, host: str, level: Severity, text: str) -> None:
        self.events.append(ClusterEvent(now, host, level, clean(text).replace("\n", " ")))


def _sum_over_machines(hosts: Iterable[HostView], count: Callable[[HostView], int]) -> int:
    """Sum over machines, since two names in the hosts file may be the same machine."""
    machines: dict[str, int] = {}
    for host in hosts:
        machines[host.frame.machine] = max(machines.get(host.frame.machine, 0), count(host))
    return sum(machines.values())
