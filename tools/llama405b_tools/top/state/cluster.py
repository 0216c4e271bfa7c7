"""The state of a cluster, folded from the hosts' frames and links. Pure: every moment is given, none is read.

``take``, ``link`` and ``advance`` change it; ``picture`` only looks.
"""

import collections
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llama405b.contract import reader
from llama405b.contract.records import NodeState, Phase
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Failure
from llama405b_tools.text.clean import clean
from llama405b_tools.top.state import verdicts
from llama405b_tools.top.state.frames import Frame, RunFrame, StepMetrics
from llama405b_tools.top.state.hostview import HostView, Odd
from llama405b_tools.top.state.machines import distinct, mfu_pct, network
from llama405b_tools.top.state.picture import (
    LINK_STATES,
    SEVERITY,
    Change,
    GuardShown,
    HostState,
    Level,
    Picture,
    RunPhase,
    Training,
    Verdict,
)
from llama405b_tools.top.state.verdicts import Hang, Note

KEPT_METRICS, KEPT_EVENTS = 5000, 500
RECENT_STEPS = 20  # of which the median is taken
LONG_SILENCE = 5  # times the silence of a hang: then log lines excuse nothing
STAY_S = 60.0  # with a run that died, for its guard to bring it back
MOVING = (RunPhase.TRAIN, RunPhase.CKPT, RunPhase.EVAL)
RUN_TROUBLE = (HostState.FAILED, HostState.HUNG)  # of the run on a host, not of the host
Runs = Mapping[str, RunFrame]  # what each host says of the run


class Standing(NamedTuple):
    """Something that is wrong now, and was said."""

    key: str  # without the numbers that change
    text: str
    of_run: bool  # of the run that is shown: over when another is


class Situation(NamedTuple):
    """What all of it means at one moment."""

    fresh: Sequence[HostView]
    heard: Runs  # of the run that is shown, from hosts with fresh frames
    odd: Odd
    hang: Hang | None
    failures: Sequence[Failure]
    stall: str
    states: Mapping[str, tuple[HostState, str]]  # by host, and why
    notes: Mapping[str, Sequence[Note]]  # what stands out, by host


class Loading(NamedTuple):
    """How far the weights are, over all ranks."""

    done_bytes: int | None = None
    total_bytes: int | None = None
    eta_s: float | None = None


class Cluster:
    """Takes what arrives; ``picture`` says what it means."""

    def __init__(self, hosts: Sequence[str], interval_s: float, *, hang_after_s: float = 60.0, badge: str = "") -> None:
        self.hosts = {name: HostView(name) for name in hosts}
        self.interval_s, self.hang_after_s, self.badge = interval_s, hang_after_s, badge
        self.run = ""
        self.created = 0.0
        self.metrics_of: dict[str, collections.deque[StepMetrics]] = collections.defaultdict(
            lambda: collections.deque(maxlen=KEPT_METRICS)
        )
        self.hung: tuple[str, int, float] | None = None  # the heartbeat that is a hang: host, rank, time
        self.load: tuple[float, int] | None = None  # when loading was first seen, and how far it was then
        self.standing: dict[tuple[str, str], Standing] = {}  # by host and kind
        self.events: collections.deque[Change] = collections.deque(maxlen=KEPT_EVENTS)
        self.alive_at = 0.0  # when the run that is shown was last seen alive
        self.guard = GuardShown.NONE
        self.wanted = ""  # the run that was asked for

    @property
    def metrics(self) -> collections.deque[StepMetrics]:
        """Of the run that is shown, oldest first."""
        return self.metrics_of[self.run]

    def note(self, text: str, now: float) -> None:
        """Something that happened here, at the operator's."""
        self._event(now, "", Level.WARNING, text)

    def link(self, host: str, state: str, why: str, now: float) -> None:
        """A connection was made (OK), or was not: AUTH, REFUSED, TIMEOUT or DOWN, and why."""
        known = self.hosts[host]
        found = HostState(state) if state in (HostState.OK, *LINK_STATES) else HostState.DOWN
        fine = found is HostState.OK
        self._say(host, "link", Level.BAD, "" if fine else found, f"{found}: {why}", now)
        known.link, known.why = found, clean(why)
        known.linked_at = now if fine else None

    def take(self, host: str, arrived: Any, now: float) -> None:
        """A frame arrived, as JSON has it."""
        try:
            frame = reader.read(Frame, arrived, "frame")
        except reader.MalformedError as error:
            self.link(host, HostState.DOWN, f"its sampler sends what cannot be read ({error})", now)
            return
        self._say(host, "link", Level.NOTE, "", "", now)
        for words in self.hosts[host].take(frame, now):
            self._event(now, host, Level.BAD, words)
        if frame.run:
            metrics = self.metrics_of[frame.run.name]
            for each in frame.run.metrics:
                while metrics and metrics[-1].step >= each.step:  # a resumed run goes back
                    metrics.pop()
                metrics.append(each)

    def advance(self, now: float) -> None:
        """Go on to a moment: which run is shown, what is new, what is over."""
        self._choose(now)
        found = self._situation(now)
        self.hung = self._hung_beat(found.heard, found.hang, now)
        if not found.hang and not found.failures:
            key = "stall" if found.stall else ""
            self._say("", "stall", Level.WARNING, key, found.stall, now, of_run=True)
        for name, (state, why) in found.states.items():
            self._tell(name, state, why, found.notes[name], now)
        if self._phase(found)[0] is not RunPhase.LOADING:
            self.load = None
        elif self.load is None and (loading := _bytes_of(found.heard))[1]:
            self.load = now, loading[0]

    def picture(self, now: float) -> Picture:
        """What all of it means at this moment."""
        found = self._situation(now)
        rows = [
            host.row(self.run, *found.states[name], found.odd, found.notes[name], now)
            for name, host in self.hosts.items()
        ]
        training = self._training(found, now)
        judged = verdicts.verdict(rows, training, found.hang, found.failures, found.stall)
        if self.wanted and not training and judged.exit_code < 3 and judged.verdict is not Verdict.CONNECTING:
            judged = verdicts.Judgement(Verdict.DOWN, f"no host knows a run {self.wanted!r}", 3)
        return Picture(
            time=now,
            interval_s=self.interval_s,
            badge=self.badge,
            verdict=judged.verdict,
            why=judged.why,
            exit_code=judged.exit_code,
            hosts=tuple(rows),
            training=training,
            events=tuple(self.events),
            fresh=len(found.fresh),
            gpus_seen=distinct(found.fresh, lambda host: len(host.gpus)),
            gpus_expected=distinct(self.hosts.values(), lambda host: host.expected_gpus),
            workdirs=tuple(sorted({host.frame.cwd for host in found.fresh if host.frame and host.frame.cwd})),
        )

    def first_rank(self, host: str) -> int:
        """Of a host; 0 where it is not known."""
        return next((first for name, first, _ in self._nodes() if name == host), 0)

    def log_source(self) -> tuple[tuple[str, int] | None, dict[str, int]]:
        """The run and attempt whose logs are to be read, and the first rank of each host that can be asked for them."""
        found = self._runs()
        if not found or not self._nodes():
            return None, {}
        attempt = max(run.attempt for run in found.values())
        return (self.run, attempt), {name: self.first_rank(name) for name in found}

    def _choose(self, now: float) -> None:
        """The run to show: the one before while it lives, and a minute longer, and while no other does; else the newest that lives."""
        told = [run for host in self.hosts.values() if host.frame and (run := host.frame.run)]
        if not told:
            return
        ours = [run for run in told if run.name == self.run]
        lives = any(run.alive for run in ours)
        if lives:
            self.alive_at = now
        waits = 2 * len(ours) > len(told) and now < self.alive_at + STAY_S
        stays = ours and (lives or waits or not any(run.alive for run in told))
        best = max(ours if stays else told, key=lambda run: (run.alive, run.created))
        if self.run and best.name != self.run:
            self._event(now, "", Level.NOTE, f"now run {best.name}, before it {self.run}")
            self.standing = {key: said for key, said in self.standing.items() if not said.of_run}
        if best.name == self.run and best.created > self.created and best.attempt > 1:
            self._event(now, "", Level.NOTE, f"{best.name}: attempt {best.attempt} began")
        if (best.name, best.created) != (self.run, self.created):
            self.load = None
        self.run, self.created = best.name, best.created

    def _situation(self, now: float) -> Situation:
        fresh = [host for host in self.hosts.values() if host.is_fresh(now, self.interval_s)]
        heard = {host.name: run for host in fresh if (run := host.run(self.run))}
        odd = _odd([self.hosts[name] for name in heard] or fresh)
        slow = verdicts.slow_ranks({name: run.beats for name, run in heard.items()}, self._median("step_s"))
        hang, failures = self._hang(heard, now), _failures(heard)
        stall = "" if hang or failures else self._stall(heard, now)
        trouble = {failure.host: (HostState.FAILED, verdicts.trouble_words(failure)) for failure in failures}
        if hang:
            trouble[hang.host] = (HostState.HUNG, hang.words)
        states = {name: host.state(trouble.get(name), now, self.interval_s) for name, host in self.hosts.items()}
        notes = {name: [*host.notes(odd), *slow.get(name, ())] for name, host in self.hosts.items()}
        return Situation(fresh, heard, odd, hang, failures, stall, states, notes)

    def _runs(self) -> dict[str, RunFrame]:
        """What each host that knows the run said of it last."""
        return {name: run for name, host in self.hosts.items() if (run := host.run(self.run))}

    def _nodes(self) -> Sequence[tuple[str, int, int]]:
        """The run's hosts: name, first rank, ranks; () where nobody told yet."""
        return next((plan.nodes for host in self.hosts.values() if (plan := host.plans.get(self.run))), ())

    def _silent(self, heard: Runs, now: float) -> tuple[judge.SilentRank | None, float]:
        """The rank that the others most likely wait for, and the silence that is too long, in seconds."""
        beats = {
            name: [(beat, self.hosts[name].clock(now) - beat.time) for beat in run.beats]
            for name, run in heard.items()
            if run.alive
        }
        limit_s = max(self.hang_after_s, verdicts.HANG_STEPS * (self._median("step_s") or 0.0))
        return judge.silent_rank(beats, limit_s, math.inf), limit_s

    def _hang(self, heard: Runs, now: float) -> Hang | None:
        """The rank that the others wait for, where that is a hang."""
        found, limit_s = self._silent(heard, now)
        if found is None:
            return None
        log_ages = [
            run.log_age_s + now - heard_at
            for name, run in heard.items()
            if run.log_age_s is not None and (heard_at := self.hosts[name].heard_at) is not None
        ]
        sure = (found.host, found.beat.rank, found.beat.time) == self.hung or found.age_s > LONG_SILENCE * limit_s
        words = verdicts.hang_words(found.beat, found.age_s, self.hosts[found.host].gpus, log_ages, sure=sure)
        if words is None:
            return None
        unheard = self._unheard(heard)
        if unheard:  # it may only wait for them
            why = unheard[0].state(None, now, self.interval_s)[1] or "it does not tell of the run"
            return Hang(unheard[0].name, found.age_s, f"{why}; {found.host} waits: {words}")
        return Hang(found.host, found.age_s, words)

    def _hung_beat(self, heard: Runs, hang: Hang | None, now: float) -> tuple[str, int, float] | None:
        """The heartbeat that is a hang, to know it again."""
        found, _ = self._silent(heard, now)
        return (found.host, found.beat.rank, found.beat.time) if hang and found else None

    def _unheard(self, heard: Runs) -> list[HostView]:
        """The run's hosts of which nothing fresh is known."""
        return [self.hosts[node] for node, _, _ in self._nodes() if node in self.hosts and node not in heard]

    def _stall(self, heard: Runs, now: float) -> str:
        """That no rank has moved for much longer than a step takes: what may become a hang, and may not."""
        step_s = self._median("step_s")
        beats = [(beat, self.hosts[name].clock(now)) for name, run in heard.items() if run.alive for beat in run.beats]
        if not step_s or not beats or any(beat.phase is not Phase.TRAIN for beat, _ in beats):
            return ""
        age_s = min(host_now - beat.time for beat, host_now in beats)
        if age_s < max(verdicts.STALL_S, verdicts.STALL_STEPS * step_s):
            return ""
        return f"no rank has moved for {age_s:.0f} s, where a step takes {step_s:.1f} s"

    def _median(self, key: str) -> float | None:
        """Of the last steps."""
        recent = itertools.islice(reversed(self.metrics), RECENT_STEPS)
        values = [value for metrics in recent if (value := getattr(metrics, key)) is not None]
        return statistics.median(values) if values else None

    def _training(self, found: Situation, now: float) -> Training | None:
        runs = self._runs()
        if not runs:
            return None
        ours = [self.hosts[name] for name in found.heard]
        phase, phase_s = self._phase(found)
        head = next((run for run in runs.values() if run.max_steps is not None or run.metrics), None)
        saved = next((run.checkpoint_step for run in runs.values() if run.checkpoint_step is not None), None)
        world = sum(ranks for _, _, ranks in self._nodes())
        last = self.metrics[-1] if self.metrics else None
        step, steps = last.step if last else None, (head.max_steps or None) if head else None
        if phase is RunPhase.DONE and step is not None and steps and step < steps:
            phase = RunPhase.STOPPED
        moves = phase in MOVING
        step_s, tokens_per_s = self._median("step_s"), self._median("tokens_per_s") if moves else None
        lost = None if step is None else max(0, step - (saved or 0))
        loading = self._loading(found.heard, now) if phase is RunPhase.LOADING else Loading()
        eta_s = loading.eta_s
        if moves and steps and step is not None and step_s:
            eta_s = (steps - step) * step_s
        return Training(
            run=self.run,
            phase=phase,
            phase_s=phase_s,
            world=world,
            attempt=max(run.attempt for run in runs.values()),
            step=step,
            steps=steps,
            loss=last.loss if last else None,
            losses=tuple(metrics.loss for metrics in self.metrics),
            step_s=step_s,
            data_s=self._median("data_s"),
            forward_s=self._median("forward_s"),
            backward_s=self._median("backward_s"),
            optimizer_s=self._median("optimizer_s"),
            tokens_per_s=tokens_per_s,
            mfu_pct=mfu_pct(tokens_per_s, last.flops_per_token if last else None, ours, world),
            eta_s=eta_s,
            done_bytes=loading.done_bytes,
            total_bytes=loading.total_bytes,
            checkpoint_step=saved,
            lost_steps=lost,
            lost_rank_hours=lost * step_s * world / 3600 if lost is not None and step_s else None,
            network=network(ours, self.run),
            guard=self.guard,
            others=tuple(sorted({name for run in found.heard.values() for name in run.others} - {self.run})),
        )

    def _loading(self, heard: Runs, now: float) -> Loading:
        """Bytes that all ranks have, those that they will have, and seconds until then at the rate so far."""
        done, total = _bytes_of(heard)
        if not total:
            return Loading()
        began, had = self.load or (now, done)
        eta_s = (total - done) * (now - began) / (done - had) if done > had else None
        return Loading(done, total, eta_s)

    def _phase(self, found: Situation) -> tuple[RunPhase, float | None]:
        """The run's phase, and for how long it is in it."""
        heard = found.heard
        if found.hang:
            return RunPhase.HUNG, found.hang.age_s
        if found.failures:
            return RunPhase.FAILED, None
        if not heard:
            return RunPhase.UNKNOWN, None
        if not any(run.alive for run in heard.values()):
            return self._over(heard), None
        frames = {name: self.hosts[name].frame for name in heard}
        beats = [(frame.now, beat) for name, frame in frames.items() if frame for beat in heard[name].beats]
        since_s = min((host_now - beat.phase_since for host_now, beat in beats), default=None)
        return verdicts.phase_of([beat.phase for _, beat in beats]), since_s

    def _over(self, heard: Runs) -> RunPhase:
        """The phase of a run that lives nowhere that is heard."""
        if self._unheard(heard):
            return RunPhase.UNKNOWN
        statuses = [run.status for run in heard.values() if run.status]
        if not statuses:
            return RunPhase.STARTING
        stopped = any(status.state is NodeState.STOPPED for status in statuses)
        return RunPhase.STOPPED if stopped else RunPhase.DONE

    def _tell(self, name: str, state: HostState, why: str, notes: Sequence[Note], now: float) -> None:
        """Note what is new about a host."""
        level = Level.BAD if SEVERITY[state] == 2 else Level.WARNING
        said = SEVERITY[state] and state not in LINK_STATES  # a link's trouble is said as it happens
        key = state if said else ""
        self._say(name, "state", level, key, f"{state}: {why}", now, of_run=state in RUN_TROUBLE)
        words = "; ".join(note.words for note in notes)
        self._say(name, "notes", Level.WARNING, "; ".join(note.key for note in notes), words, now)

    def _say(
        self, host: str, kind: str, level: Level, key: str, text: str, now: float, *, of_run: bool = False
    ) -> None:
        """Something is wrong (``key`` "": not any more): a change where that is new, and not for numbers that change."""
        before = self.standing.get((host, kind))
        if not key:
            if before:
                del self.standing[host, kind]
                self._event(now, host, Level.NOTE, f"no longer: {before.text}")
            return
        if before is None or before.key != key:
            self._event(now, host, level, text)
        self.standing[host, kind] = Standing(key, text, of_run)

    def _event(self, now: float, host: str, level: Level, text: str) -> None:
        self.events.append(Change(now, host, level, clean(text).replace("\n", " ")))


def _failures(heard: Runs) -> list[Failure]:
    """By the node runners' word; else by that of ranks which failed, and will be ended in a moment."""
    found = []
    for name, run in heard.items():
        state = judge.state_of(run.status, alive=run.alive) if run.status else None
        if state and (failure := judge.failure_of(name, state)):
            found.append(failure)
    for name, run in heard.items():
        failed = [beat for beat in run.beats if run.alive and beat.phase is Phase.FAILED]
        found += [Failure(name, judge.cause_of_rank(beat)) for beat in failed]
    return found


def _odd(hosts: Sequence[HostView]) -> Odd:
    """The GPUs that stood out in the frame before too: frames of a moment are up to an interval apart."""
    now = verdicts.odd_gpus({host.name: host.gpus for host in hosts})
    before = verdicts.odd_gpus({host.name: host.gpus_before or host.gpus for host in hosts})
    return {gpu: note for gpu, note in now.items() if gpu in before}


def _bytes_of(heard: Runs) -> tuple[int, int]:
    """Bytes of weights that all ranks have, and those that they will have."""
    beats = [beat for run in heard.values() for beat in run.beats]
    return sum(beat.done_bytes for beat in beats), sum(beat.total_bytes for beat in beats)
