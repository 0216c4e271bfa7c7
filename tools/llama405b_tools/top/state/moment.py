"""Derive facts and judgments about the hosts, the shown run and its training at one moment. Pure.

Includes the notes on the run as a whole, and the training status of the view: steps, rates, network, and steps at risk.
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from llama405b.contract.accounting import Account
from llama405b.contract.records import Cause, CauseKind, FailureRecord, NodeState, Phase
from llama405b_tools import parsers
from llama405b_tools.agent.messages import Nodes, RankHeartbeat, RunFrame, StepMetrics
from llama405b_tools.run import hang, judge
from llama405b_tools.run.hang import Pace, phase_limits
from llama405b_tools.run.judge import Failure
from llama405b_tools.text.words import clean, fold_ranks
from llama405b_tools.top.state import thresholds, verdicts
from llama405b_tools.top.state.hostview import HostJudgment, HostView, OddUnits
from llama405b_tools.top.state.picture import LINK_STATES, GuardShown, HostState, RunPhase, TrainingStatus, not_none
from llama405b_tools.top.state.verdicts import (
    HALTED_NOTES,
    BeatId,
    Fall,
    Hang,
    Note,
    PaceCache,
    PhaseDuration,
    RunHistory,
    StepTimes,
    disk_usage_command,
    full_disks,
    n_recent,
    slow_note,
)


class SleepGap(NamedTuple):
    """A time when this machine slept or cluster-top was suspended; lost connections then do not blame hosts."""

    ended_at: float  # when it came back
    length_s: float

    def is_reconnecting(self, now: float) -> bool:
        """Return whether hosts may still be reconnecting."""
        return now < self.ended_at + thresholds.RECONNECT_S

    def __str__(self) -> str:
        return f"away {self.length_s:.0f} s; reconnecting"


NO_SLEEP_GAP = SleepGap(-math.inf, 0.0)


@dataclasses.dataclass(frozen=True)
class ClusterSnapshot:
    """The hosts and metrics at one moment; everything else is derived lazily, once."""

    now: float
    interval_s: float
    hang_after_s: float
    hosts: Mapping[str, HostView]
    run: str  # the run that is shown
    metrics: Sequence[StepMetrics]  # of the run, oldest first
    hung_beat: BeatId | None  # the heartbeat already judged to be a hang
    sleep_gap: SleepGap
    history: RunHistory

    @functools.cached_property
    def fresh_hosts(self) -> Sequence[HostView]:
        """The hosts whose frames are fresh."""
        return [host for host in self.hosts.values() if host.is_fresh(self.now, self.interval_s)]

    @functools.cached_property
    def fresh_reports(self) -> Mapping[str, RunFrame]:
        """The reports on the run from hosts with fresh frames."""
        return {host.name: run for host in self.fresh_hosts if (run := host.run_report(self.run))}

    @functools.cached_property
    def run_hosts(self) -> Sequence[HostView]:
        """The hosts with fresh frames that report the run."""
        return [self.hosts[name] for name in self.fresh_reports]

    @functools.cached_property
    def last_reports(self) -> Mapping[str, RunFrame]:
        """The last report on the run from each host that knows it, fresh or not."""
        return {name: run for name, host in self.hosts.items() if (run := host.run_report(self.run))}

    @functools.cached_property
    def nodes(self) -> Nodes:
        """The run's hosts: name, first rank, number of ranks; () if no host has reported them yet."""
        return nodes_of(self.hosts, self.run)

    @functools.cached_property
    def missing_hosts(self) -> Sequence[HostView]:
        """The run's hosts without a fresh report."""
        return [self.hosts[node] for node, _, _ in self.nodes if node in self.hosts and node not in self.fresh_reports]

    @functools.cached_property
    def odd_gpus(self) -> OddUnits:
        """The GPUs with an Xid, and those that deviate in two frames in a row (frames are not simultaneous)."""
        hosts = self.run_hosts or self.fresh_hosts
        ranked_gpus = {name: self.hosts[name].rank_by_gpu(run) for name, run in self.fresh_reports.items() if run.alive}
        odd = verdicts.find_odd_gpus({host.name: host.gpus for host in hosts}, ranked_gpus)
        if odd:
            odd_before = verdicts.find_odd_gpus(
                {host.name: host.previous_gpus or host.gpus for host in hosts}, ranked_gpus
            )
            odd = {gpu: note for gpu, note in odd.items() if gpu in odd_before}
        for host in hosts:
            for xid in host.recent_xids(self.run):
                if (index := host.gpu_index_of(xid)) is not None:
                    odd[host.name, index] = Note(xid.words, xid.words)
        return odd

    @functools.cached_property
    def host_notes(self) -> Mapping[str, Sequence[Note]]:
        """The notes on each host."""
        notes = {name: host.notes(self.run, self.odd_gpus) for name, host in self.hosts.items()}
        for name, rank, note in self.slow_ranks:
            notes[name].append(Note(f"rank {rank} {note.key}", f"rank {rank}: {note.words}"))
        for name, note in self._heartbeat_notes():
            notes[name].append(note)
        return notes

    @functools.cached_property
    def halted_ranks(self) -> Sequence[tuple[str, RankHeartbeat, Note]]:
        """The live run's ranks that cannot continue: host, heartbeat and reason."""
        beats = [(name, beat) for name, run in self.fresh_reports.items() if run.alive for beat in run.beats]
        return list(verdicts.find_halted_ranks(beats))

    @functools.cached_property
    def slow_ranks(self) -> Sequence[tuple[str, int, Note]]:
        """The ranks that delay the others: host, rank and reason; halted ranks first."""
        beats = [(name, beat) for name, run in self.fresh_reports.items() for beat in run.beats]
        step_s = self.median("step_s")
        slow = [(name, beat.rank, note) for name, beat, note in self.halted_ranks]
        if not step_s:
            return slow
        slow += verdicts.find_slow_ranks(beats, step_s)
        busy = [
            (took_s, name, beat.rank) for name, beat in beats if (took_s := self.hosts[name].median_busy_s(beat.rank))
        ]
        return [*slow, *verdicts.find_slowest_rank(busy, step_s)]

    @functools.cached_property
    def odd_ranks(self) -> OddUnits:
        """The unusual ranks: those that delay the others, failed or hang."""
        failed_notes = {
            (name, beat.rank): Note("failed", "it has failed", ("phase",))
            for name, run in self.fresh_reports.items()
            for beat in run.beats
            if beat.phase is Phase.FAILED and not self.restart_requester
        }
        notes = {(name, rank): note for name, rank, note in self.slow_ranks} | failed_notes
        if self.hang and self.hang.host == self.hang.beat[0]:
            notes[self.hang.beat[:2]] = Note("hangs", "the others wait for it", ("step", "age_s"))
        return notes

    def judgment_of(self, name: str) -> HostJudgment:
        """Return the judgment of a host."""
        return HostJudgment(
            *self.host_states[name], name == self.culprit_host, self.host_notes[name], self.odd_gpus, self.odd_ranks
        )

    @functools.cached_property
    def culprit_host(self) -> str:
        """The host where a hang or failure began; "" if there is none or it is not known yet."""
        if self.hang:
            return self.hang.host
        return judge.first_failure(self.failures).host if self.failures and not self.is_cause_unknown else ""

    @functools.cached_property
    def is_cause_unknown(self) -> bool:
        """Whether all failures so far are lost contacts, so that the first failure may still be reported."""
        if any(failure.origin_score for failure in self.failures):
            return False
        end_ages_s = [
            self.hosts[name].clock(self.now) - run.status.time
            for name, run in self.fresh_reports.items()
            if run.status and not run.alive
        ]
        failed_ages_s = [age_s for beats in self.beats.values() for beat, age_s in beats if beat.phase is Phase.FAILED]
        return max([*end_ages_s, *failed_ages_s], default=0.0) < thresholds.BLAME_DELAY_S

    @functools.cached_property
    def other_runs(self) -> Sequence[str]:
        """Other live runs on its hosts."""
        return sorted({name for run in self.fresh_reports.values() for name in run.others} - {self.run})

    @functools.cached_property
    def recorded_failure(self) -> FailureRecord | None:
        """The recorded reason why this attempt was ended, if there is one."""
        recorded = [run.blame for run in self.fresh_reports.values() if run.blame]
        return judge.find_failure_record(max((run.attempt for run in self.fresh_reports.values()), default=0), recorded)

    @functools.cached_property
    def restart_requester(self) -> str:
        """Who requested a restart of this attempt; "": nobody."""
        return judge.restart_requester(self.recorded_failure)

    def _heartbeat_notes(self) -> Iterator[tuple[str, Note]]:
        """Yield notes on hosts whose ranks have no or stale heartbeats although the run trains."""
        if not self.step_times or self.step_times.since_s < self.tolerance_s:
            return
        for name, first, n_ranks in self.nodes:
            beats = [beat for beat, _ in self.beats.get(name, ())]
            if name in self.beats:
                ranks = range(first, first + n_ranks)
                for note in verdicts.missing_heartbeat_notes(ranks, beats, self.late_beats.get(name, ())):
                    yield name, note

    @functools.cached_property
    def save_failure(self) -> str:
        """Why the newest save failed; "" if it did not."""
        return clean(next((run.unsaved for run in self.last_reports.values() if run.unsaved), ""))

    @functools.cached_property
    def plans(self) -> Sequence[RunFrame]:
        """The hosts' reports that contain the run's plan."""
        return [plan for host in self.hosts.values() if (plan := host.plans.get(self.run))]

    @functools.cached_property
    def planned_step_s(self) -> float | None:
        """The predicted seconds per step; None without a prediction."""
        return max((plan.expected_step_s for plan in self.plans if plan.expected_step_s > 0), default=None)

    @functools.cached_property
    def paces(self) -> PaceCache:
        """The pace of the last steps, and what a step of this run usually takes."""
        return self.history.paces.update(self.metrics, self.planned_step_s)

    @functools.cached_property
    def phase_duration(self) -> PhaseDuration | None:
        """The phase that holds up the live run, and its time; None while it trains."""
        clocks = {name: self.hosts[name].clock(self.now) for name in self.fresh_reports}
        beats = [(name, beat) for name, run in self.fresh_reports.items() if run.alive for beat in run.beats]
        phase = verdicts.slowest_phase({beat.phase for _, beat in beats})
        if phase not in verdicts.PHASE_VERBS or not beats:
            return None
        duration_s = max(clocks[name] - beat.phase_since for name, beat in beats if beat.phase is phase)
        reported_s = self.fresh_reports[self.head_host.name].usual_s if self.head_host else {}
        return PhaseDuration(phase, duration_s, self.history.times.usual_s(phase, reported_s))

    @functools.cached_property
    def idle_s(self) -> float:
        """Seconds since the run's last activity: a heartbeat, a log line, or I/O of its processes."""
        beat_ages_s = [age_s for host_beats in self.beats.values() for _, age_s in host_beats]
        io_ages_s = [self.now - host.programs.last_io_at for host in self.run_hosts]
        return min([*beat_ages_s, *self._log_ages(), *io_ages_s], default=0.0)

    @functools.cached_property
    def host_states(self) -> Mapping[str, tuple[HostState, str]]:
        """Each host's state and its reason."""
        trouble = {failure.host: (HostState.FAILED, verdicts.describe_failure(failure)) for failure in self.failures}
        if self.hang:
            trouble[self.hang.host] = (HostState.HUNG, self.hang.words)
        states = {name: host.state(trouble.get(name), self.now, self.interval_s) for name, host in self.hosts.items()}
        return states | {host.name: (HostState.CONNECTING, str(self.sleep_gap)) for host in self.reconnecting_hosts}

    @functools.cached_property
    def reconnecting_hosts(self) -> Sequence[HostView]:
        """The hosts that may still be reconnecting after this machine slept."""
        hosts = self.hosts.values() if self.sleep_gap.is_reconnecting(self.now) else ()
        return [host for host in hosts if host.link in LINK_STATES or not host.is_fresh(self.now, self.interval_s)]

    @functools.cached_property
    def failures(self) -> Sequence[Failure]:
        """Failures reported by node runners, and by failed ranks whose node runner has not ended yet."""
        states = {
            name: judge.state_from_status(run.status, alive=run.alive)
            for name, run in self.fresh_reports.items()
            if run.status
        }
        failures = [failure for name, state in states.items() if (failure := judge.failure_of(name, state))]
        for name, beats in self.beats.items():
            failures += [Failure(name, judge.cause_of_rank(beat)) for beat, _ in beats if beat.phase is Phase.FAILED]
        if not failures:
            return []
        if max(failure.origin_score for failure in failures) < 2:  # all known failures are consequences
            failures += self._earlier_failures()
        return judge.apply_failure_record(failures, self.recorded_failure)

    def _earlier_failures(self) -> Iterator[Failure]:
        """Yield earlier causes: a rank that vanished before any failure, and hosts that are unreachable."""
        if first_exit := self.history.first_exits.get(max(run.attempt for run in self.fresh_reports.values())):
            yield first_exit
        for host in [
            self.hosts[name] for name, _, _ in self.nodes if name in self.hosts and not self.restart_requester
        ]:
            state, why = host.state(None, self.now, self.interval_s)
            has_ended = (run := self.last_reports.get(host.name)) and not run.alive
            if (
                (state is HostState.STALE or state in LINK_STATES)
                and not has_ended
                and host not in self.reconnecting_hosts
            ):
                yield Failure(host.name, Cause(CauseKind.UNREACHABLE, host.name, detail=why or str(state)))

    @functools.cached_property
    def beats(self) -> Mapping[str, Sequence[tuple[RankHeartbeat, float]]]:
        """By host, the live ranks' heartbeats with their age in seconds by that host's clock."""
        clocks = {name: self.hosts[name].clock(self.now) for name, run in self.fresh_reports.items() if run.alive}
        return {
            name: [(beat, now - beat.time) for beat in self.fresh_reports[name].beats] for name, now in clocks.items()
        }

    @functools.cached_property
    def head_host(self) -> HostView | None:
        """The host that writes the metrics (of rank 0), if it reports."""
        return next(
            (self.hosts[name] for name, first, _ in self.nodes if first == 0 and name in self.fresh_reports), None
        )

    @functools.cached_property
    def step_times(self) -> StepTimes | None:
        """The last step and its times in this attempt, by the metrics; None if unknown."""
        if self.head_host is None:
            return None
        return verdicts.attempt_step_times(
            self.metrics, self.fresh_reports[self.head_host.name].attempt, self.head_host.clock(self.now)
        )

    @functools.cached_property
    def tolerance_s(self) -> float:
        """Seconds for which heartbeats and metrics may disagree."""
        return max(thresholds.DISAGREE_S, thresholds.DISAGREE_STEPS * (self.median("step_s") or 0.0))

    @functools.cached_property
    def late_beats(self) -> Mapping[str, Sequence[RankHeartbeat]]:
        """By host, heartbeats that are stale although metrics continue, so they say nothing about their ranks."""
        if not self.step_times:
            return {}
        oldest_s = self.step_times.age_s + self.tolerance_s
        return {name: [beat for beat, age_s in beats if age_s > oldest_s] for name, beats in self.beats.items()}

    @functools.cached_property
    def informative_beats(self) -> Mapping[str, Sequence[tuple[RankHeartbeat, float]]]:
        """``beats`` without those that tell nothing."""
        return {
            name: [(beat, age_s) for beat, age_s in beats if beat not in self.late_beats.get(name, ())]
            for name, beats in self.beats.items()
        }

    @functools.cached_property
    def hang(self) -> Hang | None:
        """The hang at this moment, if there is one."""
        return self._silence_hang() or self._phase_hang()

    def _silence_hang(self) -> Hang | None:
        """Return the hang of a rank that has been silent for too long in training."""
        load_s = max((plan.load_s for plan in self.plans), default=0.0)
        pace = Pace(self.median("step_s"), load_s, self.hang_after_s)
        silent = hang.find_silent_rank(self.informative_beats, pace)
        if silent is None:
            return None
        beat = (silent.host, silent.beat.rank, silent.beat.time)
        is_long = silent.age_s > hang.LONG_SILENCE * pace.steps.hang_s
        log_ages = self._log_ages()
        gpus = self.hosts[silent.host].gpus_of_rank(self.run, silent.beat)
        if not verdicts.is_hang(
            silent.beat, silent.age_s, gpus, log_ages, was_hung=beat == self.hung_beat, is_long=is_long
        ):
            return None
        words = verdicts.describe_hang(silent.beat, silent.age_s, gpus, log_ages)
        for name, why in self._absent_hosts():  # the rank may only be waiting for them
            return Hang(name, silent.age_s, f"{why}; the others wait for it, as {silent.host} does: {words}", beat)
        return Hang(silent.host, silent.age_s, words, beat)

    def _absent_hosts(self) -> Iterator[tuple[str, str]]:
        """Yield hosts that do not report, or lack heartbeats of ranks, each with the reason."""
        for host in self.missing_hosts:
            if host.frame.run_fault and host.is_fresh(self.now, self.interval_s):
                continue  # no agent can run there: its ranks may be well
            yield host.name, host.state(None, self.now, self.interval_s)[1] or "it does not report the run"
        for name, first, n_ranks in self.nodes:
            present_ranks = {beat.rank for beat, _ in self.beats.get(name, ())}
            if name in self.beats and (
                missing_ranks := [rank for rank in range(first, first + n_ranks) if rank not in present_ranks]
            ):
                yield name, f"no heartbeat from {fold_ranks(missing_ranks)}"

    def _phase_hang(self) -> Hang | None:
        """Return the hang of a phase other than training that takes ten times its usual time without activity."""
        duration = self.phase_duration
        if (
            not duration
            or duration.duration_s < hang.phase_limits(duration.usual_s).hang_s
            or self.idle_s < max(self.hang_after_s, duration.usual_s or 0.0)
        ):
            return None
        stuck = [
            (name, beat)
            for name, host_beats in self.beats.items()
            for beat, _ in host_beats
            if beat.phase is duration.phase
        ]
        if not stuck:
            return None
        name, beat = min(
            stuck, key=lambda entry: (hang.is_process_runnable(entry[1]), entry[1].phase_since, entry[1].rank)
        )
        n_ranks = sum(len(host_beats) for host_beats in self.beats.values())
        ranks_text = f"rank {beat.rank}"
        if len(stuck) > 1:
            ranks_text = f"{len(stuck)} of {n_ranks} ranks"
        words = f"{ranks_text}: {duration.words}, and nothing moves for {self.idle_s:.0f} s"
        return Hang(name, duration.duration_s, words, (name, beat.rank, beat.time))

    def _log_ages(self) -> list[float]:
        """Return the seconds since the last log line of each host."""
        runs = ((self.hosts[name], run.log_age_s) for name, run in self.fresh_reports.items())
        return [age_s + self.now - host.last_frame_at for host, age_s in runs if age_s is not None]

    @functools.cached_property
    def phase(self) -> tuple[RunPhase, float | None]:
        """The run's phase, and how many seconds it has lasted."""
        if self.hang:
            return RunPhase.HUNG, self.hang.age_s
        if self.failures:
            failed_at = self.recorded_failure.time if self.recorded_failure and self.head_host else 0.0
            ended_s = [self.head_host.clock(self.now) - failed_at] if failed_at and self.head_host else self._ended_s()
            return RunPhase.FAILED, max(ended_s, default=None)
        if not self.fresh_reports:
            return RunPhase.UNKNOWN, None
        if not any(run.alive for run in self.fresh_reports.values()):
            return self._ended_phase(), min(self._ended_s(), default=None)
        if not all(plan.trains for plan in self.plans):
            return RunPhase.RUNNING, None
        since_s = min(
            (
                self.hosts[name].frame.now - beat.phase_since
                for name, run in self.fresh_reports.items()
                for beat in run.beats
            ),
            default=None,
        )
        attempt = max(run.attempt for run in self.fresh_reports.values())
        if (
            not any(run.beats for run in self.fresh_reports.values())
            and self.metrics
            and self.metrics[-1].attempt in (0, attempt)
        ):
            return RunPhase.RUNNING, None
        return verdicts.run_phase(beat.phase for run in self.fresh_reports.values() for beat in run.beats), since_s

    def _ended_s(self) -> list[float]:
        """Return how many seconds ago each node runner ended, by its host's clock, where known."""
        end_times = {name: run.status.time for name, run in self.fresh_reports.items() if run.status and not run.alive}
        return [
            max(0.0, self.hosts[name].clock(self.now) - end_time) for name, end_time in end_times.items() if end_time
        ]

    @functools.cached_property
    def loaded_bytes(self) -> tuple[int, int]:
        """Bytes of weights (earlier: of text and tokens) that all ranks have loaded, and in total."""
        beats = [
            beat
            for run in self.fresh_reports.values()
            for beat in run.beats
            if 0 <= beat.done_bytes <= beat.total_bytes
        ]
        return sum(beat.done_bytes for beat in beats), sum(beat.total_bytes for beat in beats)

    @functools.cached_property
    def recent_steps(self) -> Sequence[StepMetrics]:
        """The last steps: at least five, and at least a minute."""
        return [*itertools.islice(reversed(self.metrics), n_recent(reversed(self.metrics)))]

    def median(self, key: str) -> float | None:
        """Return the median of a metric over the last steps."""
        values = not_none(getattr(metrics, key) for metrics in self.recent_steps)
        return statistics.median(values) if values else None

    def _ended_phase(self) -> RunPhase:
        """Return the phase of a run that no reporting host has live."""
        if self.missing_hosts:
            return RunPhase.UNKNOWN
        statuses = [run.status for run in self.fresh_reports.values() if run.status]
        if not statuses:
            return RunPhase.STARTING
        if self.restart_requester or any(status.state is NodeState.STOPPED for status in statuses):
            return RunPhase.STOPPED
        return RunPhase.DONE


def nodes_of(hosts: Mapping[str, HostView], run: str) -> Nodes:
    """See ``ClusterSnapshot.nodes``."""
    return next((plan.nodes or () for host in hosts.values() if (plan := host.plans.get(run))), ())


STEPPING_PHASES = (RunPhase.TRAINING, RunPhase.SAVING, RunPhase.EVALUATING)
UNSAVED_KEY = "unsaved"  # the key of the note on a save that failed
LIVE_PHASES = (RunPhase.STARTING, RunPhase.LOADING, *STEPPING_PHASES)


def run_notes(snapshot: ClusterSnapshot) -> Sequence[Note]:
    """Return the notes on the run, worst first; none once it hangs or has failed."""
    phase, _ = snapshot.phase
    notes = list(_long_phase_notes(snapshot)) if phase in LIVE_PHASES else []
    if phase not in STEPPING_PHASES:
        return notes
    if snapshot.save_failure:  # first, as it loses work; all else only costs time
        notes.append(_unsaved_note(snapshot))
    if unsent := clean(next((run.unsent for run in snapshot.last_reports.values() if run.unsent), "")):
        notes.append(Note("unsent", f"after save failed: {unsent}", ("checkpoint_step",)))
    notes += stall_notes(snapshot)
    notes += _fall_notes(snapshot)
    notes += slow_note(snapshot.paces.pace)
    if snapshot.metrics:
        notes += verdicts.step_notes(snapshot.metrics)
    knows_attempt = not snapshot.metrics or snapshot.metrics[-1].attempt
    if snapshot.head_host and knows_attempt:
        notes += verdicts.missing_metrics_notes(
            snapshot.step_times, snapshot.beats.get(snapshot.head_host.name, ()), snapshot.tolerance_s
        )
    return notes


def _unsaved_note(snapshot: ClusterSnapshot) -> Note:
    remedy = "make room where the checkpoints go: the next save tries again, and until then the steps are at risk"
    for host in snapshot.run_hosts:
        if disks := full_disks(host.frame):
            remedy += f"; {disk_usage_command(disks[0][0], host.name)}"
            break
    return Note(UNSAVED_KEY, f"not saved: {snapshot.save_failure}", ("checkpoint_step",), remedy)


def stall_notes(snapshot: ClusterSnapshot) -> Iterator[Note]:
    """Yield a note if no rank has moved for twice the usual step time, which may become a hang."""
    step_s = snapshot.paces.usual_s
    beats = list(itertools.chain.from_iterable(snapshot.informative_beats.values()))
    if not step_s or any(beat.phase is not Phase.TRAIN for beat, _ in beats):
        return
    age_s = min((age_s for _, age_s in beats), default=0.0)
    if age_s >= Pace(step_s).steps.stall_s:
        remedy = "wait: it is a hang if it lasts; 3 shows the ranks, and which one is behind"
        yield Note("stall", f"this step has run for {age_s:.0f} s, usually {step_s:.1f} s", ("step",), remedy)


def extend_history(snapshot: ClusterSnapshot) -> None:
    """Add this moment to the run's history, against which later moments are judged."""
    if snapshot.head_host and snapshot.fresh_reports[snapshot.head_host.name].alive:
        for beat in snapshot.fresh_reports[snapshot.head_host.name].beats[:1]:
            snapshot.history.times.observe(beat.phase, beat.phase_since)
    for name, beat, note in snapshot.halted_ranks if not snapshot.failures else ():
        if note is not HALTED_NOTES["T"]:
            failure = Failure(name, Cause(CauseKind.RANK_EXIT, name, beat.rank, detail=note.words, gpu=beat.gpu))
            snapshot.history.first_exits.setdefault(snapshot.fresh_reports[name].attempt, failure)
    if snapshot.phase[0] is RunPhase.TRAINING:
        powers = not_none(gpu.power_w for host in snapshot.run_hosts for gpu in host.gpus)
        rates = not_none(host.ib_rate for host in snapshot.run_hosts)
        snapshot.history.power_w.add(snapshot.now, statistics.mean(powers) if powers else None, snapshot.interval_s)
        snapshot.history.ib_bytes_per_s.add(
            snapshot.now, statistics.mean(rates) if rates else None, snapshot.interval_s
        )


def _long_phase_notes(snapshot: ClusterSnapshot) -> Iterator[Note]:
    """Yield a note if a phase lasts longer than usual or, without a usual time, shows no activity."""
    if (
        not snapshot.phase_duration
        or snapshot.phase_duration.duration_s < phase_limits(snapshot.phase_duration.usual_s).stall_s
    ):
        return
    if snapshot.phase_duration.usual_s is not None or snapshot.idle_s >= snapshot.hang_after_s:
        remedy = "wait, or look at the disks: what it reads or writes is slow; 5 shows the log"
        yield Note(f"long {snapshot.phase_duration.phase}", snapshot.phase_duration.words, ("phase",), remedy)


def _fall_notes(snapshot: ClusterSnapshot) -> Iterator[Note]:
    """Yield notes if all GPUs draw less power, or all links carry less, than before."""
    wait = "wait for a step: if none comes, a rank waits for something; {}"
    if power := snapshot.history.power_w.fall(snapshot.interval_s):
        n_gpus = sum(len(host.gpus) for host in snapshot.run_hosts)
        words = f"the power of all {n_gpus} GPUs fell from {_format_fall(power, n_gpus / 1e3, '.1f')} kW"
        yield Note("power fell", words, ("power_w",), wait.format("3 shows which is behind"))
    if flow := snapshot.history.ib_bytes_per_s.fall(snapshot.interval_s):
        gbit = 8e-9 * len(snapshot.run_hosts)
        words = (
            f"the RDMA traffic of all {len(snapshot.run_hosts)} hosts fell from {_format_fall(flow, gbit, ',.0f')} Gb/s"
        )
        yield Note("rdma fell", words, ("ib_bytes_per_s",), wait.format("4 shows the network"))


def _format_fall(fall: Fall, factor: float, form: str) -> str:
    """Format a fall of the total: ``43.1 to 8.5``."""
    return f"{factor * fall.usual_level:{form}} to {factor * fall.level:{form}}"


class LoadStart(NamedTuple):
    """The start of loading (or tokenizing): when it was first seen, and its progress then."""

    time: float
    done_bytes: float
    total_bytes: int

    def eta_s(self, now: float, loaded_bytes: int, all_bytes: int) -> float | None:
        """Return the seconds until loading ends, at the rate so far."""
        if loaded_bytes <= self.done_bytes:
            return None
        return (all_bytes - loaded_bytes) * (now - self.time) / (loaded_bytes - self.done_bytes)


NOT_LOADING = LoadStart(0.0, math.inf, 0)


def training_status(
    snapshot: ClusterSnapshot, notes: Sequence[Note], guard: GuardShown, load: LoadStart, account: Account | None
) -> TrainingStatus | None:
    """Describe the shown run, of which ``notes`` stand out; None if no host knows it."""
    runs = snapshot.last_reports.values()
    if not runs:
        return None
    phase, phase_s = snapshot.phase
    status = TrainingStatus(
        run=snapshot.run,
        phase=phase,
        phase_s=phase_s,
        usual_phase_s=snapshot.phase_duration.usual_s if snapshot.phase_duration else None,
        world=sum(ranks for _, _, ranks in snapshot.nodes),
        attempt=max(run.attempt for run in runs),
        steps=_total_steps(snapshot),
        checkpoint_step=max(
            not_none(run.checkpoint_step for run in snapshot.fresh_reports.values() or runs), default=None
        ),
        copied_step=min(not_none(run.copied_step for run in snapshot.fresh_reports.values() or runs), default=None),
        network=_network_kind(snapshot),
        expected_step_s=snapshot.planned_step_s,
        mesh=next((plan.mesh for host in snapshot.hosts.values() if (plan := host.plans.get(snapshot.run))), None),
        guard=guard,
        others=tuple(snapshot.other_runs),
        goodput_pct=None if account is None or account.goodput is None else 100 * account.goodput,
        age_s=max(not_none(map(_age_s, snapshot.run_hosts)), default=None),
        is_stale=_is_stale(snapshot),
        odd_in=tuple(field for note in notes for field in note.fields),
    )
    if snapshot.metrics:
        status = _with_steps(status, snapshot, snapshot.metrics[-1])
    loaded_bytes, all_bytes = snapshot.loaded_bytes
    if phase is not RunPhase.LOADING or not all_bytes:
        return status
    return dataclasses.replace(
        status, done_bytes=loaded_bytes, total_bytes=all_bytes, eta_s=load.eta_s(snapshot.now, loaded_bytes, all_bytes)
    )


def _total_steps(snapshot: ClusterSnapshot) -> int | None:
    """Return the number of steps in total; None if it is unknown, or smaller than the steps so far."""
    reported = (run.max_steps for run in snapshot.last_reports.values() if run.max_steps is not None or run.metrics)
    so_far = max((metrics.step for metrics in snapshot.metrics), default=1)
    return next((steps for steps in reported if steps and steps >= so_far), None)


def _with_steps(status: TrainingStatus, snapshot: ClusterSnapshot, last: StepMetrics) -> TrainingStatus:
    """Add the values that come from steps."""
    phase = status.phase
    step_s = snapshot.median("step_s")
    rate = tokens_per_s = None
    eta_s = None
    saved = status.checkpoint_step or 0
    evaluation = next((entry for entry in reversed(snapshot.metrics) if entry.evaluation_loss is not None), None)
    if evaluation:
        status = dataclasses.replace(status, evaluation_loss=evaluation.evaluation_loss, evaluated_step=evaluation.step)
    if last.step_s is None:  # only an evaluation: no steps are at risk
        return dataclasses.replace(status, step=last.step)
    step = last.step
    if status.is_stale:  # the other hosts' heartbeats are newer
        beats = [beat.step for host_beats in snapshot.beats.values() for beat, _ in host_beats]
        step = max(step, min(beats, default=0))
    if phase in STEPPING_PHASES and not status.is_stale:
        rate, tokens_per_s = snapshot.median("rate"), snapshot.median("tokens_per_s")
        if status.steps and step_s:
            eta_s = (status.steps - step) * step_s
    if phase is RunPhase.DONE and status.steps and last.step < status.steps:
        phase = RunPhase.STOPPED
    return dataclasses.replace(
        status,
        phase=phase,
        step=step,
        loss=last.loss,
        losses=tuple(not_none(metrics.loss for metrics in snapshot.metrics)),
        step_s=step_s,
        data_s=snapshot.median("data_s"),
        forward_s=snapshot.median("forward_s"),
        backward_s=snapshot.median("backward_s"),
        optimizer_s=snapshot.median("optimizer_s"),
        update_s=snapshot.median("update_s"),
        exposed_s=snapshot.median("exposed_s"),
        update_bytes=snapshot.median("update_bytes"),
        down_bytes=snapshot.median("down_bytes"),
        up_bytes=snapshot.median("up_bytes"),
        all_tokens_per_s=rate,
        tokens_per_s=tokens_per_s,
        mfu_pct=_mfu_pct(snapshot, rate, last.flops_per_token, status.world),
        eta_s=eta_s,
        lost_steps=max(0, step - saved),
        lost_rank_hours=verdicts.mean_step_seconds(snapshot.metrics, saved, step) * status.world / 3600,
    )


def _is_stale(snapshot: ClusterSnapshot) -> bool:
    """Return whether a live run's step values are outdated: it stalls, or the head host does not report."""
    if snapshot.phase[0] not in (*STEPPING_PHASES, RunPhase.HUNG):
        return False
    return snapshot.hang is not None or any(stall_notes(snapshot)) or snapshot.head_host is None


def _mfu_pct(snapshot: ClusterSnapshot, rate: float | None, flops_per_token: float | None, world: int) -> float | None:
    """Return model FLOPs utilization in percent, if all GPUs are the same model; None if unknown."""
    peaks = {parsers.bf16_flops(gpu.name) for host in snapshot.run_hosts for gpu in host.gpus}
    peak = peaks.pop() if len(peaks) == 1 else None
    if not (rate and flops_per_token and peak and world):
        return None
    share = rate * flops_per_token / (peak * world)
    return 100 * share if share <= 1 else None


def _age_s(host: HostView) -> float | None:
    """Return how long ago a host first ran the run, by the host's clock."""
    run = host.frame.run
    return max(0.0, host.frame.now - run.run_created) if run and run.run_created is not None else None


def _network_kind(snapshot: ClusterSnapshot) -> str:
    """Return the transport of the collectives: "IB 8x400", "SOCKET", "gloo"; "" if unknown."""
    transports = {run.net for run in snapshot.fresh_reports.values()} - {""}
    if "SOCKET" in transports:
        return "SOCKET"
    hca_filter = next((plan.nccl for host in snapshot.run_hosts if (plan := host.plans.get(snapshot.run))), {}).get(
        "NCCL_IB_HCA", ""
    )
    if transports or hca_filter:
        return min(transports, default="IB") + _format_ports(snapshot.run_hosts[0], hca_filter)
    if snapshot.run_hosts and all(not host.gpus and host.frame.pci_gpus is not None for host in snapshot.run_hosts):
        return "gloo"
    return ""


def _format_ports(host: HostView, hca_filter: str) -> str:
    """Return the number of a host's active ports and their Gb/s; only of named ports, if any are named."""
    ports = [port for port in host.frame.ib if "ACTIVE" in port.state and port.rate.strip()]
    rates = [port.rate.split()[0] for port in ports if not hca_filter or port.device in hca_filter]
    return f" {len(rates)}x{rates[0]}" if rates else ""
