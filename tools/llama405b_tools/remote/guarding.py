"""A run's guard, as a host sees it: what it last said, and when; and the one that runs on this machine. Standard library."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from llama405b.contract.files import read_record, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import read_plan
from llama405b.contract.records import GuardState, StopMark
from llama405b_tools.remote import processes
from llama405b_tools.remote.locks import run_of
from llama405b_tools.remote.messages.guard_notes import Disk, GuardNote, MachineName, MachineRequest, NoteReply
from llama405b_tools.remote.tmux import END_WITHIN_S, guard_socket, remove_dead_sockets

SESSION = "guard"
DISMISS_WITHIN_S = 10.0


def note(request: GuardNote) -> NoteReply:
    """Write the guard's note, unless the run is not the guard's any more, or somebody has stopped both."""
    run = run_of(request.run)
    plan = read_plan(run)
    stopped = read_record(StopMark, run.stop(request.host))
    if plan.rdzv_id == request.only and not (stopped and stopped.by):
        with contextlib.suppress(OSError):  # a full disk: the answer says so
            note_guard(run, request.host, request.state)
    return NoteReply(disks_of(run.path, Path(plan.checkpoint_dir or run.path)))


def disks_of(*paths: Path) -> tuple[Disk, ...]:
    """The disks that these directories are on, each once; what cannot be asked is left out."""
    disks = {}
    for path in paths:
        with contextlib.suppress(OSError):
            disk = os.statvfs(path)
            disks[path.stat().st_dev] = Disk(str(path), disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize)
    return tuple(disks.values())


def note_guard(run: RunDir, host: str, state: GuardState | None) -> None:
    """Write what the guard said, with the time by this host's clock; None: no guard was asked for."""
    if state is None:
        run.guarded(host).unlink(missing_ok=True)
    else:
        write_json(run.guarded(host), dataclasses.replace(state, time=time.time()))


def heard_guard(run: RunDir, host: str) -> GuardState | None:
    """What this host last heard from the guard; of one that runs on this machine, whether it has died since."""
    state = read_record(GuardState, run.guarded(host))
    if state is None or not state.pid or not is_of_this_machine(state):
        return state
    return dataclasses.replace(state, died=not lives_here(state))


def machine_id() -> str:
    """Identify this boot of this machine: host name, machine ID and boot ID; two words if it has no machine ID."""
    files = (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id"))
    return " ".join(
        [socket.gethostname(), *(path.read_text(encoding="ascii").strip() for path in files if path.exists())]
    )


def identify(request: MachineRequest) -> MachineName:  # noqa: ARG001 - its type is what the agent reads
    """Tell which machine this is."""
    return MachineName(machine_id())


def is_of_this_machine(guard: GuardState) -> bool:
    """Whether a guard began on this machine, in this boot or, if the machine has an ID, an earlier one."""
    machine, here = guard.machine.split(), machine_id().split()
    return machine == here or (len(machine) == 3 and machine[:2] == here[:2])


def lives_here(guard: GuardState) -> bool:
    """Whether a guard runs on this machine now."""
    return guard.machine.split() == machine_id().split() and processes.same_process(guard.pid, guard.pid_start)


def dismiss(run: RunDir) -> tuple[int, ...]:
    """End the run's guard on this machine: a run stopped on purpose must not be resumed. Returns its pid if it stays."""
    guard = read_record(GuardState, run.guard)
    if guard is None or not lives_here(guard):
        return ()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(guard.pid, signal.SIGTERM)
    deadline = time.monotonic() + DISMISS_WITHIN_S
    while processes.same_process(guard.pid, guard.pid_start) and time.monotonic() < deadline:
        time.sleep(0.05)
    return (guard.pid,) if processes.same_process(guard.pid, guard.pid_start) else ()


def end_own_session(run: RunDir) -> None:
    """End the session that this process, a guard that is about to end, was started in."""
    if Path(os.environ.get("TMUX", "").partition(",")[0]).name == guard_socket(run):
        end_session(run)


def end_session(run: RunDir) -> None:
    """End the session that shows the log of a guard on this host, if there is one."""
    kill = ["tmux", "-L", guard_socket(run), "kill-session", "-t", f"={SESSION}"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(kill, capture_output=True, timeout=END_WITHIN_S, check=False)
    remove_dead_sockets(ending=guard_socket(run))
