"""What is known at one moment about the hosts and the shown run, and what it means. Pure."""

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from llama405b.contract.records import NodeState, Phase
from llama405b_tools.remote.messages.host_run import Beat
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Failure
from llama405b_tools.text.clean import clean
from llama405b_tools.top.state import steps, thresholds, verdicts
from llama405b_tools.top.state.frames import Nodes, RunFrame, StepMetrics
from llama405b_tools.top.state.hostview import HostView, Judged, Odd
from llama405b_tools.top.state.picture import LINK_STATES, HostState, RunPhase, known
from llama405b_tools.top.state.steps import Measured
from llama405b_tools.top.state.verdicts import BeatId, Hang, Note

MOVING = (RunPhase.TRAIN, RunPhase.CKPT, RunPhase.EVAL)


class Away(NamedTuple):
    """This machine slept, or cluster-top was suspended: for a while, a lost connection says nothing about its host."""

    until: float  # when it came back
    seconds: float

    def lasts(self, now: float) -> bool:
        """Return whether hosts may not have been connected again yet."""
        return now < self.until + thresholds.RECONNECT_S

    def __str__(self) -> str:
        return f"away {self.seconds:.0f} s; reconnecting"


NOT_AWAY = Away(-math.inf, 0.0)


@dataclasses.dataclass(frozen=True)
class Moment:
    """The hosts at one moment; everything else is derived, once."""

    now: float
    interval_s: float
    hang_after_s: float
    hosts: Mapping[str, HostView]
    run: str  # the run that is shown
    metrics: Sequence[StepMetrics]  # of the run, oldest first
    hung: BeatId | None  # the heartbeat already judged to be a hang
    away: Away

    @functools.cached_property
    def fresh(self) -> Sequence[HostView]:
        """The hosts whose frames are fresh."""
        return [host for host in self.hosts.values() if host.is_fresh(self.now, self.interval_s)]

    @functools.cached_property
    def heard(self) -> Mapping[str, RunFrame]:
        """What each host with fresh frames reports about the run."""
        return {host.name: run for host in self.fresh if (run := host.run(self.run))}

    @functools.cached_property
    def ours(self) -> Sequence[HostView]:
        """The hosts with fresh frames that report the run."""
        return [self.hosts[name] for name in self.heard]

    @functools.cached_property
    def told(self) -> Mapping[str, RunFrame]:
        """The last report on the run from each host that knows it."""
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
        """The GPUs that also stood out in the frame before: frames of one moment are up to an interval apart."""
        hosts = self.ours or self.fresh
        now = verdicts.odd_gpus({host.name: host.gpus for host in hosts})
        if not now:
            return {}
        before = verdicts.odd_gpus({host.name: host.gpus_before or host.gpus for host in hosts})
        return {gpu: note for gpu, note in now.items() if gpu in before}

    @functools.cached_property
    def notes(self) -> Mapping[str, Sequence[Note]]:
        """What stands out, by host."""
        found = {name: host.notes(self.odd) for name, host in self.hosts.items()}
        for name, rank, note in self.slow_ranks:
            found[name].append(Note(f"rank {rank} {note.key}", f"rank {rank}: {note.words}"))
        for name, note in self._beatless():
            found[name].append(note)
        return found

    @functools.cached_property
    def slow_ranks(self) -> Sequence[tuple[str, int, Note]]:
        """The ranks that delay the others, by host and number, and why."""
        beats = [(name, beat) for name, run in self.heard.items() for beat in run.beats]
        return list(verdicts.slow_ranks(beats, self.median("step_s")))

    @functools.cached_property
    def odd_ranks(self) -> Odd:
        """The ranks that stand out: that delay the others, have failed or hang."""
        failed = {
            (name, beat.rank): Note("failed", "it has failed", ("phase",))
            for name, run in self.heard.items()
            for beat in run.beats
            if beat.phase is Phase.FAILED
        }
        found = {(name, rank): note for name, rank, note in self.slow_ranks} | failed
        if self.hang and self.hang.host == self.hang.beat[0]:
            found[self.hang.beat[:2]] = Note("hangs", "the others wait for it", ("step", "age_s"))
        return found

    def judged(self, name: str) -> Judged:
        """Return what is judged about a host."""
        return Judged(*self.states[name], self.notes[name], self.odd, self.odd_ranks)

    def _beatless(self) -> Iterator[tuple[str, Note]]:
        """Yield the hosts whose ranks have no heartbeat, or one that stands, while the run trains."""
        if not self.measured or self.measured.since_s < self.patience_s:
            return
        for name, first, n_ranks in self.nodes:
            beats = [beat for beat, _ in self.beats.get(name, ())]
            if name in self.beats:
                ranks = range(first, first + n_ranks)
                for note in steps.without_heartbeat(ranks, beats, self.late.get(name, ())):
                    yield name, note

    @functools.cached_property
    def run_notes(self) -> Sequence[Note]:
        """What stands out about the run as a whole, worst first; nothing once it hangs or has failed."""
        if self.phase[0] not in MOVING:
            return ()
        found = list(self._stall())
        if self.metrics:
            found += steps.unusual(self.metrics)
        knows_attempt = not self.metrics or self.metrics[-1].attempt
        if self.head and knows_attempt:
            found += steps.without_metrics(self.measured, self.beats.get(self.head.name, ()), self.patience_s)
        if why := next((run.unsaved for run in self.told.values() if run.unsaved), ""):
            found.append(Note("unsaved", f"not saved: {clean(why)}", ("checkpoint_step",)))
        return found

    @functools.cached_property
    def states(self) -> Mapping[str, tuple[HostState, str]]:
        """Each host's state, and why."""
        trouble = {failure.host: (HostState.FAILED, verdicts.trouble_words(failure)) for failure in self.failures}
        if self.hang:
            trouble[self.hang.host] = (HostState.HUNG, self.hang.words)
        found = {name: host.state(trouble.get(name), self.now, self.interval_s) for name, host in self.hosts.items()}
        return found | {host.name: (HostState.CONNECTING, str(self.away)) for host in self.awaited}

    @functools.cached_property
    def awaited(self) -> Sequence[HostView]:
        """The hosts that may not have been connected again since this machine slept."""
        hosts = self.hosts.values() if self.away.lasts(self.now) else ()
        return [host for host in hosts if host.link in LINK_STATES or not host.is_fresh(self.now, self.interval_s)]

    @functools.cached_property
    def failures(self) -> Sequence[Failure]:
        """Failures reported by node runners, and by failed ranks whose node runner has yet to end."""
        states = {name: judge.state_of(run.status, alive=run.alive) for name, run in self.heard.items() if run.status}
        found = [failure for name, state in states.items() if (failure := judge.failure_of(name, state))]
        for name, beats in self.beats.items():
            found += [Failure(name, judge.cause_of_rank(beat)) for beat, _ in beats if beat.phase is Phase.FAILED]
        if not found:
            return []
        recorded = [run.blame for run in self.heard.values() if run.blame]
        return judge.with_blame(found, judge.blame_of(max(run.attempt for run in self.heard.values()), recorded))

    @functools.cached_property
    def beats(self) -> Mapping[str, Sequence[tuple[Beat, float]]]:
        """By host, the live ranks' heartbeats and their age in seconds, by that host's clock."""
        clocks = {name: self.hosts[name].clock(self.now) for name, run in self.heard.items() if run.alive}
        return {name: [(beat, now - beat.time) for beat in self.heard[name].beats] for name, now in clocks.items()}

    @functools.cached_property
    def head(self) -> HostView | None:
        """The host that writes the metrics, if it reports."""
        return next((self.hosts[name] for name, first, _ in self.nodes if first == 0 and name in self.heard), None)

    @functools.cached_property
    def measured(self) -> Measured | None:
        """What the metrics tell about this attempt; None if that is unknown."""
        if self.head is None:
            return None
        return steps.measured(self.metrics, self.heard[self.head.name].attempt, self.head.clock(self.now))

    @functools.cached_property
    def patience_s(self) -> float:
        """Seconds for which heartbeats and metrics may disagree."""
        return max(thresholds.DISAGREE_S, thresholds.DISAGREE_STEPS * (self.median("step_s") or 0.0))

    @functools.cached_property
    def late(self) -> Mapping[str, Sequence[Beat]]:
        """By host, the heartbeats that stand although the metrics go on: they tell nothing about their ranks."""
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
        """The rank that the others wait for, if that is a hang."""
        limit_s = max(self.hang_after_s, thresholds.HANG_STEPS * (self.median("step_s") or 0.0))
        found = judge.silent_rank(self.telling, limit_s, math.inf)
        if found is None:
            return None
        beat = (found.host, found.beat.rank, found.beat.time)
        sure = beat == self.hung or found.age_s > thresholds.LONG_SILENCE * limit_s
        log_ages = [
            run.log_age_s + self.now - self.hosts[name].heard_at
            for name, run in self.heard.items()
            if run.log_age_s is not None
        ]
        gpus = self.hosts[found.host].gpus
        if not verdicts.is_hang(found.beat, found.age_s, gpus, log_ages, sure=sure):
            return None
        words = verdicts.hang_words(found.beat, found.age_s, gpus, log_ages)
        if self.unheard:  # the rank may only be waiting for them
            first = self.unheard[0]
            why = first.state(None, self.now, self.interval_s)[1] or "it does not report the run"
            return Hang(first.name, found.age_s, f"{why}; {found.host} waits: {words}", beat)
        return Hang(found.host, found.age_s, words, beat)

    def _stall(self) -> Iterator[Note]:
        """Yield that no rank has moved for much longer than a step takes, which may become a hang."""
        step_s = self.median("step_s")
        beats = list(itertools.chain.from_iterable(self.telling.values()))
        if not step_s or any(beat.phase is not Phase.TRAIN for beat, _ in beats):
            return
        age_s = min((age_s for _, age_s in beats), default=0.0)
        if age_s >= max(thresholds.STALL_S, thresholds.STALL_STEPS * step_s):
            yield Note("stall", f"no progress for {age_s:.0f} s (a step usually takes {step_s:.1f} s)", ("step",))

    @functools.cached_property
    def phase(self) -> tuple[RunPhase, float | None]:
        """The run's phase, and the seconds it has been in it."""
        if self.hang:
            return RunPhase.HUNG, self.hang.age_s
        if self.failures:
            return RunPhase.FAILED, None
        if not self.heard:
            return RunPhase.UNKNOWN, None
        if not any(run.alive for run in self.heard.values()):
            return self._over(), None
        if not all(plan.trains for host in self.hosts.values() if (plan := host.plans.get(self.run))):
            return RunPhase.RUNNING, None
        since_s = min(
            (self.hosts[name].frame.now - beat.phase_since for name, run in self.heard.items() for beat in run.beats),
            default=None,
        )
        return verdicts.phase_of({beat.phase for run in self.heard.values() for beat in run.beats}), since_s

    @functools.cached_property
    def loaded(self) -> tuple[int, int]:
        """Bytes of weights (before, of text and tokens) that all ranks have now, and will have in the end."""
        beats = [beat for run in self.heard.values() for beat in run.beats if 0 <= beat.done_bytes <= beat.total_bytes]
        return sum(beat.done_bytes for beat in beats), sum(beat.total_bytes for beat in beats)

    def median(self, key: str) -> float | None:
        """Return the median of a metric over the last steps."""
        recent = itertools.islice(reversed(self.metrics), thresholds.RECENT_STEPS)
        values = known(getattr(metrics, key) for metrics in recent)
        return statistics.median(values) if values else None

    def _over(self) -> RunPhase:
        """Return the phase of a run that is live on no reporting host."""
        if self.unheard:
            return RunPhase.UNKNOWN
        statuses = [run.status for run in self.heard.values() if run.status]
        if not statuses:
            return RunPhase.STARTING
        if any(status.state is NodeState.STOPPED for status in statuses):
            return RunPhase.STOPPED
        return RunPhase.DONE


def nodes_of(hosts: Mapping[str, HostView], run: str) -> Nodes:
    """See ``Moment.nodes``."""
    return next((plan.nodes or () for host in hosts.values() if (plan := host.plans.get(run))), ())
