"""Start a run's node runner on this host, and end it.

A start is undone unless the operator commits it. A stop ends all processes of the run and checks that none is left.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time

from llama405b.contract import reader
from llama405b.contract.errors import RunError
from llama405b.contract.files import read_record, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Blame, Cause, CauseKind, NodeState, NodeStatus, StopMark
from llama405b.contract.software import own_argv
from llama405b.spec.plan import NO_PLAN, REHEARSAL, read_plan
from llama405b_tools.agent import hostprobe, processes, sampler
from llama405b_tools.agent.describe import checkpoints_of, describe, stop_mark, stopped_by
from llama405b_tools.agent.messages import (
    ANSWER_WITHIN_S,
    CUT,
    KEEP,
    NOT_OURS,
    RUNNER_ENDS_S,
    START_WITHIN_S,
    Kept,
    Orphan,
    OrphansReply,
    OrphansRequest,
    Started,
    StartFault,
    StartRequest,
    StopReply,
    StopRequest,
)
from llama405b_tools.agent.processes import (
    END_WITHIN_S,
    dismiss_guard,
    is_alive,
    live_names,
    note_guard,
    record_blame,
    remove_dead_sockets,
    run_of,
    runs_here,
    start_session,
    take_lock,
    tmux_session,
    tmux_socket,
    write_secrets,
)


def stop(request: StopRequest) -> StopReply:
    """End every process of the run on this host, and report any that remain."""
    run, host = run_of(request.run), request.host
    plan = read_plan(run)
    if request.only not in (None, plan.rdzv_id):  # another launch's: not ours to end
        return StopReply(known=True, was_alive=False, stopped_by=stopped_by(run, host))
    was_alive = is_alive(run, host)
    guard_left = _record_why(run, request) if run.path.is_dir() else ()
    if was_alive:
        stop_runner(run, host, request)
    ended, left = processes.sweep(f"{run.path}:{host}")
    _end_session(run, host)
    with contextlib.suppress(OSError):
        run.secrets(host).unlink()
    run.guard_order(host).unlink(missing_ok=True)
    if request.discard and run.name.endswith(REHEARSAL) and not left:
        shutil.rmtree(checkpoints_of(run, plan), ignore_errors=True)
    has_files = run.path.is_dir() and (plan is NO_PLAN or plan.find(host) is not None)
    return StopReply(
        known=has_files or bool(ended or left),  # somebody may have deleted its files while it ran
        was_alive=was_alive,
        swept=ended,
        left=(*left, *guard_left),
        stopped_by=stopped_by(run, host),
        node=describe(run, plan, host),
    )


def _record_why(run: RunDir, request: StopRequest) -> tuple[int, ...]:
    """Record who stops the run, or why it failed; return its guard's pid if that does not end.

    Somebody's stop also ends the guard.
    """
    left: tuple[int, ...] = ()
    if request.by:
        write_json(run.stop(request.host), StopMark(request.by, request.grace_s, time.time()))
        note_guard(run, request.host, None)
        left = dismiss_guard(run)
    elif request.grace_s:  # for a restart, which its guard does
        write_json(run.stop(request.host), StopMark("", request.grace_s, time.time()))
    if request.blame:
        record_blame(run, request.host, request.blame)
    return left


def _end_session(run: RunDir, host: str) -> None:
    """End the run's tmux session, unless tmux is gone or hangs: its processes have already been ended."""
    session = ["kill-session", "-t", f"={tmux_session(host)}"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["tmux", "-L", tmux_socket(run), *session], capture_output=True, timeout=END_WITHIN_S, check=False
        )
    remove_dead_sockets(ending=tmux_socket(run))


def tether(request: StopRequest) -> None:
    """End the run when standard input closes, unless a release message arrives before.

    Standard input closes when the operator's process is gone.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.stdin.readline() != CUT:
        stop(request)


def stop_runner(run: RunDir, host: str, request: StopRequest) -> None:
    """Tell the node runner to end the run, and wait; kill it if it does not end.

    Its guardian then ends the remaining processes.
    """
    runner = read_record(NodeStatus, run.status(host))
    if runner is None or not processes.same_process(runner.pid, runner.pid_start):
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(runner.pid, signal.SIGKILL if request.hard else signal.SIGTERM)
    deadline = time.monotonic() + request.grace_s + RUNNER_ENDS_S
    while is_alive(run, host) and time.monotonic() < deadline:
        time.sleep(0.1)
    if is_alive(run, host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(runner.pid, signal.SIGKILL)


def orphans(request: OrphansRequest) -> OrphansReply:
    """Find processes of runs whose node runner is gone, by run directory; with ``end``, end them."""
    found = []
    for value, pids in sorted(processes.all_marked().items()):
        if any(hostprobe.has_runner(pid, value) for pid in pids):
            continue
        what, left = "", pids
        with contextlib.suppress(OSError):
            what = sampler.command_of(pids[0])  # type: ignore[no-untyped-call]
        if request.end:
            _, left = processes.sweep(value)
        found.append(Orphan(value, tuple(pids), what, tuple(left)))
    return OrphansReply(tuple(found))


# after this host is up, for all others to come up; a broken link is noticed immediately
KEEP_WITHIN_S = 2 * ANSWER_WITHIN_S

TURN_TRIES = 600  # at 0.05 s
LOOKS = 20  # at 0.05 s


def start(request: StartRequest) -> None:
    """Start the run here and report it; end it again unless the operator commits it.

    The operator commits it once all hosts have reported.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # the operator may be gone: then there is something to end
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    plan, host = request.plan, request.host
    started = _start_node_runner(request)
    with contextlib.suppress(BrokenPipeError):
        print(reader.dumps(started), flush=True)
        if not started.fault and select.select([sys.stdin], [], [], KEEP_WITHIN_S)[0] and sys.stdin.readline() == KEEP:
            by = stopped_by(run_of(plan.run), host)  # meanwhile
            print(reader.dumps(Kept(by)), flush=True)
            if not by:
                return
    if started.fault not in NOT_OURS:
        blame = None if started.fault else Blame(plan.attempt, host, Cause(CauseKind.NOT_KEPT, host))
        stop(StopRequest(plan.run, host, only=plan.rdzv_id, blame=blame))
    sys.stdout = None  # nobody listens, and there is nothing more to report


def _start_node_runner(request: StartRequest) -> Started:
    """Write the plan and the secrets, start the node runner inside tmux, and wait until torchrun runs."""
    host, plan = request.host, request.plan
    run = run_of(plan.run)
    claim = take_lock(run.start_lock(host))
    if claim and is_alive(run, host) and not runs_here(run, host):
        stop_runner(run, host, StopRequest(plan.run, host))  # the new attempt copies what is left
    if claim:
        os.close(claim)  # it may have taken long, and hosts that share the directory take turns
    turn = take_lock(run.turn, TURN_TRIES)  # of two simultaneous launches of one name, one is refused
    claim = take_lock(run.start_lock(host)) if turn else None
    ours = {node.name for node in plan.nodes}
    others = not request.again and read_plan(run).rdzv_id != plan.rdzv_id and _stays_live(run, ours)
    if turn is None or claim is None or others or is_alive(run, host):
        return Started(StartFault.TAKEN, by=read_plan(run).owner)
    if (mark := stop_mark(run, host)).by and (request.again or mark.time != request.known_stop):
        return Started(StartFault.STOPPED, by=mark.by)
    _write_files(request, run)
    os.close(turn)  # the plan tells the next one whose locks those are
    runner = [*own_argv("llama405b_tools.agent.node"), str(run.path), host]
    try:
        return _await_torchrun(run, host, start_session(tmux_socket(run), tmux_session(host), runner))
    except RunError as error:
        run.secrets(host).unlink(missing_ok=True)
        return Started(StartFault.TMUX, detail=str(error))


def _stays_live(run: RunDir, ours: set[str]) -> bool:
    """Return whether the run is alive under other names of this machine.

    Polls for a while: a launch that still waits for its turn holds its lock for a moment.
    """
    for _ in range(LOOKS):
        if not live_names(run, ours):
            return False
        time.sleep(0.05)
    return True


def _write_files(request: StartRequest, run: RunDir) -> None:
    """Replace files of an earlier attempt with what the node runner reads."""
    host = request.host
    run.stop(host).unlink(missing_ok=True)
    if not request.again:
        dismiss_guard(run)  # the guard of an earlier launch of this name
        note_guard(run, host, request.guard)
    write_json(run.plan, request.plan)
    run.status(host).unlink(missing_ok=True)
    for rank in request.ranks:
        run.heartbeat(rank).unlink(missing_ok=True)
    if request.secrets:
        write_secrets(run.secrets(host), dict(request.secrets))


def _await_torchrun(run: RunDir, host: str, runner: int) -> Started:
    deadline = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline:
        lives = processes.start_time(runner) is not None  # checked before its last status is read
        status = read_record(NodeStatus, run.status(host))
        if status and status.cause and status.state is NodeState.KILLED:
            return Started(StartFault.ENDED, cause=status.cause)
        if status and status.state not in (NodeState.STARTING, NodeState.KILLED):
            return Started()
        if not lives and (by := stopped_by(run, host)):
            return Started(StartFault.STOPPED_SINCE, by)
        if not lives:
            return Started(StartFault.ENDED)
        time.sleep(0.05)
    return Started(StartFault.SLOW, detail=f"{START_WITHIN_S:.0f}")
