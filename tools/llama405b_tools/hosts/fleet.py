"""All hosts at once: one connection and one agent call per host, bounded concurrency. Makes no decisions."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import getpass
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from llama405b.contract import reader
from llama405b.contract.phrases import given, last_of
from llama405b_tools.hosts.dialogue import Dialogue
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.login_shell import own_line, shell_path
from llama405b_tools.hosts.printed_commands import command_to_type, file_of
from llama405b_tools.hosts.ssh_config import options_of
from llama405b_tools.hosts.transport import Connection, HostError, Local, Stream, read_message
from llama405b_tools.machine import program_output

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_AT_ONCE = 64
TOO_OLD = re.compile(r"LLAMA405B_PYTHON_TOO_OLD (\S+)")  # from the agent
T = TypeVar("T")


@functools.cache
def is_local(host: Host) -> bool:
    """Return whether a host's line names this machine, which then needs neither sshd nor a key to itself.

    Another user or a port in the line means SSH. ``ssh.SameMachine`` detects all other ways to this machine.
    """
    if host.user not in ("", getpass.getuser()) or host.port:
        return False
    if host.loopback or host.name == socket.gethostname():
        return True
    with contextlib.suppress(OSError), socket.socket() as bound:  # only this machine's addresses can be bound
        bound.bind((host.address, 0))
        return bool(host.address)
    return False


class Fleet:
    """Connections to hosts, opened when first needed and kept."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.connections: dict[str, Connection] = {}
        self.opening: dict[str, concurrent.futures.Future[Connection]] = {}
        self.pool = concurrent.futures.ThreadPoolExecutor(MAX_AT_ONCE, "host")

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exc: object) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        for connection in list(self.connections.values()):
            connection.close()

    def join(self, hosts: Iterable[Host]) -> None:
        """Add hosts, each to be reached by its name, else by its address on the training network."""
        added = {host.name: host for host in hosts}
        self.hosts |= added
        for name, found in self.each(self.connection, added).items():
            if isinstance(found, HostError) and added[name].address:
                self.hosts[name] = dataclasses.replace(added[name], name=added[name].address)

    def among(self, names: Collection[str]) -> "Fleet":
        """Return the same fleet with some of its hosts alone; it shares the connections, and is not to be closed."""
        part = copy.copy(self)
        part.hosts = {name: host for name, host in self.hosts.items() if name in names}
        return part

    def slots(self, name: str) -> int:
        """How many GPUs a host should have; 0: unknown, as of several names of this machine, which share them."""
        return 0 if self.hosts[name].loopback and len(self.hosts) > 1 else self.hosts[name].slots

    def each(self, act: Callable[[str], T], names: Iterable[str] | None = None) -> dict[str, T | HostError]:
        """Call ``act`` for all hosts in parallel; a host that fails does not hold back the others' results."""
        futures = {name: self.pool.submit(act, name) for name in (self.hosts if names is None else names)}
        outcomes: dict[str, T | HostError] = {}
        for name, future in futures.items():
            try:
                outcomes[name] = future.result()
            except HostError as error:
                outcomes[name] = error
            except BaseException:  # Ctrl-C: start nothing that has not started
                for other in futures.values():
                    other.cancel()
                raise
        return outcomes

    def ask_all(
        self, action: str, requests: Mapping[str, "DataclassInstance"], reply: type[T], timeout_s: float
    ) -> dict[str, T | HostError]:
        """Run one action of the agent on each host that has a request."""
        return self.each(lambda name: self.ask(name, action, requests[name], reply, timeout_s), requests)

    def ask(self, name: str, action: str, request: "DataclassInstance", reply: type[T], timeout_s: float) -> T:
        """Run one action of the agent on a host.

        Raises:
            HostError: The host cannot be reached, the agent cannot run on it, or its answer is invalid.
        """
        connection = self.connection(name)
        try:
            result = connection.run(self.command(name, action), reader.dumps(request) + "\n", timeout_s)
        except HostError:
            self.forget(name)
            raise
        last = last_of(result.out.splitlines())
        if result.code or not last.startswith("{"):
            said = last_of(result.err.strip().splitlines(), f"exit code {result.code}")
            raise self.fault_of(name, said, cannot_run=result.code in (126, 127))
        return read_message(reply, last, "its answer")

    def stream(self, name: str, action: str, request: "DataclassInstance") -> Stream:
        """Run an action of the agent that continues until its standard input is closed.

        Raises:
            HostError: The host cannot be reached.
        """
        command = f"exec 2>&1; {self.command(name, action)}"  # so that its last words can be told
        return self.connection(name).stream(command, reader.dumps(request) + "\n")

    def dialogue(self, name: str, action: str, request: "DataclassInstance") -> Dialogue:
        """Run an action of the agent that answers, and may be told more.

        Raises:
            HostError: The host cannot be reached.
        """
        return Dialogue(self.stream(name, action, request), lambda said: self.fault_of(name, said))

    def fault_of(self, name: str, said: str, *, cannot_run: bool = False) -> HostError:
        """Explain why the agent did not run on a host, from the last line that the shell or Python wrote there."""
        python = self.python(name)
        workdir = self.workdir(name)
        setup = self.command_to_type("setup")
        if too_old := TOO_OLD.search(said):
            return HostError(
                f"{python} is Python {too_old[1]}, but llama405b needs 3.11 or newer; run `{setup}`, or set python="
            )
        if (absent := program_output.NO_MODULE.search(said)) and not absent[1].startswith("llama405b"):
            return HostError(f"{python} has no {absent[1]}, which this version needs; run `{setup}` again")
        if absent:
            return HostError(f"{python} has no llama405b in {workdir}; run `{setup}`, or set workdir= or python=")
        if program_output.NO_DIRECTORY.search(said):
            return HostError(f"there is no directory {workdir}; run `{setup}`, or set workdir=")
        if cannot_run or program_output.NO_PROGRAM.search(said):
            return HostError(f"{python} cannot be run; run `{setup}`, or set python=")
        if not said:
            return HostError("the connection was lost, or the program on the host ended")
        return HostError(f"the agent failed ({said})")

    def connection(self, name: str) -> Connection:
        """Return the kept connection to a host, or open one, which all wait for who need it meanwhile.

        Raises:
            HostError: It cannot be opened.
        """
        mine = concurrent.futures.Future[Connection]()
        opening = self.opening.setdefault(name, mine)
        if opening is mine:
            try:
                kept = self.connections.get(name)
                if kept is None or not kept.is_open():  # its sshd may close idle ones
                    self.forget(name)  # those to its jump hosts may be open
                    kept = self.connections[name] = _connect(self.hosts[name])
                mine.set_result(kept)
            except BaseException as error:  # noqa: BLE001 - raised below, in each that waits
                mine.set_exception(error)
            del self.opening[name]
        return opening.result()

    def forget(self, name: str, *, unless_open: bool = False) -> None:
        """Close a broken connection; the next call opens a new one. ``unless_open``: others may still be using it."""
        if unless_open and name in self.connections and self.connections[name].is_open():
            return
        if connection := self.connections.pop(name, None):
            connection.close()

    def command_to_type(self, verb: str, run: str = "") -> str:
        """Return a command about these hosts, to be typed by the user."""
        return command_to_type(verb, file_of(next(iter(self.hosts.values()))), run)

    def command(self, name: str, action: str) -> str:
        """Return the shell line for an action on a host."""
        return agent_command(self.python(name), self.workdir(name), action, self.hosts[name].prefix)

    def python(self, name: str) -> str:
        """Return the path of the interpreter on a host."""
        return self.hosts[name].python or sys.executable

    def workdir(self, name: str) -> str:
        """Return the working directory on a host."""
        return self.hosts[name].workdir or os.getcwd()  # noqa: PTH109


def _connect(host: Host) -> Connection:
    if is_local(host):
        return Local()
    from llama405b_tools.hosts.ssh import SameMachine, Ssh  # paramiko takes a while to import

    try:
        return Ssh(host)
    except SameMachine:
        return Local()


def agent_command(python: str, workdir: str, action: str, prefix: str = "") -> str:
    """Build the shell line that runs one action of the agent on a host; its request goes to standard input."""
    start = own_line(shell_path(python), "llama405b_tools.remote.agent")
    return f"{given('{} && ', prefix)}cd {shell_path(workdir)} && {start} {shlex.quote(action)}"


def ssh_user(host: Host) -> str:
    """Return the user that SSH logs in as: of the hosts file, of ~/.ssh/config, or this process's."""
    if host.user or is_local(host):
        return host.user or getpass.getuser()
    return options_of(host.name, port=host.port).user


def ssh_address(host: Host) -> str:
    """Return the address that SSH uses for a host."""
    if host.loopback or is_local(host):
        return host.name
    return options_of(host.name, host.user, host.port).hostname
