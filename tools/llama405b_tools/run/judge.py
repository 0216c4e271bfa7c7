"""Judge a run by its hosts' answers: its state on each, whether it hangs, which host failed first.

Also which run a verb means, and all of it in words. Pure: takes answers, returns values.
"""

import dataclasses
import enum
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from llama405b.contract.errors import UserError
from llama405b.contract.records import (
    PROCESS_STATE_NOTES,
    Cause,
    CauseKind,
    FailureRecord,
    NodeState,
    NodeStatus,
    Phase,
    describe_cause,
)
from llama405b.settings.schema import Timeouts
from llama405b_tools.agent.messages import HEARTBEAT_INTERVAL_S, HostRun, RankHeartbeat, StopReply
from llama405b_tools.hosts.transport import Outcomes, failure_texts, replies
from llama405b_tools.text.words import clean

STALE_AFTER_S = (
    3 * HEARTBEAT_INTERVAL_S
)  # the state of a host that is silent for longer is unknown; its connection notices far later
ONGOING = (NodeState.STARTING, NodeState.RUNNING)
SLOW_PHASES = (Phase.START, Phase.DATA, Phase.LOAD, Phase.PIN, Phase.RESUME, Phase.CHECKPOINT)

HANG_AFTER_S = 60.0  # --hang-after of autopsy and cluster-top, which end nothing
# between steps, a run stalls after the longer of STALL_S and STALL_STEPS steps; HANG_STEPS: at least so many before it hangs
STALL_S, STALL_STEPS, HANG_STEPS = 10.0, 2, 5
LONG_SILENCE = 3  # times the silence of a hang: after that, nothing is an excuse
MIN_PHASE_S, LONG_PHASE, HUNG_PHASE = 10.0, 3.0, 10.0  # times the usual time of a phase
UNKNOWN_PHASE_S = 60.0  # taken for usual, if nothing is known
SLACK_S = 60.0  # beyond the trainer's own timeout, so that it can report what it waits for


class SilenceLimits(NamedTuple):
    """How long nothing of a run may move, in seconds: the limits of guard, autopsy and cluster-top."""

    stall_s: float  # from then on it is not healthy
    hang_s: float  # and from then on it hangs


def step_limits(step_s: float | None, min_hang_s: float = HANG_AFTER_S) -> SilenceLimits:
    """Return the limits for training, with steps of this length."""
    return SilenceLimits(max(STALL_S, STALL_STEPS * (step_s or 0.0)), max(min_hang_s, HANG_STEPS * (step_s or 0.0)))


def phase_limits(usual_s: float | None) -> SilenceLimits:
    """Return the limits for a phase other than training, from the phase's begin on."""
    odd_s = max(MIN_PHASE_S, LONG_PHASE * (usual_s or UNKNOWN_PHASE_S))
    return SilenceLimits(odd_s, odd_s * HUNG_PHASE / LONG_PHASE)


def first_step_limits(load_s: float) -> SilenceLimits:
    """Return the limits for the first step, which compiles and connects; ``load_s``: the run's timeouts.load, 0: unknown."""
    return SilenceLimits(phase_limits(None).stall_s, (load_s or Timeouts().load) + SLACK_S)


class RunState(enum.StrEnum):
    """The state of a run on one host, in a word."""

    NO_RUN = "no such run"
    NEVER_STARTED = "never started"
    FILES_GONE = "files gone"
    STARTING = "starting"
    RUNNING = "running"
    LEFTOVERS = "leftovers"  # processes without their node runner
    VANISHED = "vanished"
    STOPPED = "stopped"  # somebody asked for it
    EXITED = "exited"
    KILLED = "killed"


@dataclasses.dataclass(frozen=True, slots=True)
class HostRunState:
    """The state of a run on one host, and the cause if something is wrong."""

    state: RunState
    exit_code: int | None = None
    signal: int | None = None
    cause: Cause | None = None

    @property
    def is_good(self) -> bool:
        """Whether it is running, or ended as it should."""
        ended_well = self.state is RunState.EXITED and self.exit_code == 0
        return ended_well or self.state in (RunState.RUNNING, RunState.STARTING, RunState.STOPPED)


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """What is wrong with a run on a host."""

    host: str
    cause: Cause
    state: HostRunState | None = None  # of its node runner, if that has ended
    is_decided: bool = False  # by whoever ended the attempt: then every verb names it

    @property
    def origin_score(self) -> int:
        """How likely it is that the fault began there: 3 decided, 2 certain, 1 possible, 0 it followed from another."""
        if self.is_decided:
            return 3
        return score_origin(self.cause)


def choose_run(answers: Mapping[str, Sequence[HostRun]]) -> str:
    """Return the run to use if none is named: the only live one, else the newest; there is at least one."""
    runs = [run for host_runs in answers.values() for run in host_runs]
    live = sorted({run.run for run in runs if run.alive})
    if len(live) > 1:
        raise UserError(f"--run: {len(live)} runs are alive; name one of {', '.join(live)}")
    return max(runs, key=lambda run: (run.alive, run.created)).run


def state_of_run(
    run: HostRun | None, *, is_member: bool = False, all_started: bool = True, launching: bool = False
) -> HostRunState:
    """Return the state of a run on a host, as its agent describes it; None: the host does not know the run.

    ``is_member``: another host reports that it takes part. ``all_started``: and that all hosts had started.
    ``launching``: and that it is being launched, the head first.
    """
    if launching and (is_member if run is None else run.status is None):
        return HostRunState(RunState.STARTING)
    if run is None and is_member:
        return FILES_GONE if all_started else NOT_REACHED
    if run is None:
        return HostRunState(RunState.NO_RUN, cause=Cause(CauseKind.NO_RUN))
    if run.stopped_by and run.status is None and not run.alive and not run.leftovers:  # before it could say anything
        return HostRunState(RunState.STOPPED)
    return state_from_status(run.status, alive=run.alive, leftovers=len(run.leftovers))


def state_from_status(status: NodeStatus | None, *, alive: bool, leftovers: int = 0) -> HostRunState:
    """Return the state of a run, from its node runner's status, its lock and its processes.

    A node runner lives a little longer than the run, whose end it has already recorded.
    """
    if alive and status is None:
        return HostRunState(RunState.STARTING)
    if alive and status and status.state in ONGOING:
        return HostRunState(RunState(status.state))
    if leftovers and not alive:
        return HostRunState(RunState.LEFTOVERS, cause=Cause(CauseKind.LEFTOVERS, count=leftovers))
    if status is None:
        return NEVER_STARTED
    if status.state in ONGOING:
        return HostRunState(RunState.VANISHED, cause=Cause(CauseKind.VANISHED, status.host))
    return HostRunState(RunState(status.state), status.exit_code, status.signal, status.cause)


NEVER_STARTED = HostRunState(RunState.NEVER_STARTED, cause=Cause(CauseKind.NEVER_STARTED))
NOT_REACHED = HostRunState(
    RunState.NEVER_STARTED,
    cause=Cause(CauseKind.NEVER_STARTED, detail="the launch was interrupted before it reached this host"),
)
FILES_GONE = HostRunState(RunState.FILES_GONE, cause=Cause(CauseKind.FILES_GONE))


def failure_of(host: str, state: HostRunState) -> Failure | None:
    """Return what is wrong with a run on a host; None if nothing is."""
    if state.is_good:
        return None
    return Failure(host, state.cause or Cause(CauseKind.UNKNOWN, host), state)


def half_stopped_failures(runs: Mapping[str, HostRun]) -> list[Failure]:
    """Return the hosts that still run an attempt which was stopped on other hosts."""
    stoppers = {run.status.attempt: run.stopped_by for run in runs.values() if run.stopped_by and run.status}
    return [
        Failure(name, Cause(CauseKind.HALF_STOPPED, name, by=stoppers[run.status.attempt]))
        for name, run in runs.items()
        if run.alive and not run.stopped_by and run.status and run.status.attempt in stoppers
    ]


def score_origin(cause: Cause) -> int:
    """Return how likely the fault began there (see ``Failure``).

    gloo may abort a rank that lost its peer, in its own thread; peers are ended with SIGTERM.
    """
    if cause.kind in (CauseKind.LOST_PEER, CauseKind.FOLLOWED, CauseKind.TORCHRUN_FAILED):
        return 0
    aborted = cause.kind in (CauseKind.RANK_KILLED, CauseKind.TORCHRUN_KILLED) and cause.signal == signal.SIGABRT
    ended = cause.kind is CauseKind.SIGNAL and cause.signal == signal.SIGTERM
    if aborted or ended or cause.kind is CauseKind.UNKNOWN:
        return 1
    return 2


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure to name: where the fault began, not a host that lost its peer; then in order of arrival."""
    return max(failures, key=lambda failure: failure.origin_score)  # the first of equals


def find_failure_record(attempt: int, recorded: Iterable[FailureRecord]) -> FailureRecord | None:
    """Return why an attempt failed, if whoever ended it recorded that; an interrupted launch did not."""
    committed = [blame for blame in recorded if blame.cause.kind is not CauseKind.NOT_KEPT]
    return next((blame for blame in committed if blame.attempt == attempt), None)


def restart_requester(blame: FailureRecord | None) -> str:
    """Return who asked for the guard to end an attempt and start the next one; "" if nobody did."""
    return blame.cause.by if blame and blame.cause.kind is CauseKind.STOPPED else ""


def all_hosts_started(runs: Iterable[HostRun]) -> bool:
    """Return whether all hosts had started a run's last attempt, as far as they know."""
    return not any(
        blame.attempt == run.attempt and blame.cause.kind is CauseKind.NOT_KEPT for run in runs for blame in run.blames
    )


def apply_failure_record(failures: Sequence[Failure], blame: FailureRecord | None) -> list[Failure]:
    """Return the failures of an attempt, with the recorded one marked as decided, and so the first failure.

    The end of an attempt for a requested restart is no failure.
    """
    if blame is None:
        return list(failures)
    if restart_requester(blame):
        return [failure for failure in failures if failure.cause.kind is CauseKind.UNREACHABLE]
    matching = [failure for failure in failures if (failure.host, failure.cause) == (blame.host, blame.cause)]
    decided = [*matching, Failure(blame.host, blame.cause)][0]
    return [*[other for other in failures if other is not decided], dataclasses.replace(decided, is_decided=True)]


@dataclasses.dataclass(frozen=True, slots=True)
class HostHeartbeats:
    """A host's latest heartbeats."""

    beats: Sequence[RankHeartbeat]
    now: float  # by the host's clock, when they were read
    arrived_s: float  # by the operator's monotonic clock, when they arrived


@dataclasses.dataclass(frozen=True, slots=True)
class SilentRank:
    """A rank that has been silent for too long."""

    host: str
    beat: RankHeartbeat
    age_s: float


def find_silent_rank(
    beats: Mapping[str, Sequence[tuple[RankHeartbeat, float]]], step_limit_s: float, slow_limit_s: float
) -> SilentRank | None:
    """Return the rank that the others most likely wait for, if any rank has been silent for too long.

    ``beats``: by host, heartbeats with their age in seconds. A rank that cannot run comes first, then one in a phase that
    may be slow, for which the others wait as long, then the one furthest behind. A process that is stopped, or has ended,
    has no excuse in any phase.
    """
    silent = []
    others_wait = any(beat.phase in SLOW_PHASES for host_beats in beats.values() for beat, _ in host_beats)
    for host, host_beats in beats.items():
        for beat, age_s in host_beats:
            # Before the first step, which compiles and connects; a long wait for an update is one of a later step.
            before_first_step = beat.time == beat.phase_since and beat.phase is not Phase.UPDATE
            before_first_step = before_first_step or (beat.phase is Phase.EVAL and beat.step == 0)
            slow = (others_wait or before_first_step) and beat.state not in ("T", "Z")
            limit_s = slow_limit_s if slow else step_limit_s
            if beat.phase not in (Phase.DONE, Phase.FAILED) and age_s > limit_s:
                silent.append(SilentRank(host, beat, age_s))
    return min(
        silent,
        key=lambda rank: (
            is_process_runnable(rank.beat),
            rank.beat.phase not in SLOW_PHASES,
            rank.beat.step,
            -rank.age_s,
        ),
        default=None,
    )


def is_process_runnable(beat: RankHeartbeat) -> bool:
    """Return whether a rank's process can go on: it is there, and neither stopped nor waiting for a device."""
    return bool(beat.state) and beat.state not in PROCESS_STATE_NOTES


def find_hang(
    heartbeats: Mapping[str, HostHeartbeats], now_s: float, step_limit_s: float, slow_limit_s: float
) -> Failure | None:
    """``find_silent_rank`` as a failure; each host's clock is compared only with itself, so skew does not matter."""
    beats = {
        host: [
            (beat, host_heartbeats.now - beat.time + now_s - host_heartbeats.arrived_s)
            for beat in host_heartbeats.beats
        ]
        for host, host_heartbeats in heartbeats.items()
        if now_s - host_heartbeats.arrived_s <= STALE_AFTER_S
    }
    silent = find_silent_rank(beats, step_limit_s, slow_limit_s)
    return Failure(silent.host, hang_cause(silent)) if silent else None


def hang_cause(silent: SilentRank) -> Cause:
    """Return a silent rank as a cause."""
    beat = silent.beat
    return Cause(
        CauseKind.HUNG,
        silent.host,
        beat.rank,
        phase=beat.phase,
        step=beat.step,
        age_s=silent.age_s,
        process_state=beat.state,
        gpu=beat.gpu,
    )


def cause_of_rank(beat: RankHeartbeat) -> Cause:
    """Return why a rank failed, from its heartbeat; if that does not say, only that it exited."""
    return dataclasses.replace(beat.cause or Cause(CauseKind.RANK_EXIT, beat.host, beat.rank), gpu=beat.gpu)


def format_state(state: HostRunState) -> str:
    """Describe a state in one word or a few, for a table."""
    if state.state is RunState.LEFTOVERS and state.cause:
        return f"LEFTOVERS ({state.cause.count} processes)"
    if state.state is RunState.EXITED:
        return f"exited {state.exit_code}" if state.exit_code else "finished"
    if state.state is RunState.KILLED:
        return f"killed by signal {state.signal}"
    return str(state.state)


def failure_words(failure: Failure) -> str:
    """Describe a failure, without naming the host."""
    reason = clean(describe_cause(failure.cause))
    if failure.state is None:
        return reason
    return ": ".join(filter(None, [format_state(failure.state), reason]))


def log_words(failure: Failure | None, logs: str) -> str:
    """Return where the log of the rank that failed is; "" if none did. ``logs``: the command for those of its run."""
    rank = failure.cause.rank if failure else None
    return "" if rank is None else f"; `{logs} --rank {rank}` shows its log"


def unstopped_hosts(outcomes: Outcomes[StopReply]) -> dict[str, str]:
    """Return the hosts where something may be left, each with the reason."""
    return {name: f"could not be queried: {why}" for name, why in failure_texts(outcomes).items()} | {
        name: f"{end.survivors} cannot be ended" for name, end in replies(outcomes).items() if end.survivors
    }
