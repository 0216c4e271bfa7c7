"""End a run's processes on this host and check that none is left. Standard library."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

from llama405b.contract import reader
from llama405b.contract.files import append_line, read_record, read_records, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import NO_PLAN, REHEARSAL, read_plan
from llama405b.contract.records import Blame, NodeStatus, StopMark
from llama405b_tools.remote import hostprobe, processes, sampler
from llama405b_tools.remote.describe import checkpoints_of, describe, stopped_by
from llama405b_tools.remote.guarding import dismiss, note_guard
from llama405b_tools.remote.locks import is_alive, run_of
from llama405b_tools.remote.messages.stop_request import (
    CUT,
    RUNNER_ENDS_S,
    Orphan,
    OrphansReply,
    OrphansRequest,
    StopReply,
    StopRequest,
)
from llama405b_tools.remote.tmux import END_WITHIN_S, remove_dead_sockets, tmux_session, tmux_socket


def stop(request: StopRequest) -> StopReply:
    """End every process of the run on this host, and check whether any is left."""
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
    """Record who stops the run, whose guard goes then, or why it failed; returns the guard's pid if it stays."""
    left: tuple[int, ...] = ()
    if request.by:
        write_json(run.stop(request.host), StopMark(request.by, request.grace_s, time.time()))
        note_guard(run, request.host, None)
        left = dismiss(run)
    elif request.grace_s:  # for a restart, which its guard does
        write_json(run.stop(request.host), StopMark("", request.grace_s, time.time()))
    if request.blame:
        record_blame(run, request.host, request.blame)
    return left


def _end_session(run: RunDir, host: str) -> None:
    """End the run's tmux session, if tmux has not gone and does not hang: its processes were ended."""
    session = ["kill-session", "-t", f"={tmux_session(host)}"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["tmux", "-L", tmux_socket(run), *session], capture_output=True, timeout=END_WITHIN_S, check=False
        )
    remove_dead_sockets(ending=tmux_socket(run))


def tether(request: StopRequest) -> None:
    """End the run once standard input closes, unless it says before that to end nothing: the operator's process is gone."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.stdin.readline() != CUT:
        stop(request)


def record_blame(run: RunDir, host: str, blame: Blame) -> None:
    """Record why an attempt failed, unless that is recorded already."""
    if blame.attempt not in [known.attempt for known in read_records(Blame, run.blames(host), 1)]:
        append_line(run.blames(host), reader.dumps(blame))


def stop_runner(run: RunDir, host: str, request: StopRequest) -> None:
    """Tell the node runner to end the run, and wait; if it does not end, kill it: its guardian ends the rest."""
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
