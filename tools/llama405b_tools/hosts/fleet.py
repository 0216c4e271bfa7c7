"""Many hosts at once: the hosts file, connections, and sessions with the agents on the hosts. Makes no decisions.

- one connection and one agent call per host, with bounded concurrency;
- a running program on a host: its replies, lines of JSON with a time limit each, or its output as it comes;
- parts of commands that are printed for the user to type;
- the hosts file, and what ``setup`` recorded about each host.
"""

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import getpass
import os
import queue
import re
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from llama405b.contract import reader
from llama405b.contract.errors import RunError, UserError, given, last_of, reason_of
from llama405b.contract.files import refuse_others_writing, write_json
from llama405b_tools import parsers
from llama405b_tools.hosts.inventory import Host, parse_hosts
from llama405b_tools.hosts.transport import (
    Connection,
    HostError,
    Local,
    Stream,
    options_of,
    own_line,
    read_message,
    shell_path,
)
from llama405b_tools.text.words import clean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
END = "llama405b-exit-code "  # after the output
# All that the line starts is in this shell's process group, whose other processes end with standard input. On one line, for csh.
WHILE_OPEN = (
    "trap : TERM; exec 3<&0 </dev/null 2>&1; {{ while read -r _; do :; done <&3; kill 0; }} >/dev/null 2>&1 & watcher=$!; "
    "({line}) 3<&-; code=$?; exec 2>/dev/null; kill $watcher; echo; echo {end}$code"
)


def _failed(said: str) -> HostError:
    return HostError(
        f"the connection was lost or the program on the host failed before it answered{given(' ({})', said)}"
    )


class Dialogue:
    """Exchanges JSON lines with a program over a stream."""

    def __init__(self, stream: Stream, fault_of: Callable[[str], HostError] = _failed) -> None:
        """``fault_of``: says why the program ended, from its last words."""
        self.stream, self.fault_of = stream, fault_of
        self.answers: queue.Queue[tuple[str, float] | None] = queue.Queue()
        self.heard_at = 0.0  # when the last answer arrived, by this machine's clock
        self.last_words = ""  # its last output that was not an answer
        threading.Thread(target=self._read, daemon=True).start()

    def answer(self, kind: type[T], timeout_s: float) -> T:
        """Return the next reply.

        Raises:
            HostError: It does not come within ``timeout_s``, the stream ends, or it is malformed.
        """
        try:
            found = self.answers.get(timeout=timeout_s)
        except queue.Empty:
            raise HostError(f"did not answer within {timeout_s:.0f} s") from None
        if found is None:
            raise self.fault_of(self.last_words)
        text, self.heard_at = found
        return read_message(kind, text, "its answer")

    def say(self, text: str) -> None:
        """Write to its standard input.

        Raises:
            HostError: The program is gone.
        """
        self.stream.send(text)

    def end_input(self) -> None:
        """Close its standard input, which ends it."""
        self.stream.end_input()

    def close(self, within_s: float = 15.0) -> None:
        """Wait for it to end after ``end_input``; give up after ``within_s``."""
        deadline = time.monotonic() + max(0.0, within_s)
        with contextlib.suppress(queue.Empty):
            while self.answers.get(timeout=max(0.0, deadline - time.monotonic())) is not None:
                pass
        self.stream.close()

    def _read(self) -> None:
        for line in self.stream:
            if line.startswith("{"):
                self.answers.put((line, time.time()))
            else:
                self.last_words = line.strip()[:200] or self.last_words
        self.answers.put(None)


def run_streaming(
    connection: Connection,
    line: str,
    seen: Callable[[str], object],
    began: Callable[[Stream], object] = lambda _stream: None,
) -> str:
    """Run a shell line while the connection holds; return its exit code, '' if the connection broke.

    The command and its children that honor SIGTERM end when its standard input closes or the connection breaks.

    ``seen``: gets each line of its output that is not empty, cleaned; ``began``: gets its stream.

    Raises:
        HostError: It cannot be run.
    """
    code = ""
    stream = connection.stream(WHILE_OPEN.format(line=line, end=END), "")
    began(stream)
    for each in stream:
        text = clean(each.rstrip())
        if text.startswith(END):
            code = text.removeprefix(END)
        elif text:
            seen(text)
    return code


def program_name() -> str:
    """Return the program's name as this terminal finds it, for commands to type."""
    if shutil.which("llama405b"):
        return "llama405b"
    beside = Path(sys.executable).parent / "llama405b"
    if not beside.exists():
        return f"{sys.executable} -m llama405b_tools.cli"
    with contextlib.suppress(ValueError):  # it is not below the current directory
        beside = beside.relative_to(Path.cwd())
    return str(beside)


def command_to_type(verb: str, hosts_file: Path | None, run: str = "") -> str:
    """Return a command to type here: the program, the hosts file (None for a Slurm job) and the run."""
    hosts = hosts_argument(hosts_file) if hosts_file else ""
    return f"{program_name()} {verb}{hosts}{given(' --run {}', run)}"


def file_of(host: Host) -> Path | None:
    """Return the hosts file that a host is from; None for the node of a Slurm job."""
    file = host.where.rpartition(":")[0]
    return Path(file) if file else None


def hosts_argument(hosts_file: Path) -> str:
    """Return the argument with which a printed command finds the hosts file."""
    return "" if hosts_file == Path("hosts") else f" {shlex.quote(str(hosts_file))}"


MAX_AT_ONCE = 64
TOO_OLD = re.compile(r"LLAMA405B_PYTHON_TOO_OLD (\S+)")  # from the agent


@functools.cache
def is_local(host: Host) -> bool:
    """Return whether a host's line names this machine, so that it needs neither sshd nor a key to itself.

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
    """Connections to hosts, opened on first use and kept."""

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
        """Add hosts, each reached by its name, or else by its address on the training network."""
        added = {host.name: host for host in hosts}
        self.hosts |= added
        for name, found in self.each(self.connection, added).items():
            if isinstance(found, HostError) and added[name].address:
                self.hosts[name] = dataclasses.replace(added[name], name=added[name].address)

    def among(self, names: Collection[str]) -> "Fleet":
        """Return the same fleet with only some of its hosts. It shares the connections and must not be closed."""
        part = copy.copy(self)
        part.hosts = {name: host for name, host in self.hosts.items() if name in names}
        return part

    def slots(self, name: str) -> int:
        """Return how many GPUs a host should have; 0: unknown.

        It is unknown for several names of this machine, which share its GPUs.
        """
        return 0 if self.hosts[name].loopback and len(self.hosts) > 1 else self.hosts[name].slots

    def each(self, act: Callable[[str], T], names: Iterable[str] | None = None) -> dict[str, T | HostError]:
        """Call ``act`` for all hosts in parallel; a failing host does not delay the others' results."""
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
        """Run an action of the agent that replies and accepts further messages.

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
        if (absent := parsers.NO_MODULE.search(said)) and not absent[1].startswith("llama405b"):
            return HostError(f"{python} has no {absent[1]}; this version needs it: run `{setup}` again")
        if absent:
            return HostError(f"{python} has no llama405b in {workdir}; run `{setup}`, or set workdir= or python=")
        if parsers.NO_DIRECTORY.search(said):
            return HostError(f"there is no directory {workdir}; run `{setup}`, or set workdir=")
        if cannot_run or re.match(rf"\S*sh:.*{re.escape(PurePosixPath(python).name)}\s?: ", said):  # in any language
            return HostError(f"{python} cannot be run; run `{setup}`, or set python=")
        if not said:
            return HostError("the connection was lost or the program on the host ended")
        return HostError(f"the agent failed ({said})")

    def connection(self, name: str) -> Connection:
        """Return the open connection to a host, or open one; concurrent callers wait for the same one.

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
    start = own_line(shell_path(python), "llama405b_tools.agent.agent")
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


MAX_CHARACTERS = 4 << 20


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Read a hosts file.

    Raises:
        UserError: It cannot be read, or a line is invalid.
    """
    if not str(path).isprintable():
        raise UserError(f"{str(path)!r}: the name of a hosts file cannot contain control characters; rename it")
    try:
        refuse_others_writing(path)
        if not path.is_file():  # the later commands read it again, and opening a FIFO waits for its writer
            raise UserError(f"{path}: is a directory, FIFO or device; name a file with one host per line")
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error)
        raise UserError(
            f"{path}: cannot be read ({why}); pass the path of a hosts file (one host per line), or cd to its directory"
        ) from None
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{path}: is too large for a hosts file; name a file with one host per line")
    uses = read_uses()
    return tuple(_use_of(host, uses).on(host) for host in parse_hosts(text, str(path)))


def state_directory() -> Path:
    """Return where this machine keeps state across commands."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "llama405b"


def setup_path() -> Path:
    """Return the file in which ``setup`` records installations, whichever hosts file named the host."""
    return state_directory() / "setup.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """What ``setup`` installed on a host, for all later commands."""

    python: str
    workdir: str
    prefix: str  # a shell line that runs before everything else

    def on(self, host: Host) -> Host:
        """Return the host with this installation's settings, except where its line sets its own."""
        python, workdir = host.python or self.python, host.workdir or self.workdir
        return dataclasses.replace(host, python=python, workdir=workdir, prefix=self.prefix)


NOT_SET_UP = Use("", "", "")
WORKDIR = "~/llama405b"  # where setup puts the project on a host whose line does not say
Uses = Mapping[str, Sequence[Use]]  # by host and user, one per directory; the last one made comes last


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    hosts: Mapping[str, tuple[Use, ...]]


def _key(host: Host) -> str:
    """Return a host as its line addresses it, with the user; this machine has one name."""
    name = host.name
    if host.loopback:
        name = "localhost"
    return f"{host.user}@{name}:{host.port or 22}"


def _use_of(host: Host, uses: Uses) -> Use:
    """Return what setup installed on a host.

    In the line's directory; if the line has none, in the default one, else in any other.
    """
    by_workdir = {use.workdir: use for use in uses.get(_key(host), ())}
    if host.workdir or is_local(host):
        return by_workdir.get(host.workdir or str(Path.cwd()), NOT_SET_UP)
    return by_workdir.get(WORKDIR) or next(reversed(by_workdir.values()), NOT_SET_UP)


def read_uses() -> Uses:
    """Read what ``setup`` recorded."""
    path = setup_path()
    if not path.is_file():
        return {}
    refuse_others_writing(path)
    try:
        return reader.loads(_Record, path.read_text(encoding="utf-8"), path.name).hosts
    except (OSError, ValueError):
        raise UserError(f"{path}: not written by setup; delete it, and run `{program_name()} setup` again") from None


def write_uses(made: Iterable[tuple[Host, Use]]) -> None:
    """Add new installations to the records of ``setup``.

    Raises:
        RunError: The file cannot be written.
    """
    uses = {key: list(found) for key, found in read_uses().items()}
    for host, use in made:
        earlier = [each for each in uses.get(_key(host), ()) if each.workdir != use.workdir]
        uses[_key(host)] = [*earlier, use]
    try:
        write_json(setup_path(), _Record({key: tuple(found) for key, found in uses.items()}))
    except OSError as error:
        raise RunError(
            f"{setup_path()}: cannot be written ({reason_of(error)}); make it writable, and run setup again"
        ) from None
