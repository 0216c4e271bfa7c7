"""Start a run's part on this host, and end it again unless the operator says to keep it. Standard library."""

import contextlib
import os
import select
import signal
import sys
import time

from llama405b.contract import reader
from llama405b.contract.causes import Cause, CauseKind
from llama405b.contract.errors import RunError
from llama405b.contract.files import read_record, write_json
from llama405b.contract.own_python import own_argv
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import read_plan
from llama405b.contract.records import Blame, NodeState, NodeStatus
from llama405b_tools.remote import processes, stopping
from llama405b_tools.remote.describe import stop_mark, stopped_by
from llama405b_tools.remote.guarding import dismiss, note_guard
from llama405b_tools.remote.locks import is_alive, live_names, run_of, runs, take_lock
from llama405b_tools.remote.messages.start import (
    ANSWER_WITHIN_S,
    KEEP,
    NOT_OURS,
    START_WITHIN_S,
    Kept,
    Started,
    StartFault,
    StartRequest,
)
from llama405b_tools.remote.messages.stop_request import StopRequest
from llama405b_tools.remote.secrets import write_secrets
from llama405b_tools.remote.tmux import start_session, tmux_session, tmux_socket

# after this host is up, for all others to come up; a broken link is noticed immediately
KEEP_WITHIN_S = 2 * ANSWER_WITHIN_S

TURN_TRIES = 600  # at 0.05 s


def start(request: StartRequest) -> None:
    """Start the run here and report it; end it again unless the operator, once all hosts have reported, says to keep it."""
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
        stopping.stop(StopRequest(plan.run, host, only=plan.rdzv_id, blame=blame))
    sys.stdout = None  # nobody listens, and there is nothing more to report


def _start_node_runner(request: StartRequest) -> Started:
    """Write the plan and the secrets, start the node runner inside tmux, and wait until torchrun runs."""
    host, plan = request.host, request.plan
    run = run_of(plan.run)
    claim = take_lock(run.start_lock(host))
    if claim and is_alive(run, host) and not runs(run, host):
        stopping.stop_runner(run, host, StopRequest(plan.run, host))  # the new attempt copies what is left
    if claim:
        os.close(claim)  # it may have taken long, and hosts that share the directory take turns
    turn = take_lock(run.turn, TURN_TRIES)  # of two simultaneous launches of one name, one is refused
    claim = take_lock(run.start_lock(host)) if turn else None
    ours = {node.name for node in plan.nodes}
    others = not request.again and read_plan(run).rdzv_id != plan.rdzv_id and live_names(run, ours)
    if turn is None or claim is None or others or is_alive(run, host):
        return Started(StartFault.TAKEN, by=read_plan(run).owner)
    if (mark := stop_mark(run, host)).by and (request.again or mark.time != request.known_stop):
        return Started(StartFault.STOPPED, by=mark.by)
    _write_files(request, run)
    os.close(turn)  # the plan tells the next one whose locks those are
    runner = [*own_argv("llama405b_tools.remote.node"), str(run.path), host]
    try:
        return _await_torchrun(run, host, start_session(tmux_socket(run), tmux_session(host), runner))
    except RunError as error:
        run.secrets(host).unlink(missing_ok=True)
        return Started(StartFault.TMUX, detail=str(error))


def _write_files(request: StartRequest, run: RunDir) -> None:
    """Replace what an earlier attempt left by what the node runner reads."""
    host = request.host
    run.stop(host).unlink(missing_ok=True)
    if not request.again:
        dismiss(run)  # the guard of an earlier launch of this name
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
