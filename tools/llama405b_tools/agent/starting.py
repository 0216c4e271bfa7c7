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
from llama405b.contract.records import Cause, CauseKind, FailureRecord, NodeState, NodeStatus, StopMark
from llama405b.contract.software import module_argv
from llama405b.spec.plan import NO_PLAN, REHEARSAL, read_plan
from llama405b_tools.agent import facts, hostprobe, processes, sampler
from llama405b_tools.agent.describe import checkpoint_root, describe_run, read_stop_mark, stopped_by
from llama405b_tools.agent.messages import (
    COMMIT,
    FAULTS_BEFORE_START,
    RELEASE,
    RUNNER_END_TIMEOUT_S,
    START_REPLY_TIMEOUT_S,
    START_TIMEOUT_S,
    Committed,
    Orphan,
    StartFault,
    StartReply,
    StartRequest,
    StopReply,
)
from llama405b_tools.agent.processes import (
    TMUX_END_TIMEOUT_S,
    dismiss_guard,
    find_live_names,
    is_alive,
    is_run_active,
    record_failure,
    remove_dead_sockets,
    resolve_run_dir,
    start_session,
    take_lock,
    tmux_session,
    tmux_socket,
    write_guard_note,
    write_secrets,
)


def stop(
    run: str,
    host: str,
    *,
    only: str | None = None,
    by: str = "",
    grace_s: float = 0.0,
    blame: FailureRecord | None = None,
    hard: bool = False,
    discard: bool = False,
) -> StopReply:
    """End every process of the run on this host, and report any that remain.

    ``only``: the rendezvous id of one launch; another launch is not touched. ``by``: who stops it for good; then no restart
    follows. ``grace_s``: time for the trainer to save first. ``blame``: why the attempt is ended, if it failed; the first one is
    kept. ``hard``: as a crash would. ``discard``: delete a rehearsal's checkpoints.
    """
    run_dir = resolve_run_dir(run)
    plan = read_plan(run_dir)
    if only not in (None, plan.rdzv_id):  # another launch's: not ours to end
        return StopReply(known=True, was_alive=False, stopped_by=stopped_by(run_dir, host))
    was_alive = is_alive(run_dir, host)
    surviving_guard = _record_stop(run_dir, host, by, grace_s, blame) if run_dir.path.is_dir() else ()
    if was_alive:
        stop_runner(run_dir, host, grace_s, hard=hard)
    n_killed, remaining = processes.kill_marked(f"{run_dir.path}:{host}")
    _end_session(run_dir, host)
    with contextlib.suppress(OSError):
        run_dir.secrets(host).unlink()
    if discard and run.endswith(REHEARSAL) and not remaining:
        shutil.rmtree(checkpoint_root(run_dir, plan), ignore_errors=True)
    has_files = run_dir.path.is_dir() and (plan is NO_PLAN or plan.find_node(host) is not None)
    return StopReply(
        known=has_files or bool(n_killed or remaining),  # somebody may have deleted its files while it ran
        was_alive=was_alive,
        swept=n_killed,
        left=(*remaining, *surviving_guard),
        stopped_by=stopped_by(run_dir, host),
        node=describe_run(run_dir, plan, host),
    )


def _record_stop(run: RunDir, host: str, by: str, grace_s: float, blame: FailureRecord | None) -> tuple[int, ...]:
    """Record who stops the run, or why it failed; return its guard's pid if that does not end.

    Somebody's stop also ends the guard.
    """
    surviving_guard: tuple[int, ...] = ()
    if by or grace_s:  # a time for saving alone is for a restart, which its guard does
        write_json(run.stop(host), StopMark(by, grace_s, time.time()))
    if by:
        write_guard_note(run, host, None)
        surviving_guard = dismiss_guard(run)
    if blame:
        record_failure(run, host, blame)
    return surviving_guard


def _end_session(run: RunDir, host: str) -> None:
    """End the run's tmux session, unless tmux is gone or hangs: its processes have already been ended."""
    session = ["kill-session", "-t", f"={tmux_session(host)}"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["tmux", "-L", tmux_socket(run), *session], capture_output=True, timeout=TMUX_END_TIMEOUT_S, check=False
        )
    remove_dead_sockets(ending_socket=tmux_socket(run))


def tether(run: str, host: str) -> None:
    """End a trial run when standard input closes, unless a release message arrives before.

    Standard input closes when the operator's process is gone.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.stdin.readline() != RELEASE:
        stop(run, host, discard=True)


def stop_runner(run: RunDir, host: str, grace_s: float = 0.0, *, hard: bool = False) -> None:
    """Tell the node runner to end the run, and wait; kill it if it does not end.

    Its guardian then ends the remaining processes.
    """
    runner = read_record(NodeStatus, run.status(host))
    if runner is None or not processes.is_same_process(runner.pid, runner.pid_start):
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(runner.pid, signal.SIGKILL if hard else signal.SIGTERM)
    deadline = time.monotonic() + grace_s + RUNNER_END_TIMEOUT_S
    while is_alive(run, host) and time.monotonic() < deadline:
        time.sleep(0.1)
    if is_alive(run, host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(runner.pid, signal.SIGKILL)


def orphans(*, end: bool) -> tuple[Orphan, ...]:
    """Find processes of runs whose node runner is gone, by run directory; with ``end``, end them."""
    entries = []
    for value, pids in sorted(facts.marked_processes().items()):
        if any(hostprobe.has_runner(pid, value) for pid in pids):
            continue
        command, remaining = "", pids
        with contextlib.suppress(OSError):
            command = sampler.read_command(pids[0])  # type: ignore[no-untyped-call]
        if end:
            _, remaining = processes.kill_marked(value)
        entries.append(Orphan(value, tuple(pids), command, tuple(remaining)))
    return tuple(entries)


# after this host is up, for all others to come up; a broken link is noticed immediately
COMMIT_TIMEOUT_S = 2 * START_REPLY_TIMEOUT_S

N_TURN_TRIES = 600  # at 0.05 s
N_LIVE_CHECKS = 20  # at 0.05 s


def start(request: StartRequest) -> None:
    """Start the run here and report it; end it again unless the operator commits it.

    The operator commits it once all hosts have reported.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # the operator may be gone: then there is something to end
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    plan, host = request.plan, request.host
    reply = _start_node_runner(request)
    with contextlib.suppress(BrokenPipeError):
        print(reader.dumps(reply), flush=True)
        if (
            not reply.fault
            and select.select([sys.stdin], [], [], COMMIT_TIMEOUT_S)[0]
            and sys.stdin.readline() == COMMIT
        ):
            stopper = stopped_by(resolve_run_dir(plan.run), host)  # meanwhile
            print(reader.dumps(Committed(stopper)), flush=True)
            if not stopper:
                return
    if reply.fault not in FAULTS_BEFORE_START:
        blame = None if reply.fault else FailureRecord(plan.attempt, host, Cause(CauseKind.NOT_KEPT, host))
        stop(plan.run, host, only=plan.rdzv_id, blame=blame)
    sys.stdout = None  # nobody listens, and there is nothing more to report


def _start_node_runner(request: StartRequest) -> StartReply:
    """Write the plan and the secrets, start the node runner inside tmux, and wait until torchrun runs."""
    host, plan = request.host, request.plan
    run = resolve_run_dir(plan.run)
    start_lock = take_lock(run.start_lock(host))
    if start_lock and is_alive(run, host) and not is_run_active(run, host):
        stop_runner(run, host)  # the new attempt copies what is left
    if start_lock:
        os.close(start_lock)  # it may have taken long, and hosts that share the directory take turns
    turn_lock = take_lock(run.turn, N_TURN_TRIES)  # of two simultaneous launches of one name, one is refused
    start_lock = take_lock(run.start_lock(host)) if turn_lock else None
    plan_hosts = {node.name for node in plan.nodes}
    is_taken = not request.again and read_plan(run).rdzv_id != plan.rdzv_id and _is_live_elsewhere(run, plan_hosts)
    if turn_lock is None or start_lock is None or is_taken or is_alive(run, host):
        return StartReply(StartFault.TAKEN, by=read_plan(run).owner)
    if (stop_record := read_stop_mark(run, host)).by and (request.again or stop_record.time != request.known_stop):
        return StartReply(StartFault.STOPPED, by=stop_record.by)
    _write_files(request, run)
    os.close(turn_lock)  # the plan tells the next one whose locks those are
    runner_argv = [*module_argv("llama405b_tools.agent.node"), str(run.path), host]
    try:
        return _wait_for_torchrun(run, host, start_session(tmux_socket(run), tmux_session(host), runner_argv))
    except RunError as error:
        run.secrets(host).unlink(missing_ok=True)
        return StartReply(StartFault.TMUX, detail=str(error))


def _is_live_elsewhere(run: RunDir, plan_hosts: set[str]) -> bool:
    """Return whether the run is alive under other names of this machine.

    Polls for a while: a launch that still waits for its turn holds its lock for a moment.
    """
    for _ in range(N_LIVE_CHECKS):
        if not find_live_names(run, plan_hosts):
            return False
        time.sleep(0.05)
    return True


def _write_files(request: StartRequest, run: RunDir) -> None:
    """Replace files of an earlier attempt with what the node runner reads."""
    host = request.host
    run.stop(host).unlink(missing_ok=True)
    if not request.again:
        dismiss_guard(run)  # the guard of an earlier launch of this name
        write_guard_note(run, host, request.guard)
    write_json(run.plan, request.plan)
    run.status(host).unlink(missing_ok=True)
    for rank in request.ranks:
        run.heartbeat(rank).unlink(missing_ok=True)
    if request.secrets:
        write_secrets(run.secrets(host), dict(request.secrets))


def _wait_for_torchrun(run: RunDir, host: str, runner_pid: int) -> StartReply:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        is_runner_alive = processes.start_time(runner_pid) is not None  # checked before its last status is read
        status = read_record(NodeStatus, run.status(host))
        if status and status.cause and status.state is NodeState.KILLED:
            return StartReply(StartFault.ENDED, cause=status.cause)
        if status and status.state not in (NodeState.STARTING, NodeState.KILLED):
            return StartReply()
        if not is_runner_alive and (stopper := stopped_by(run, host)):
            return StartReply(StartFault.STOPPED_SINCE, stopper)
        if not is_runner_alive:
            return StartReply(StartFault.ENDED)
        time.sleep(0.05)
    return StartReply(StartFault.SLOW, detail=f"{START_TIMEOUT_S:.0f}")
