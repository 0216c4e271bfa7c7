"""Start a run's guard as a process on this machine or on one of the run's hosts, and follow it.

On this machine it needs no terminal; on a host of the run it outlives the operator's machine.

``connect`` and ``begin`` are actions of the agent on that host. The guard runs in its own tmux server there, and makes
its own connections to the hosts of the run, with that host's keys, ``~/.ssh/config`` and ``known_hosts``.
"""

import contextlib
import dataclasses
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.errors import FAILED, STOPPED_FOLLOWING, RunError, UserError, given, last_of, reason_of
from llama405b.contract.files import read_record
from llama405b.contract.paths import RunDir
from llama405b.contract.records import GuardState
from llama405b.contract.software import own_argv
from llama405b.spec.plan import Plan
from llama405b_tools.agent import processes
from llama405b_tools.agent.machine import place_of
from llama405b_tools.agent.messages import ANSWER_WITHIN_S, START_WITHIN_S, MachineName, MachineRequest
from llama405b_tools.agent.processes import guard_socket, run_of, start_session, write_private
from llama405b_tools.guard.guard import GuardInput
from llama405b_tools.hosts.fleet import Fleet, is_local, program_name, ssh_user
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError, Outcomes, replies, unanswered
from llama405b_tools.launch.preflight import fault_list, place_words
from llama405b_tools.launch.request import LaunchRequest
from llama405b_tools.run.query import STATUS_TIMEOUT_S
from llama405b_tools.run.screen import printer, show

POLL_S = 0.3


@dataclasses.dataclass(frozen=True, slots=True)
class GuardProcess:
    """A guard that this process started."""

    run: str
    child: "subprocess.Popen[bytes]"
    log: Path
    begin: int  # of its output in the log, in bytes

    @property
    def pid(self) -> int:
        """The guard's process ID."""
        return self.child.pid

    def follow(self, hosts: str, *, plain: bool) -> int:
        """Print the guard's log until it ends; Ctrl-C only stops following."""
        try:
            with (
                self.log.open(encoding="utf-8", errors="replace") as log,
                contextlib.closing(printer(plain=plain)) as screen,
            ):
                log.seek(self.begin)
                rest = ""
                while True:
                    code = self.child.poll()
                    *lines, rest = (rest + log.read()).split("\n")
                    if not screen.show(lines):
                        return STOPPED_FOLLOWING
                    if code is not None:
                        screen.show([rest] if rest else [])
                        return code if code >= 0 else FAILED
                    time.sleep(POLL_S)
        except KeyboardInterrupt:
            stop = f"`{program_name()} stop{hosts} --run {self.run}` stops both"
            show(f"\nDetached; the run keeps going, guarded. {stop}")
            return STOPPED_FOLLOWING


def check_place(run: str) -> None:
    """Check that a guard can keep its record and its log here.

    Raises:
        UserError: The run's directory can be neither written nor created.
    """
    place = place_of(str(RunDir.here(run).path.absolute()))
    if place.fault:
        raise UserError(
            f"--restart: a guard cannot keep its log in {place.path}: {place_words(place)}; launch from another directory, "
            "or use --guard-on HOST. Nothing was started"
        )


def spawn(request: LaunchRequest, hosts: Sequence[Host], plan: Plan) -> GuardProcess:
    """Start the guard of a run that is up, in a session of its own.

    Raises:
        RunError: It cannot be started, or its log cannot be written.
    """
    try:
        return _spawn(GuardInput(request, tuple(hosts), plan), RunDir.here(plan.run).guard_log)
    except OSError as error:
        raise RunError(f"{given('{}: ', error.filename)}{reason_of(error)}") from None


def _spawn(order: GuardInput, path: Path) -> GuardProcess:
    """Start the guard's process; its input goes through a pipe, as it has secrets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        begin = log.tell()
        child = subprocess.Popen(
            own_argv("llama405b_tools.guard.guard"),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    assert child.stdin
    child.stdin.write(reader.dumps(order).encode())
    child.stdin.close()
    return GuardProcess(order.plan.run, child, path, begin)


# $0: the guard's log, $1: its order, then its command. The pane only shows the log: closing it does not end the guard.
LINE = 'order=$1; shift; { rm "$order"; exec "$@"; } <"$order" >>"$0" 2>&1 & exec tail --pid=$! -n 100 -F "$0"'


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectRequest:
    """Ask a host to connect to these hosts, as a guard on it would."""

    hosts: tuple[Host, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Connected:
    """The machine of each host, and why other hosts could not be queried."""

    machines: Mapping[str, str]
    faults: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Begun:
    """The guard's process ID on its host, or why it did not start."""

    pid: int = 0
    fault: str = ""


def check_reach(name: str, request: LaunchRequest, fleet: Fleet) -> None:
    """Check that a host can guard the run.

    Raises:
        UserError: It is not in the hosts file, or cannot connect to all hosts of the run.
        RunError: It cannot be asked.
    """
    if name not in fleet.hosts:
        raise UserError(f"--guard-on: {name!r} is not in {request.hosts_file}; name a host of the run")
    try:
        connected = fleet.ask(name, "connect", ConnectRequest(for_others(fleet)), Connected, ANSWER_WITHIN_S)
    except HostError as error:
        raise RunError(f"--guard-on: {name}: {error}") from None
    faults = dict(connected.faults)
    for other, found in replies(_ask_machines(fleet)).items():
        if connected.machines.get(other, found.machine) != found.machine:
            faults[other] = f"it is another machine ({connected.machines[other].split()[0]}) than from here"
    if faults:
        why = fault_list(faults, len(fleet.hosts), "")
        raise UserError(
            f"--guard-on: from {name}, {why}; a guard there uses that host's own SSH key and known_hosts. Nothing was started"
        )


def begin_on(name: str, request: LaunchRequest, plan: Plan, fleet: Fleet) -> str:
    """Start the guard of a running run on a host; return where it runs, as text.

    Raises:
        RunError: It did not start.
    """
    order = GuardInput(request, for_others(fleet), plan)
    try:
        begun = fleet.ask(name, "begin", order, Begun, ANSWER_WITHIN_S)
    except HostError as error:
        raise RunError(f"{name}: {error}") from None
    if begun.fault:
        raise RunError(f"{name}: {begun.fault}")
    may = "close this terminal" if is_local(fleet.hosts[name]) else "switch this machine off"
    return f"on {name} as pid {begun.pid}; you can {may}; its log there: {RunDir.here(plan.run).guard_log}"


def for_others(fleet: Fleet) -> tuple[Host, ...]:
    """Return the hosts with everything that only this machine knows: interpreter, directory and user."""
    return tuple(
        dataclasses.replace(host, python=fleet.python(name), workdir=fleet.workdir(name), user=ssh_user(host))
        for name, host in fleet.hosts.items()
    )


def connect(request: ConnectRequest) -> Connected:
    """Ask all hosts from this one which machines they are."""
    with Fleet(request.hosts) as fleet:
        found = _ask_machines(fleet)
        return Connected({name: each.machine for name, each in replies(found).items()}, unanswered(found))


def _ask_machines(fleet: Fleet) -> Outcomes[MachineName]:
    return fleet.ask_all("identify", dict.fromkeys(fleet.hosts, MachineRequest()), MachineName, STATUS_TIMEOUT_S)


def begin(request: GuardInput) -> Begun:
    """Start the guard on this host, and wait until it watches."""
    run = run_of(request.plan.run)
    processes.dismiss_guard(run)  # the guard of an earlier launch of this name
    processes.end_guard_session(run)
    run.guard.unlink(missing_ok=True)
    order = run.guard_order(request.request.guard_on)
    write_private(order, reader.dumps(request))
    run.guard_log.touch()
    argv = ["sh", "-c", LINE, str(run.guard_log), str(order), *own_argv("llama405b_tools.guard.guard")]
    try:
        pane = start_session(guard_socket(run), processes.GUARD_SESSION, argv)
    except RunError as error:
        order.unlink(missing_ok=True)
        return Begun(fault=f"tmux could not start a session ({error})")
    deadline = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline and processes.start_time(pane) is not None:
        if (state := read_record(GuardState, run.guard)) and state.pid:
            return Begun(state.pid)
        time.sleep(0.05)
    said = last_of(run.guard_log.read_text(encoding="utf-8", errors="replace").splitlines())
    return Begun(fault=f"the guard did not start ({said})")
