"""Start a run's guard as a process on this machine or on one of the run's hosts, and follow it.

On this machine it needs no terminal; on a host of the run it outlives the operator's machine.

``connect`` and ``begin`` are called on that host. Either way the guard is one process in a session of its own, which no end of a
terminal or connection reaches; it makes its own connections to the hosts of the run, with that machine's keys, ``~/.ssh/config``
and ``known_hosts``.
"""

import contextlib
import dataclasses
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.errors import EXIT_DETACHED, EXIT_FAILED, RunError, UserError, fmt_if, last_or, reason_of
from llama405b.contract.paths import RunDir
from llama405b.contract.software import module_argv
from llama405b.spec.plan import Plan
from llama405b_tools.agent import processes
from llama405b_tools.agent.machine import check_writable_directory
from llama405b_tools.agent.messages import START_REPLY_TIMEOUT_S, START_TIMEOUT_S
from llama405b_tools.agent.processes import resolve_run_dir
from llama405b_tools.guard.guard import GuardInput
from llama405b_tools.hosts.fleet import Fleet, command_to_type, is_local, ssh_user
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError, Outcomes, failure_texts, replies
from llama405b_tools.launch.findings import place_words
from llama405b_tools.launch.preflight import fault_list
from llama405b_tools.launch.request import LaunchRequest
from llama405b_tools.run.query import STATUS_TIMEOUT_S
from llama405b_tools.run.screen import make_printer, show

POLL_S = 0.3


@dataclasses.dataclass(frozen=True, slots=True)
class GuardProcess:
    """A guard that this process started."""

    run: str
    child: "subprocess.Popen[bytes]"
    log: Path
    log_offset: int  # of its output in the log, in bytes

    @property
    def pid(self) -> int:
        """The guard's process ID."""
        return self.child.pid

    def follow(self, hosts_file: Path, *, plain: bool) -> int:
        """Print the guard's log until it ends; Ctrl-C only stops following."""
        try:
            with (
                self.log.open(encoding="utf-8", errors="replace") as log,
                contextlib.closing(make_printer(plain=plain)) as screen,
            ):
                log.seek(self.log_offset)
                rest = ""
                while True:
                    code = self.child.poll()
                    *lines, rest = (rest + log.read()).split("\n")
                    if not screen.show(lines):
                        return EXIT_DETACHED
                    if code is not None:
                        screen.show([rest] if rest else [])
                        return code if code >= 0 else EXIT_FAILED
                    time.sleep(POLL_S)
        except KeyboardInterrupt:
            stop = f"`{command_to_type('stop', hosts_file, self.run)}` stops both"
            show(f"\nDetached; the run keeps going, guarded. {stop}")
            return EXIT_DETACHED


def check_guard_directory(run: str) -> None:
    """Check that a guard can keep its record and its log here.

    Raises:
        UserError: The run's directory can be neither written nor created.
    """
    place = check_writable_directory(str(RunDir.from_name(run).path.absolute()))
    if place.fault:
        raise UserError(
            f"--restart: a guard cannot keep its log in {place.path}: {place_words(place)}; launch from another directory, "
            "or use --guard-on HOST. Nothing was started"
        )


def start_guard(guard_input: GuardInput) -> GuardProcess:
    """Start the guard of a run that is up on this machine, and wait until it watches, which it says by a pipe.

    Its input, which has secrets, goes by another. Ctrl-C leaves the guard alone.

    Raises:
        RunError: It did not start, or its log cannot be written.
    """
    run = resolve_run_dir(guard_input.plan.run)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        ready_fd, guard_fd = os.pipe()
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, guard_fd)
            log = opened.enter_context(run.guard_log.open("ab"))
            log_offset = log.tell()
            child = subprocess.Popen(
                [*module_argv("llama405b_tools.guard.guard"), str(guard_fd)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[guard_fd],
                start_new_session=True,
            )
    except OSError as error:
        raise RunError(f"{fmt_if('{}: ', error.filename)}{reason_of(error)}") from None
    threading.Thread(target=_feed, args=(child, reader.dumps(guard_input).encode())).start()
    process = GuardProcess(run.name, child, run.guard_log, log_offset)
    with contextlib.closing(os.fdopen(ready_fd, "rb", 0)) as ready:
        try:
            is_heard = bool(select.select([ready], [], [], START_TIMEOUT_S)[0])
        except KeyboardInterrupt:
            show(f"guard starting as pid {child.pid}; its log: {process.log}")
            raise
        if is_heard and ready.read(1):
            return process
    child.kill()
    child.wait()
    with run.guard_log.open(encoding="utf-8", errors="replace") as text:
        text.seek(log_offset)
        silence = "" if is_heard else f"it said nothing within {START_TIMEOUT_S:.0f} s"
        raise RunError(f"it did not start ({last_or(text.read().splitlines(), silence)})")


def _feed(child: "subprocess.Popen[bytes]", data: bytes) -> None:
    """Write a process's input, of any size; one that has ended takes none."""
    assert child.stdin
    with contextlib.suppress(OSError), contextlib.closing(child.stdin):
        child.stdin.write(data)


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectReply:
    """The machine of each host, and why other hosts could not be queried."""

    machines: Mapping[str, str]
    faults: Mapping[str, str]


def check_guard_host(name: str, request: LaunchRequest, fleet: Fleet) -> None:
    """Check that a host can guard the run.

    Raises:
        UserError: It is not in the hosts file, or cannot connect to all hosts of the run.
        RunError: It cannot be asked.
    """
    if name not in fleet.hosts:
        raise UserError(f"--guard-on: {name!r} is not in {request.hosts_file}; name a host of the run")
    try:
        reply = fleet.call(name, connect, START_REPLY_TIMEOUT_S, portable_hosts(fleet))
    except HostError as error:
        raise RunError(f"--guard-on: {name}: {error}") from None
    faults = dict(reply.faults)
    for other, machine in replies(_ask_machines(fleet)).items():
        if reply.machines.get(other, machine) != machine:
            faults[other] = f"it is another machine ({reply.machines[other].split()[0]}) than from here"
    if faults:
        why = fault_list(faults, len(fleet.hosts), "")
        raise UserError(
            f"--guard-on: from {name}, {why}; a guard there uses that host's own SSH key and known_hosts. Nothing was started"
        )


def begin_guard_on(name: str, request: LaunchRequest, plan: Plan, fleet: Fleet) -> str:
    """Start the guard of a running run on a host; return where it runs, as text.

    Raises:
        RunError: It did not start.
    """
    guard_input = GuardInput(request, portable_hosts(fleet), plan)
    try:
        pid, fault = fleet.call(name, begin, START_REPLY_TIMEOUT_S, guard_input)
    except HostError as error:
        raise RunError(f"{name}: {error}") from None
    if fault:
        raise RunError(f"{name}: {fault}")
    permission = "close this terminal" if is_local(fleet.hosts[name]) else "switch this machine off"
    return f"on {name} as pid {pid}; you can {permission}; its log there: {RunDir.from_name(plan.run).guard_log}"


def portable_hosts(fleet: Fleet) -> tuple[Host, ...]:
    """Return the hosts with everything that only this machine knows: interpreter, directory and user."""
    return tuple(
        dataclasses.replace(host, python=fleet.python(name), workdir=fleet.workdir(name), user=ssh_user(host))
        for name, host in fleet.hosts.items()
    )


def connect(hosts: tuple[Host, ...]) -> ConnectReply:
    """Ask all hosts from this one which machines they are, as a guard here would."""
    with Fleet(hosts) as fleet:
        outcomes = _ask_machines(fleet)
        return ConnectReply(replies(outcomes), failure_texts(outcomes))


def _ask_machines(fleet: Fleet) -> Outcomes[str]:
    return fleet.call_all(processes.machine_id, STATUS_TIMEOUT_S)


def begin(guard_input: GuardInput) -> tuple[int, str]:
    """Start the guard on this host; return its process ID, or why it did not start."""
    run = resolve_run_dir(guard_input.plan.run)
    try:
        processes.dismiss_guard(run)  # the guard of an earlier launch of this name
        run.guard.unlink(missing_ok=True)
        return start_guard(guard_input).pid, ""
    except (RunError, OSError) as error:
        return 0, str(error)
