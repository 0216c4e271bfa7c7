"""Judge a run by its hosts' answers: its state on each, whether it hangs, which host failed first.

Also which run a verb means, and all of it in words. Pure: takes answers, returns values.
"""

import dataclasses
import enum
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from llama405b.contract.errors import UserError
from llama405b.contract.records import STUCK, Blame, Cause, CauseKind, NodeState, NodeStatus, Phase, words
from llama405b.settings.schema import Timeouts
from llama405b_tools.agent.messages import BEATS_EVERY_S, Beat, HostRun, StopReply
from llama405b_tools.hosts.transport import Outcomes, replies, unanswered
from llama405b_tools.text.words import clean

HEARD_WITHIN_S = (
    3 * BEATS_EVERY_S
)  # the state of a host that is silent for longer is unknown; its connection notices far later
ONGOING = (NodeState.STARTING, NodeState.RUNNING)
SLOW_PHASES = (Phase.START, Phase.DATA, Phase.LOAD, Phase.PIN, Phase.RESUME, Phase.CHECKPOINT)

HANG_AFTER_S = 60.0  # --hang-after of autopsy and cluster-top, which end nothing
# between steps, a run stalls after the longer of STALL_S and STALL_STEPS steps; HANG_STEPS: at least so many before it hangs
STALL_S, STALL_STEPS, HANG_STEPS = 10.0, 2, 5
LONG_SILENCE = 3  # times the silence of a hang: after that, nothing is an excuse
SHORTEST_S, LONG_PHASE, HUNG_PHASE = 10.0, 3.0, 10.0  # times the usual time of a phase
UNKNOWN_PHASE_S = 60.0  # taken for usual, if nothing is known
SLACK_S = 60.0  # beyond the trainer's own timeout, so that it can report what it waits for


class Patience(NamedTuple):
    """How long nothing of a run may move, in seconds: the limits of guard, autopsy and cluster-top."""

    odd_s: float  # from then on it is not healthy
    hang_s: float  # and from then on it hangs


def between_steps(step_s: float | None, least_s: float = HANG_AFTER_S) -> Patience:
    """Return the limits for training, with steps of this length."""
    return Patience(max(STALL_S, STALL_STEPS * (step_s or 0.0)), max(least_s, HANG_STEPS * (step_s or 0.0)))


def in_phase(usual_s: float | None) -> Patience:
    """Return the limits for a phase other than training, from the phase's begin on."""
    odd_s = max(SHORTEST_S, LONG_PHASE * (usual_s or UNKNOWN_PHASE_S))
    return Patience(odd_s, odd_s * HUNG_PHASE / LONG_PHASE)


def first_step(load_s: float) -> Patience:
    """Return the limits for the first step, which compiles and connects; ``load_s``: the run's timeouts.load, 0: unknown."""
    return Patience(in_phase(None).odd_s, (load_s or Timeouts().load) + SLACK_S)


class Standing(enum.StrEnum):
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
class State:
    """The state of a run on one host, and the cause if something is wrong."""

    standing: Standing
    exit_code: int | None = None
    signal: int | None = None
    cause: Cause | None = None

    @property
    def is_good(self) -> bool:
        """Whether it is running, or ended as it should."""
        ended_well = self.standing is Standing.EXITED and self.exit_code == 0
        return ended_well or self.standing in (Standing.RUNNING, Standing.STARTING, Standing.STOPPED)


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """What is wrong with a run on a host."""

    host: str
    cause: Cause
    state: State | None = None  # of its node runner, if that has ended
    decided: bool = False  # by whoever ended the attempt: then every verb names it

    @property
    def origin(self) -> int:
        """How likely it is that the fault began there: 3 decided, 2 certain, 1 possible, 0 it followed from another."""
        if self.decided:
            return 3
        return origin_of(self.cause)


def choose_run(answers: Mapping[str, Sequence[HostRun]]) -> str:
    """Return the run to use if none is named: the only live one, else the newest; there is at least one."""
    runs = [run for found in answers.values() for run in found]
    live = sorted({run.run for run in runs if run.alive})
    if len(live) > 1:
        raise UserError(f"--run: {len(live)} runs are alive; name one of {', '.join(live)}")
    return max(runs, key=lambda run: (run.alive, run.created)).run


def state_of_run(
    run: HostRun | None, *, is_member: bool = False, was_up: bool = True, launching: bool = False
) -> State:
    """Return the state of a run on a host, as its agent describes it; None: the host does not know the run.

    ``is_member``: another host reports that it takes part. ``was_up``: and that all hosts had started.
    ``launching``: and that it is being launched, the head first.
    """
    if launching and (is_member if run is None else run.status is None):
        return State(Standing.STARTING)
    if run is None and is_member:
        return FILES_GONE if was_up else NOT_REACHED
    if run is None:
        return State(Standing.NO_RUN, cause=Cause(CauseKind.NO_RUN))
    if run.stopped_by and run.status is None and not run.alive and not run.leftovers:  # before it could say anything
        return State(Standing.STOPPED)
    return state_of(run.status, alive=run.alive, leftovers=len(run.leftovers))


def state_of(status: NodeStatus | None, *, alive: bool, leftovers: int = 0) -> State:
    """Return the state of a run, from its node runner's status, its lock and its processes.

    A node runner lives a little longer than the run, whose end it has already recorded.
    """
    if alive and status is None:
        return State(Standing.STARTING)
    if alive and status and status.state in ONGOING:
        return State(Standing(status.state))
    if leftovers and not alive:
        return State(Standing.LEFTOVERS, cause=Cause(CauseKind.LEFTOVERS, count=leftovers))
    if status is None:
        return NEVER_STARTED
    if status.state in ONGOING:
        return State(Standing.VANISHED, cause=Cause(CauseKind.VANISHED, status.host))
    return State(Standing(status.state), status.exit_code, status.signal, status.cause)


NEVER_STARTED = State(Standing.NEVER_STARTED, cause=Cause(CauseKind.NEVER_STARTED))
NOT_REACHED = State(
    Standing.NEVER_STARTED,
    cause=Cause(CauseKind.NEVER_STARTED, detail="the launch was interrupted before it reached this host"),
)
FILES_GONE = State(Standing.FILES_GONE, cause=Cause(CauseKind.FILES_GONE))


def failure_of(host: str, state: State) -> Failure | None:
    """Return what is wrong with a run on a host; None if nothing is."""
    if state.is_good:
        return None
    return Failure(host, state.cause or Cause(CauseKind.UNKNOWN, host), state)


def half_stopped(runs: Mapping[str, HostRun]) -> list[Failure]:
    """Return the hosts that still run an attempt which was stopped on other hosts."""
    by = {run.status.attempt: run.stopped_by for run in runs.values() if run.stopped_by and run.status}
    return [
        Failure(name, Cause(CauseKind.HALF_STOPPED, name, by=by[run.status.attempt]))
        for name, run in runs.items()
        if run.alive and not run.stopped_by and run.status and run.status.attempt in by
    ]


def origin_of(cause: Cause) -> int:
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
    return max(failures, key=lambda failure: failure.origin)  # the first of equals


def blame_of(attempt: int, recorded: Iterable[Blame]) -> Blame | None:
    """Return why an attempt failed, if whoever ended it recorded that; an interrupted launch did not."""
    known = [blame for blame in recorded if blame.cause.kind is not CauseKind.NOT_KEPT]
    return next((blame for blame in known if blame.attempt == attempt), None)


def restart_by(blame: Blame | None) -> str:
    """Return who asked for the guard to end an attempt and start the next one; "" if nobody did."""
    return blame.cause.by if blame and blame.cause.kind is CauseKind.STOPPED else ""


def was_up(runs: Iterable[HostRun]) -> bool:
    """Return whether all hosts had started a run's last attempt, as far as they know."""
    return not any(
        blame.attempt == run.attempt and blame.cause.kind is CauseKind.NOT_KEPT for run in runs for blame in run.blames
    )


def with_blame(failures: Sequence[Failure], blame: Blame | None) -> list[Failure]:
    """Return the failures of an attempt, with the recorded one marked as decided, and so the first failure.

    The end of an attempt for a requested restart is no failure.
    """
    if blame is None:
        return list(failures)
    if restart_by(blame):
        return [failure for failure in failures if failure.cause.kind is CauseKind.UNREACHABLE]
    same = [failure for failure in failures if (failure.host, failure.cause) == (blame.host, blame.cause)]
    found = [*same, Failure(blame.host, blame.cause)][0]
    return [*[other for other in failures if other is not found], dataclasses.replace(found, decided=True)]


@dataclasses.dataclass(frozen=True, slots=True)
class HostHeartbeats:
    """A host's latest heartbeats."""

    beats: Sequence[Beat]
    now: float  # by the host's clock, when they were read
    at_s: float  # by the operator's monotonic clock, when they arrived


@dataclasses.dataclass(frozen=True, slots=True)
class SilentRank:
    """A rank that has been silent for too long."""

    host: str
    beat: Beat
    age_s: float


def silent_rank(
    beats: Mapping[str, Sequence[tuple[Beat, float]]], step_limit_s: float, slow_limit_s: float
) -> SilentRank | None:
    """Return the rank that the others most likely wait for, if any rank has been silent for too long.

    ``beats``: by host, heartbeats with their age in seconds. A rank that cannot run comes first, then one in a phase that
    may be slow, for which the others wait as long, then the one furthest behind. A process that is stopped, or has ended,
    has no excuse in any phase.
    """
    silent = []
    others_wait = any(beat.phase in SLOW_PHASES for each in beats.values() for beat, _ in each)
    for host, each in beats.items():
        for beat, age_s in each:
            # Before the first step, which compiles and connects; a long wait for an update is one of a later step.
            before_first_step = beat.time == beat.phase_since and beat.phase is not Phase.UPDATE
            before_first_step = before_first_step or (beat.phase is Phase.EVAL and beat.step == 0)
            slow = (others_wait or before_first_step) and beat.state not in ("T", "Z")
            limit_s = slow_limit_s if slow else step_limit_s
            if beat.phase not in (Phase.DONE, Phase.FAILED) and age_s > limit_s:
                silent.append(SilentRank(host, beat, age_s))
    return min(
        silent,
        key=lambda rank: (can_run(rank.beat), rank.beat.phase not in SLOW_PHASES, rank.beat.step, -rank.age_s),
        default=None,
    )


def can_run(beat: Beat) -> bool:
    """Return whether a rank's process can go on: it is there, and neither stopped nor waiting for a device."""
    return bool(beat.state) and beat.state not in STUCK


def hung(heard: Mapping[str, HostHeartbeats], now_s: float, step_limit_s: float, slow_limit_s: float) -> Failure | None:
    """``silent_rank`` as a failure; each host's clock is compared only with itself, so skew does not matter."""
    beats = {
        host: [(beat, hears.now - beat.time + now_s - hears.at_s) for beat in hears.beats]
        for host, hears in heard.items()
        if now_s - hears.at_s <= HEARD_WITHIN_S
    }
    found = silent_rank(beats, step_limit_s, slow_limit_s)
    return Failure(found.host, hang_cause(found)) if found else None


def hang_cause(found: SilentRank) -> Cause:
    """Return a silent rank as a cause."""
    beat = found.beat
    return Cause(
        CauseKind.HUNG,
        found.host,
        beat.rank,
        phase=beat.phase,
        step=beat.step,
        age_s=found.age_s,
        process_state=beat.state,
        gpu=beat.gpu,
    )


def cause_of_rank(beat: Beat) -> Cause:
    """Return why a rank failed, from its heartbeat; if that does not say, only that it exited."""
    return dataclasses.replace(beat.cause or Cause(CauseKind.RANK_EXIT, beat.host, beat.rank), gpu=beat.gpu)


def state_words(state: State) -> str:
    """Describe a state in one word or a few, for a table."""
    if state.standing is Standing.LEFTOVERS and state.cause:
        return f"LEFTOVERS ({state.cause.count} processes)"
    if state.standing is Standing.EXITED:
        return f"exited {state.exit_code}" if state.exit_code else "finished"
    if state.standing is Standing.KILLED:
        return f"killed by signal {state.signal}"
    return str(state.standing)


def failure_words(failure: Failure) -> str:
    """Describe a failure, without naming the host."""
    said = clean(words(failure.cause))
    if failure.state is None:
        return said
    return ": ".join(filter(None, [state_words(failure.state), said]))


def log_words(failure: Failure | None, logs: str) -> str:
    """Return where the log of the rank that failed is; "" if none did. ``logs``: the command for those of its run."""
    rank = failure.cause.rank if failure else None
    return "" if rank is None else f"; `{logs} --rank {rank}` shows its log"


def not_stopped(ends: Outcomes[StopReply]) -> dict[str, str]:
    """Return the hosts where something may be left, each with the reason."""
    return {name: f"could not be queried: {why}" for name, why in unanswered(ends).items()} | {
        name: f"{end.remains} cannot be ended" for name, end in replies(ends).items() if end.remains
    }
