"""Judge a run by its hosts' answers: its state on each, whether it hangs, which host failed first.

Also which run a verb means, and all of it in words. Pure: takes answers, returns values.
"""

import dataclasses
import enum
import signal
from collections.abc import Iterable, Mapping, Sequence

from llama405b.contract.errors import UserError
from llama405b.contract.records import (
    Cause,
    CauseKind,
    FailureRecord,
    NodeState,
    NodeStatus,
    describe_cause,
)
from llama405b_tools.agent.messages import HostRun, RankHeartbeat, StopReply
from llama405b_tools.hosts.transport import Outcomes, failure_texts, replies
from llama405b_tools.text.words import clean

ONGOING = (NodeState.STARTING, NodeState.RUNNING)


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
