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
from llama405b.contract.records import Blame, Cause, CauseKind, NodeState, Phase
from llama405b_tools import parsers
from llama405b_tools.agent.messages import Beat
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Failure, between_steps, in_phase
from llama405b_tools.text.words import clean, fold_ranks
from llama405b_tools.top.state import thresholds, verdicts
from llama405b_tools.top.state.frames import Nodes, RunFrame, StepMetrics
from llama405b_tools.top.state.hostview import HostView, Judged, Odd
from llama405b_tools.top.state.picture import LINK_STATES, GuardShown, HostState, RunPhase, TrainingStatus, known
from llama405b_tools.top.state.verdicts import (
    HALTED,
    BeatId,
    Fall,
    Hang,
    Measured,
    Note,
    Paces,
    Past,
    Stay,
    n_recent,
    slow_note,
)


class Away(NamedTuple):
    """A time when this machine slept or cluster-top was suspended; lost connections then do not blame hosts."""

    until: float  # when it came back
    seconds: float

    def lasts(self, now: float) -> bool:
        """Return whether hosts may still be reconnecting."""
        return now < self.until + thresholds.RECONNECT_S

    def __str__(self) -> str:
        return f"away {self.seconds:.0f} s; reconnecting"


NOT_AWAY = Away(-math.inf, 0.0)


@dataclasses.dataclass(frozen=True)
class Moment:
    """The hosts and metrics at one moment; everything else is derived lazily, once."""

    now: float
    interval_s: float
    hang_after_s: float
    hosts: Mapping[str, HostView]
    run: str  # the run that is shown
    metrics: Sequence[StepMetrics]  # of the run, oldest first
    hung: BeatId | None  # the heartbeat already judged to be a hang
    away: Away
    past: Past

    @functools.cached_property
    def fresh(self) -> Sequence[HostView]:
        """The hosts whose frames are fresh."""
        return [host for host in self.hosts.values() if host.is_fresh(self.now, self.interval_s)]

    @functools.cached_property
    def heard(self) -> Mapping[str, RunFrame]:
        """The reports on the run from hosts with fresh frames."""
        return {host.name: run for host in self.fresh if (run := host.run(self.run))}

    @functools.cached_property
    def ours(self) -> Sequence[HostView]:
        """The hosts with fresh frames that report the run."""
        return [self.hosts[name] for name in self.heard]

    @functools.cached_property
    def told(self) -> Mapping[str, RunFrame]:
        """The last report on the run from each host that knows it, fresh or not."""
        return {name: run for name, host in self.hosts.items() if (run := host.run(self.run))}

    @functools.cached_property
    def nodes(self) -> Nodes:
        """The run's hosts: name, first rank, number of ranks; () if no host has reported them yet."""
        return nodes_of(self.hosts, self.run)

    @functools.cached_property
    def unheard(self) -> Sequence[HostView]:
        """The run's hosts without a fresh report."""
        return [self.hosts[node] for node, _, _ in self.nodes if node in self.hosts and node not in self.heard]

    @functools.cached_property
    def odd(self) -> Odd:
        """The GPUs with an Xid, and those that deviate in two frames in a row (frames are not simultaneous)."""
        hosts = self.ours or self.fresh
        compared = {name: self.hosts[name].rank_of(run) for name, run in self.heard.items() if run.alive}
        now = verdicts.odd_gpus({host.name: host.gpus for host in hosts}, compared)
        if now:
            before = verdicts.odd_gpus({host.name: host.gpus_before or host.gpus for host in hosts}, compared)
            now = {gpu: note for gpu, note in now.items() if gpu in before}
        for host in hosts:
            for xid in host.new_xids(self.run):
                if (index := host.gpu_of(xid)) is not None:
                    now[host.name, index] = Note(xid.words, xid.words)
        return now

    @functools.cached_property
    def notes(self) -> Mapping[str, Sequence[Note]]:
        """The notes on each host."""
        found = {name: host.notes(self.run, self.odd) for name, host in self.hosts.items()}
        for name, rank, note in self.slow_ranks:
            found[name].append(Note(f"rank {rank} {note.key}", f"rank {rank}: {note.words}"))
        for name, note in self._beatless():
            found[name].append(note)
        return found

    @functools.cached_property
    def halted(self) -> Sequence[tuple[str, Beat, Note]]:
        """The live run's ranks that cannot continue: host, heartbeat and reason."""
        beats = [(name, beat) for name, run in self.heard.items() if run.alive for beat in run.beats]
        return list(verdicts.halted_ranks(beats))

    @functools.cached_property
    def slow_ranks(self) -> Sequence[tuple[str, int, Note]]:
        """The ranks that delay the others: host, rank and reason; halted ranks first."""
        beats = [(name, beat) for name, run in self.heard.items() for beat in run.beats]
        step_s = self.median("step_s")
        found = [(name, beat.rank, note) for name, beat, note in self.halted]
        if not step_s:
            return found
        found += verdicts.slow_ranks(beats, step_s)
        busy = [(took_s, name, beat.rank) for name, beat in beats if (took_s := self.hosts[name].busy_s(beat.rank))]
        return [*found, *verdicts.behind(busy, step_s)]

    @functools.cached_property
    def odd_ranks(self) -> Odd:
        """The unusual ranks: those that delay the others, failed or hang."""
        failed = {
            (name, beat.rank): Note("failed", "it has failed", ("phase",))
            for name, run in self.heard.items()
            for beat in run.beats
            if beat.phase is Phase.FAILED and not self.restart_by
        }
        found = {(name, rank): note for name, rank, note in self.slow_ranks} | failed
        if self.hang and self.hang.host == self.hang.beat[0]:
            found[self.hang.beat[:2]] = Note("hangs", "the others wait for it", ("step", "age_s"))
        return found

    def judged(self, name: str) -> Judged:
        """Return the judgment of a host."""
        return Judged(*self.states[name], name == self.culprit, self.notes[name], self.odd, self.odd_ranks)

    @functools.cached_property
    def culprit(self) -> str:
        """The host where a hang or failure began; "" if there is none or it is not known yet."""
        if self.hang:
            return self.hang.host
        return judge.first_failure(self.failures).host if self.failures and not self.is_unblamed else ""

    @functools.cached_property
    def is_unblamed(self) -> bool:
        """Whether all failures so far are lost contacts, so that the first failure may still be reported."""
        if any(failure.origin for failure in self.failures):
            return False
        ends = [
            self.hosts[name].clock(self.now) - run.status.time
            for name, run in self.heard.items()
            if run.status and not run.alive
        ]
        failed = [age_s for beats in self.beats.values() for beat, age_s in beats if beat.phase is Phase.FAILED]
        return max([*ends, *failed], default=0.0) < thresholds.BLAME_S

    @functools.cached_property
    def others(self) -> Sequence[str]:
        """Other live runs on its hosts."""
        return sorted({name for run in self.heard.values() for name in run.others} - {self.run})

    @functools.cached_property
    def blamed(self) -> Blame | None:
        """The recorded reason why this attempt was ended, if there is one."""
        recorded = [run.blame for run in self.heard.values() if run.blame]
        return judge.blame_of(max((run.attempt for run in self.heard.values()), default=0), recorded)

    @functools.cached_property
    def restart_by(self) -> str:
        """Who requested a restart of this attempt; "": nobody."""
        return judge.restart_by(self.blamed)

    def _beatless(self) -> Iterator[tuple[str, Note]]:
        """Yield notes on hosts whose ranks have no or stale heartbeats although the run trains."""
        if not self.measured or self.measured.since_s < self.patience_s:
            return
        for name, first, n_ranks in self.nodes:
            beats = [beat for beat, _ in self.beats.get(name, ())]
            if name in self.beats:
                ranks = range(first, first + n_ranks)
                for note in verdicts.without_heartbeat(ranks, beats, self.late.get(name, ())):
                    yield name, note

    @functools.cached_property
    def unsaved(self) -> str:
        """Why the newest save failed; "" if it did not."""
        return clean(next((run.unsaved for run in self.told.values() if run.unsaved), ""))

    @functools.cached_property
    def plans(self) -> Sequence[RunFrame]:
        """The hosts' reports that contain the run's plan."""
        return [plan for host in self.hosts.values() if (plan := host.plans.get(self.run))]

    @functools.cached_property
    def planned_s(self) -> float | None:
        """The predicted seconds per step; None without a prediction."""
        return max((plan.expected_step_s for plan in self.plans if plan.expected_step_s > 0), default=None)

    @functools.cached_property
    def paces(self) -> Paces:
        """The pace of the last steps, and what a step of this run usually takes."""
        return self.past.paces.look(self.metrics, self.planned_s)

    @functools.cached_property
    def stay(self) -> Stay | None:
        """The phase that holds up the live run, and its time; None while it trains."""
        clocks = {name: self.hosts[name].clock(self.now) for name in self.heard}
        beats = [(name, beat) for name, run in self.heard.items() if run.alive for beat in run.beats]
        phase = verdicts.waited_for({beat.phase for _, beat in beats})
        if phase not in verdicts.ACTS or not beats:
            return None
        lasts_s = max(clocks[name] - beat.phase_since for name, beat in beats if beat.phase is phase)
        told = self.heard[self.head.name].usual_s if self.head else {}
        return Stay(phase, lasts_s, self.past.times.usual_s(phase, told))

    @functools.cached_property
    def still_s(self) -> float:
        """Seconds since the run's last activity: a heartbeat, a log line, or I/O of its processes."""
        beats = [age_s for each in self.beats.values() for _, age_s in each]
        files = [self.now - host.programs.moved_at for host in self.ours]
        return min([*beats, *self._log_ages(), *files], default=0.0)

    @functools.cached_property
    def states(self) -> Mapping[str, tuple[HostState, str]]:
        """Each host's state and its reason."""
        trouble = {failure.host: (HostState.FAILED, verdicts.trouble_words(failure)) for failure in self.failures}
        if self.hang:
            trouble[self.hang.host] = (HostState.HUNG, self.hang.words)
        found = {name: host.state(trouble.get(name), self.now, self.interval_s) for name, host in self.hosts.items()}
        return found | {host.name: (HostState.CONNECTING, str(self.away)) for host in self.awaited}

    @functools.cached_property
    def awaited(self) -> Sequence[HostView]:
        """The hosts that may still be reconnecting after this machine slept."""
        hosts = self.hosts.values() if self.away.lasts(self.now) else ()
        return [host for host in hosts if host.link in LINK_STATES or not host.is_fresh(self.now, self.interval_s)]

    @functools.cached_property
    def failures(self) -> Sequence[Failure]:
        """Failures reported by node runners, and by failed ranks whose node runner has not ended yet."""
        states = {name: judge.state_of(run.status, alive=run.alive) for name, run in self.heard.items() if run.status}
        found = [failure for name, state in states.items() if (failure := judge.failure_of(name, state))]
        for name, beats in self.beats.items():
            found += [Failure(name, judge.cause_of_rank(beat)) for beat, _ in beats if beat.phase is Phase.FAILED]
        if not found:
            return []
        if max(failure.origin for failure in found) < 2:  # all known failures are consequences
            found += self._known_before()
        return judge.with_blame(found, self.blamed)

    def _known_before(self) -> Iterator[Failure]:
        """Yield earlier causes: a rank that vanished before any failure, and hosts that are unreachable."""
        if gone := self.past.gone.get(max(run.attempt for run in self.heard.values())):
            yield gone
        for host in [self.hosts[name] for name, _, _ in self.nodes if name in self.hosts and not self.restart_by]:
            state, why = host.state(None, self.now, self.interval_s)
            has_ended = (run := self.told.get(host.name)) and not run.alive
            if (state is HostState.STALE or state in LINK_STATES) and not has_ended and host not in self.awaited:
                yield Failure(host.name, Cause(CauseKind.UNREACHABLE, host.name, detail=why or str(state)))

    @functools.cached_property
    def beats(self) -> Mapping[str, Sequence[tuple[Beat, float]]]:
        """By host, the live ranks' heartbeats with their age in seconds by that host's clock."""
        clocks = {name: self.hosts[name].clock(self.now) for name, run in self.heard.items() if run.alive}
        return {name: [(beat, now - beat.time) for beat in self.heard[name].beats] for name, now in clocks.items()}

    @functools.cached_property
    def head(self) -> HostView | None:
        """The host that writes the metrics (of rank 0), if it reports."""
        return next((self.hosts[name] for name, first, _ in self.nodes if first == 0 and name in self.heard), None)

    @functools.cached_property
    def measured(self) -> Measured | None:
        """The last step and its times in this attempt, by the metrics; None if unknown."""
        if self.head is None:
            return None
        return verdicts.measured(self.metrics, self.heard[self.head.name].attempt, self.head.clock(self.now))

    @functools.cached_property
    def patience_s(self) -> float:
        """Seconds for which heartbeats and metrics may disagree."""
        return max(thresholds.DISAGREE_S, thresholds.DISAGREE_STEPS * (self.median("step_s") or 0.0))

    @functools.cached_property
    def late(self) -> Mapping[str, Sequence[Beat]]:
        """By host, heartbeats that are stale although metrics continue, so they say nothing about their ranks."""
        if not self.measured:
            return {}
        oldest_s = self.measured.age_s + self.patience_s
        return {name: [beat for beat, age_s in beats if age_s > oldest_s] for name, beats in self.beats.items()}

    @functools.cached_property
    def telling(self) -> Mapping[str, Sequence[tuple[Beat, float]]]:
        """``beats`` without those that tell nothing."""
        return {
            name: [(beat, age_s) for beat, age_s in beats if beat not in self.late.get(name, ())]
            for name, beats in self.beats.items()
        }

    @functools.cached_property
    def hang(self) -> Hang | None:
        """The hang at this moment, if there is one."""
        return self._silence() or self._stuck_phase()

    def _silence(self) -> Hang | None:
        """Return the hang of a rank that has been silent for too long in training."""
        limit_s = judge.between_steps(self.median("step_s"), self.hang_after_s).hang_s
        slow_s = judge.first_step(max((plan.load_s for plan in self.plans), default=0.0)).hang_s
        found = judge.silent_rank(self.telling, limit_s, slow_s)
        if found is None:
            return None
        beat = (found.host, found.beat.rank, found.beat.time)
        long = found.age_s > judge.LONG_SILENCE * limit_s
        log_ages = self._log_ages()
        gpus = self.hosts[found.host].gpus_of(self.run, found.beat)
        if not verdicts.is_hang(found.beat, found.age_s, gpus, log_ages, sure=beat == self.hung, long=long):
            return None
        words = verdicts.hang_words(found.beat, found.age_s, gpus, log_ages)
        for name, why in self._absent():  # the rank may only be waiting for them
            return Hang(name, found.age_s, f"{why}; the others wait for it, as {found.host} does: {words}", beat)
        return Hang(found.host, found.age_s, words, beat)

    def _absent(self) -> Iterator[tuple[str, str]]:
        """Yield hosts that do not report, or lack heartbeats of ranks, each with the reason."""
        for host in self.unheard:
            yield host.name, host.state(None, self.now, self.interval_s)[1] or "it does not report the run"
        for name, first, n_ranks in self.nodes:
            there = {beat.rank for beat, _ in self.beats.get(name, ())}
            if name in self.beats and (
                missing := [rank for rank in range(first, first + n_ranks) if rank not in there]
            ):
                yield name, f"no heartbeat from {fold_ranks(missing)}"

    def _stuck_phase(self) -> Hang | None:
        """Return the hang of a phase other than training that takes ten times its usual time without activity."""
        stay = self.stay
        if (
            not stay
            or stay.lasts_s < judge.in_phase(stay.usual_s).hang_s
            or self.still_s < max(self.hang_after_s, stay.usual_s or 0.0)
        ):
            return None
        within = [(name, beat) for name, each in self.beats.items() for beat, _ in each if beat.phase is stay.phase]
        if not within:
            return None
        name, beat = min(within, key=lambda entry: (judge.can_run(entry[1]), entry[1].phase_since, entry[1].rank))
        n_ranks = sum(len(each) for each in self.beats.values())
        who = f"rank {beat.rank}"
        if len(within) > 1:
            who = f"{len(within)} of {n_ranks} ranks"
        words = f"{who}: {stay.words}, and nothing moves for {self.still_s:.0f} s"
        return Hang(name, stay.lasts_s, words, (name, beat.rank, beat.time))

    def _log_ages(self) -> list[float]:
        """Return the seconds since the last log line of each host."""
        runs = ((self.hosts[name], run.log_age_s) for name, run in self.heard.items())
        return [age_s + self.now - host.heard_at for host, age_s in runs if age_s is not None]

    @functools.cached_property
    def phase(self) -> tuple[RunPhase, float | None]:
        """The run's phase, and how many seconds it has lasted."""
        if self.hang:
            return RunPhase.HUNG, self.hang.age_s
        if self.failures:
            failed_at = self.blamed.time if self.blamed and self.head else 0.0
            ended_s = [self.head.clock(self.now) - failed_at] if failed_at and self.head else self._ended_s()
            return RunPhase.FAILED, max(ended_s, default=None)
        if not self.heard:
            return RunPhase.UNKNOWN, None
        if not any(run.alive for run in self.heard.values()):
            return self._over(), min(self._ended_s(), default=None)
        if not all(plan.trains for plan in self.plans):
            return RunPhase.RUNNING, None
        since_s = min(
            (self.hosts[name].frame.now - beat.phase_since for name, run in self.heard.items() for beat in run.beats),
            default=None,
        )
        attempt = max(run.attempt for run in self.heard.values())
        if (
            not any(run.beats for run in self.heard.values())
            and self.metrics
            and self.metrics[-1].attempt in (0, attempt)
        ):
            return RunPhase.RUNNING, None
        return verdicts.shown_phase(beat.phase for run in self.heard.values() for beat in run.beats), since_s

    def _ended_s(self) -> list[float]:
        """Return how many seconds ago each node runner ended, by its host's clock, where known."""
        ended = {name: run.status.time for name, run in self.heard.items() if run.status and not run.alive}
        return [max(0.0, self.hosts[name].clock(self.now) - at) for name, at in ended.items() if at]

    @functools.cached_property
    def loaded(self) -> tuple[int, int]:
        """Bytes of weights (earlier: of text and tokens) that all ranks have loaded, and in total."""
        beats = [beat for run in self.heard.values() for beat in run.beats if 0 <= beat.done_bytes <= beat.total_bytes]
        return sum(beat.done_bytes for beat in beats), sum(beat.total_bytes for beat in beats)

    @functools.cached_property
    def recent(self) -> Sequence[StepMetrics]:
        """The last steps: at least five, and at least a minute."""
        return [*itertools.islice(reversed(self.metrics), n_recent(reversed(self.metrics)))]

    def median(self, key: str) -> float | None:
        """Return the median of a metric over the last steps."""
        values = known(getattr(metrics, key) for metrics in self.recent)
        return statistics.median(values) if values else None

    def _over(self) -> RunPhase:
        """Return the phase of a run that no reporting host has live."""
        if self.unheard:
            return RunPhase.UNKNOWN
        statuses = [run.status for run in self.heard.values() if run.status]
        if not statuses:
            return RunPhase.STARTING
        if self.restart_by or any(status.state is NodeState.STOPPED for status in statuses):
            return RunPhase.STOPPED
        return RunPhase.DONE


def nodes_of(hosts: Mapping[str, HostView], run: str) -> Nodes:
    """See ``Moment.nodes``."""
    return next((plan.nodes or () for host in hosts.values() if (plan := host.plans.get(run))), ())


MOVING = (RunPhase.TRAINING, RunPhase.SAVING, RunPhase.EVALUATING)
UNSAVED = "unsaved"  # the key of the note on a save that failed
LIVE = (RunPhase.STARTING, RunPhase.LOADING, *MOVING)


def run_notes(found: Moment) -> Sequence[Note]:
    """Return the notes on the run, worst first; none once it hangs or has failed."""
    phase, _ = found.phase
    notes = list(_long_phase(found)) if phase in LIVE else []
    if phase not in MOVING:
        return notes
    if found.unsaved:  # first, as it loses work; all else only costs time
        notes.append(Note(UNSAVED, f"not saved: {found.unsaved}", ("checkpoint_step",)))
    if unsent := clean(next((run.unsent for run in found.told.values() if run.unsent), "")):
        notes.append(Note("unsent", f"after save failed: {unsent}", ("checkpoint_step",)))
    notes += stall(found)
    notes += _falls(found)
    notes += slow_note(found.paces.pace)
    if found.metrics:
        notes += verdicts.unusual(found.metrics)
    knows_attempt = not found.metrics or found.metrics[-1].attempt
    if found.head and knows_attempt:
        notes += verdicts.without_metrics(found.measured, found.beats.get(found.head.name, ()), found.patience_s)
    return notes


def stall(found: Moment) -> Iterator[Note]:
    """Yield a note if no rank has moved for twice the usual step time, which may become a hang."""
    step_s = found.paces.usual_s
    beats = list(itertools.chain.from_iterable(found.telling.values()))
    if not step_s or any(beat.phase is not Phase.TRAIN for beat, _ in beats):
        return
    age_s = min((age_s for _, age_s in beats), default=0.0)
    if age_s >= between_steps(step_s).odd_s:
        yield Note("stall", f"this step has run for {age_s:.0f} s, usually {step_s:.1f} s", ("step",))


def remember(found: Moment) -> None:
    """Add this moment to the run's history, against which later moments are judged."""
    if found.head and found.heard[found.head.name].alive:
        for beat in found.heard[found.head.name].beats[:1]:
            found.past.times.see(beat.phase, beat.phase_since)
    for name, beat, note in found.halted if not found.failures else ():
        if note is not HALTED["T"]:
            gone = Failure(name, Cause(CauseKind.RANK_EXIT, name, beat.rank, detail=note.words, gpu=beat.gpu))
            found.past.gone.setdefault(found.heard[name].attempt, gone)
    if found.phase[0] is RunPhase.TRAINING:
        powers = known(gpu.power_w for host in found.ours for gpu in host.gpus)
        flows = known(host.ib_rate for host in found.ours)
        found.past.power_w.add(found.now, statistics.mean(powers) if powers else None, found.interval_s)
        found.past.ib_bytes_per_s.add(found.now, statistics.mean(flows) if flows else None, found.interval_s)


def _long_phase(found: Moment) -> Iterator[Note]:
    """Yield a note if a phase lasts longer than usual or, without a usual time, shows no activity."""
    if not found.stay or found.stay.lasts_s < in_phase(found.stay.usual_s).odd_s:
        return
    if found.stay.usual_s is not None or found.still_s >= found.hang_after_s:
        yield Note(f"long {found.stay.phase}", found.stay.words, ("phase",))


def _falls(found: Moment) -> Iterator[Note]:
    """Yield notes if all GPUs draw less power, or all links carry less, than before."""
    if power := found.past.power_w.fall(found.interval_s):
        n_gpus = sum(len(host.gpus) for host in found.ours)
        words = f"the power of all {n_gpus} GPUs fell from {_from_to(power, n_gpus / 1e3, '.1f')} kW"
        yield Note("power fell", words, ("power_w",))
    if flow := found.past.ib_bytes_per_s.fall(found.interval_s):
        gbit = 8e-9 * len(found.ours)
        words = f"the RDMA traffic of all {len(found.ours)} hosts fell from {_from_to(flow, gbit, ',.0f')} Gb/s"
        yield Note("rdma fell", words, ("ib_bytes_per_s",))


def _from_to(fall: Fall, factor: float, form: str) -> str:
    """Format a fall of the total: ``43.1 to 8.5``."""
    return f"{factor * fall.usual:{form}} to {factor * fall.now:{form}}"


class LoadBegan(NamedTuple):
    """The start of loading (or tokenizing): when it was first seen, and its progress then."""

    time: float
    done_bytes: float
    total_bytes: int

    def eta_s(self, now: float, done: int, total: int) -> float | None:
        """Return the seconds until loading ends, at the rate so far."""
        if done <= self.done_bytes:
            return None
        return (total - done) * (now - self.time) / (done - self.done_bytes)


NOT_LOADING = LoadBegan(0.0, math.inf, 0)


def training(
    found: Moment, notes: Sequence[Note], guard: GuardShown, load: LoadBegan, account: Account | None
) -> TrainingStatus | None:
    """Describe the shown run, of which ``notes`` stand out; None if no host knows it."""
    runs = found.told.values()
    if not runs:
        return None
    phase, phase_s = found.phase
    shown = TrainingStatus(
        run=found.run,
        phase=phase,
        phase_s=phase_s,
        usual_phase_s=found.stay.usual_s if found.stay else None,
        world=sum(ranks for _, _, ranks in found.nodes),
        attempt=max(run.attempt for run in runs),
        steps=_steps(found),
        checkpoint_step=max(known(run.checkpoint_step for run in found.heard.values() or runs), default=None),
        copied_step=min(known(run.copied_step for run in found.heard.values() or runs), default=None),
        network=_network(found),
        expected_step_s=found.planned_s,
        mesh=next((plan.mesh for host in found.hosts.values() if (plan := host.plans.get(found.run))), None),
        guard=guard,
        others=tuple(found.others),
        goodput_pct=None if account is None or account.goodput is None else 100 * account.goodput,
        age_s=max(known(map(_age_s, found.ours)), default=None),
        is_stale=_is_stale(found),
        odd_in=tuple(field for note in notes for field in note.fields),
    )
    if found.metrics:
        shown = _stepping(shown, found, found.metrics[-1])
    done, total = found.loaded
    if phase is not RunPhase.LOADING or not total:
        return shown
    return dataclasses.replace(shown, done_bytes=done, total_bytes=total, eta_s=load.eta_s(found.now, done, total))


def _steps(found: Moment) -> int | None:
    """Return the number of steps in total; None if it is unknown, or smaller than the steps so far."""
    told = (run.max_steps for run in found.told.values() if run.max_steps is not None or run.metrics)
    so_far = max((metrics.step for metrics in found.metrics), default=1)
    return next((steps for steps in told if steps and steps >= so_far), None)


def _stepping(shown: TrainingStatus, found: Moment, last: StepMetrics) -> TrainingStatus:
    """Add the values that come from steps."""
    phase = shown.phase
    step_s = found.median("step_s")
    rate = tokens_per_s = None
    eta_s = None
    saved = shown.checkpoint_step or 0
    evaluated = next((each for each in reversed(found.metrics) if each.evaluation_loss is not None), None)
    if evaluated:
        shown = dataclasses.replace(shown, evaluation_loss=evaluated.evaluation_loss, evaluated_step=evaluated.step)
    if last.step_s is None:  # only an evaluation: no steps are at risk
        return dataclasses.replace(shown, step=last.step)
    step = last.step
    if shown.is_stale:  # the other hosts' heartbeats are newer
        beats = [beat.step for each in found.beats.values() for beat, _ in each]
        step = max(step, min(beats, default=0))
    if phase in MOVING and not shown.is_stale:
        rate, tokens_per_s = found.median("rate"), found.median("tokens_per_s")
        if shown.steps and step_s:
            eta_s = (shown.steps - step) * step_s
    if phase is RunPhase.DONE and shown.steps and last.step < shown.steps:
        phase = RunPhase.STOPPED
    return dataclasses.replace(
        shown,
        phase=phase,
        step=step,
        loss=last.loss,
        losses=tuple(known(metrics.loss for metrics in found.metrics)),
        step_s=step_s,
        data_s=found.median("data_s"),
        forward_s=found.median("forward_s"),
        backward_s=found.median("backward_s"),
        optimizer_s=found.median("optimizer_s"),
        update_s=found.median("update_s"),
        exposed_s=found.median("exposed_s"),
        update_bytes=found.median("update_bytes"),
        down_bytes=found.median("down_bytes"),
        up_bytes=found.median("up_bytes"),
        all_tokens_per_s=rate,
        tokens_per_s=tokens_per_s,
        mfu_pct=_mfu_pct(found, rate, last.flops_per_token, shown.world),
        eta_s=eta_s,
        lost_steps=max(0, step - saved),
        lost_rank_hours=verdicts.seconds_between(found.metrics, saved, step) * shown.world / 3600,
    )


def _is_stale(found: Moment) -> bool:
    """Return whether a live run's step values are outdated: it stalls, or the head host does not report."""
    if found.phase[0] not in (*MOVING, RunPhase.HUNG):
        return False
    return found.hang is not None or any(stall(found)) or found.head is None


def _mfu_pct(found: Moment, rate: float | None, flops_per_token: float | None, world: int) -> float | None:
    """Return model FLOPs utilization in percent, if all GPUs are the same model; None if unknown."""
    peaks = {parsers.bf16_flops(gpu.name) for host in found.ours for gpu in host.gpus}
    peak = peaks.pop() if len(peaks) == 1 else None
    if not (rate and flops_per_token and peak and world):
        return None
    share = rate * flops_per_token / (peak * world)
    return 100 * share if share <= 1 else None


def _age_s(host: HostView) -> float | None:
    """Return how long ago a host first ran the run, by the host's clock."""
    run = host.frame.run
    return max(0.0, host.frame.now - run.run_created) if run and run.run_created is not None else None


def _network(found: Moment) -> str:
    """Return the transport of the collectives: "IB 8x400", "SOCKET", "gloo"; "" if unknown."""
    said = {run.net for run in found.heard.values()} - {""}
    if "SOCKET" in said:
        return "SOCKET"
    named = next((plan.nccl for host in found.ours if (plan := host.plans.get(found.run))), {}).get("NCCL_IB_HCA", "")
    if said or named:
        return min(said, default="IB") + _ports(found.ours[0], named)
    if found.ours and all(not host.gpus and host.frame.pci_gpus is not None for host in found.ours):
        return "gloo"
    return ""


def _ports(host: HostView, named: str) -> str:
    """Return the number of a host's active ports and their Gb/s; only of named ports, if any are named."""
    ports = [port for port in host.frame.ib if "ACTIVE" in port.state and port.rate.strip()]
    rates = [port.rate.split()[0] for port in ports if not named or port.device in named]
    return f" {len(rates)}x{rates[0]}" if rates else ""
